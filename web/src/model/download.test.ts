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
  server.ranged = true;
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

test("a connection that breaks again and again, but brings bytes each time, is no reason to give up", async () => {
  server.faults.push(...new Array<number>(6).fill(20_000));
  const attempts: number[] = [];
  assert.deepEqual(await fetched({ delays: [1, 1], onRetry: (next) => attempts.push(next.attempt) }), FILE);
  assert.deepEqual(attempts, [1, 1, 1, 1, 1, 1]);
});

for (const [name, faults] of [
  ["at the same byte", [100_000, 100_000, 100_000, 100_000, 100_000]],
  ["a little later each time", [100_000, 110_000, 120_000, 130_000, 140_000]],
] as const) {
  test(`a server without ranges that breaks off ${name} is given up after the tries that there are`, async () => {
    server.ranged = false;
    server.faults.push(...faults);
    const words = /could not be fetched: the answer ended at byte \d+ of 300000; the server does not answer ranges, so that each try has to start over, and 4 ended early$/;
    const waits: unknown[] = [];
    const fetching = fetched({ delays: [1, 2, 3], onRetry: (next) => waits.push(next) });
    await assert.rejects(fetching, (error: Error) => error instanceof NetworkError && words.test(error.message));
    assert.equal(server.ranges.length, 4);
    assert.deepEqual(waits, [{ attempt: 1, in: 0.001 }, { attempt: 2, in: 0.002 }, { attempt: 3, in: 0.003 }]);
  });
}

test("a server without ranges that breaks off once is asked for all of it again", async () => {
  server.ranged = false;
  server.faults.push(100_000);
  assert.deepEqual(await fetched(), FILE);
});

test("a server that does not answer ranges only for a while is resumed afterwards, with all its tries", async () => {
  server.faults.push(200_000);
  server.ranged = false;
  const attempts: number[] = [];
  const onRetry = ({ attempt }: { attempt: number }): void => {
    attempts.push(attempt);
    if (attempts.length === 1) server.faults.push(150_000); // the whole file again, and less of it
    else server.ranged = true;
    if (attempts.length === 2) server.faults.push(100_000, { status: 503 }); // then new bytes
  };
  assert.deepEqual(await fetched({ onRetry }), FILE);
  assert.deepEqual(attempts, [1, 2, 1, 2]);
});

test("an answer that ends early says where", async () => {
  server.faults.push(5000, { status: 503 }, { status: 503 }, "silent");
  const fetching = fetched({ stallMs: 100 });
  await assert.rejects(fetching, (error: Error) => error instanceof NetworkError && /nothing came any more at byte 5000 of 300000$/.test(error.message));
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
