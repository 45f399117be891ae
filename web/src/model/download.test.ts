// Downloads from a real server that breaks off, falls silent, changes its file and refuses.

import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { after, before, beforeEach, test } from "node:test";
import { Cancelled, IntegrityError, NetworkError } from "../errors.js";
import { download, type DownloadOptions } from "./download.js";
import { serveFile, type FileServer } from "./file_server.js";

const FILE = randomBytes(300_000);
let server: FileServer;

before(async () => {
  server = await serveFile(FILE);
});
after(() => server.close());
beforeEach(() => {
  server.content = FILE;
  server.etag = '"v1"';
  server.ranges.length = server.faults.length = 0;
});

/** The file as its pieces put it together. */
async function fetched(options: Partial<DownloadOptions> = {}, start: Uint8Array = new Uint8Array(0)): Promise<Buffer> {
  const size = options.size ?? FILE.length;
  let parts = [start];
  let at = start.length;
  for await (const piece of download(server.url, { delays: [1, 1, 1], ...options, size, offset: start.length })) {
    if (piece.at !== at) {
      assert.equal(piece.at, 0);
      parts = [];
    }
    parts.push(piece.bytes);
    at = piece.at + piece.bytes.length;
  }
  return Buffer.concat(parts);
}

test("the whole file, one request without a range", async () => {
  const seen: (string | null)[] = [];
  assert.deepEqual(await fetched({ onEtag: (etag) => seen.push(etag) }), FILE);
  assert.deepEqual(server.ranges, [""]);
  assert.deepEqual(seen, ['"v1"']);
});

test("a broken connection is resumed where it broke", async () => {
  server.faults.push(100_000, 50_000);
  assert.deepEqual(await fetched(), FILE);
  assert.equal(server.ranges.length, 3);
  assert.match(server.ranges[1]!, /^bytes=\d+-$/);
});

test("a download goes on from the bytes that are there", async () => {
  assert.deepEqual(await fetched({ etag: '"v1"' }, FILE.subarray(0, 123_456)), FILE);
  assert.deepEqual(server.ranges, ["bytes=123456-"]);
});

test("a file that changed meanwhile starts over", async () => {
  server.content = randomBytes(FILE.length);
  server.etag = '"v2"';
  assert.deepEqual(await fetched({ etag: '"v1"' }, FILE.subarray(0, 1000)), server.content);
});

test("a server that answers 5xx is asked again", async () => {
  server.faults.push({ status: 503 }, { status: 500 });
  assert.deepEqual(await fetched(), FILE);
});

test("a client error is final, and says what the server said", async () => {
  server.faults.push({ status: 404 });
  await assert.rejects(fetched(), (error: Error) => error instanceof NetworkError && error.message.includes("404 Not Found"));
  assert.equal(server.ranges.length, 1);
});

test("retries end, counted from the last byte that came", async () => {
  server.faults.push(1000, { status: 500 }, { status: 500 }, { status: 500 }, { status: 500 });
  await assert.rejects(fetched(), (error: Error) => error instanceof NetworkError && error.message.includes("500"));
  assert.equal(server.ranges.length, 1 + 3);
});

test("a server that is not there", async () => {
  const gone = await serveFile(FILE);
  await gone.close();
  const pieces = download(gone.url, { size: FILE.length, delays: [1] });
  await assert.rejects(pieces.next(), NetworkError);
});

test("a connection that falls silent is given up and tried again", async () => {
  server.faults.push("silent");
  assert.deepEqual(await fetched({ stallMs: 200 }), FILE);
  assert.equal(server.ranges.length, 2);
});

test("a file of another size is refused before it is fetched", async () => {
  await assert.rejects(fetched({ size: FILE.length - 1 }), (error: Error) => error instanceof IntegrityError && error.message.includes("300000 bytes"));
});

test("cancel ends a download, also while it waits for a retry", async () => {
  const controller = new AbortController();
  server.faults.push("silent");
  const reading = fetched({ signal: controller.signal });
  setTimeout(() => controller.abort(), 50);
  await assert.rejects(reading, Cancelled);

  const later = new AbortController();
  server.faults.push({ status: 500 });
  const pausing = fetched({ signal: later.signal, delays: [60_000] });
  setTimeout(() => later.abort(), 50);
  await assert.rejects(pausing, Cancelled);
});
