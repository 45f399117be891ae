// The way of a file into the cache, over a real server. (The stores of a browser are tested in a browser: e2e/.)

import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { after, before, beforeEach, test } from "node:test";
import { Cancelled, IntegrityError, LoadError } from "../errors.js";
import type { Progress } from "../messages.js";
import { fetchModel } from "./cache.js";
import { serveFile, type FileServer } from "./file_server.js";
import { parseManifest, type Manifest } from "./manifest.js";
import { MemoryStore } from "./memory.js";
import { Meter } from "./progress.js";

const FILE = randomBytes(500_000);
const SHA = createHash("sha256").update(FILE).digest("hex");
const QUICK = { delays: [1, 1] };
let server: FileServer;

before(async () => {
  server = await serveFile(FILE);
});
after(() => server.close());
beforeEach(() => {
  server.ranges.length = server.faults.length = 0;
});

const manifest = (sha256 = SHA): Manifest => ({ name: "tiny", url: server.url, size: FILE.length, sha256 });

test("a file comes verified, with progress to its last byte", async () => {
  const seen: Progress[] = [];
  server.faults.push(200_000);
  const source = await fetchModel(new MemoryStore(), manifest(), { onProgress: (p) => seen.push(p), signal: undefined, network: QUICK });
  assert.equal(source.size, FILE.length);
  assert.deepEqual(Buffer.from(source.read(0, FILE.length)), FILE);
  assert.deepEqual(Buffer.from(source.read(499_990, 10)), FILE.subarray(499_990));
  assert.throws(() => source.read(499_991, 10), RangeError);
  const retrying = seen.findIndex((each) => each.retrying !== undefined);
  const { rate, eta, retrying: next } = seen[retrying]!;
  assert.deepEqual([rate, eta, next], [null, null, { attempt: 1, in: 1 }]);
  assert.ok(seen.slice(retrying + 1).some((each) => each.retrying === undefined), "bytes came again");
  const last = seen.at(-1)!;
  assert.deepEqual([last.stage, last.done, last.total, last.eta], ["download", FILE.length, FILE.length, 0]);
  source.close();
});

test("another file than the manifest's is refused with both digests", async () => {
  const wanted = "0".repeat(64);
  const fetching = fetchModel(new MemoryStore(), manifest(wanted), { onProgress: () => undefined, signal: undefined, network: QUICK });
  await assert.rejects(fetching, (error: Error) => error instanceof IntegrityError && error.message.includes(SHA) && error.message.includes(wanted));
  assert.equal(server.ranges.length, 1);
});

test("cancel", async () => {
  const controller = new AbortController();
  server.faults.push("silent");
  const fetching = fetchModel(new MemoryStore(), manifest(), { onProgress: () => undefined, signal: controller.signal, network: QUICK });
  setTimeout(() => controller.abort(), 30);
  await assert.rejects(fetching, Cancelled);
});

test("a manifest is checked field by field", () => {
  const good = { name: "a", file: "a b#1.gguf", size: 10, sha256: SHA };
  assert.equal(parseManifest(good, "http://127.0.0.1/models/a/manifest.json").url, "http://127.0.0.1/models/a/a%20b%231.gguf");
  for (const [field, value] of [["name", 1], ["file", ""], ["size", -1], ["size", 1.5], ["size", 1e15], ["sha256", SHA.toUpperCase()]] as const) {
    const message = new RegExp(`"${field}"`);
    assert.throws(() => parseManifest({ ...good, [field]: value }, "http://127.0.0.1/"), (error: Error) => error instanceof LoadError && message.test(error.message));
  }
  assert.throws(() => parseManifest([], "http://127.0.0.1/"), LoadError);
});

test("the meter smooths the rate and knows what is left", () => {
  let now = 0;
  const seen: Progress[] = [];
  const meter = new Meter("download", 1000, (p) => seen.push(p), () => now);
  meter.jump(100); // resumed bytes are no speed
  for (let i = 0; i < 4; i++) {
    now += 500;
    meter.add(100);
  }
  const { rate, eta, done } = seen.at(-1)!;
  assert.deepEqual([Math.round(rate!), done, Math.round(eta! * 10) / 10], [200, 500, 2.5]);
  now += 500;
  meter.add(400); // four times as fast for one sample
  assert.ok(seen.at(-1)!.rate! > 250 && seen.at(-1)!.rate! < 400);
});

test("the meter says that nothing comes, counts down to the next try, and begins the rate anew", () => {
  let now = 0;
  const seen: Progress[] = [];
  const meter = new Meter("download", 10_000, (p) => seen.push(p), () => now);
  const told = (): unknown => {
    const { done, rate, eta, retrying } = seen.at(-1)!;
    return { done, rate: rate && Math.round(rate), eta: eta && Math.round(eta), ...retrying };
  };
  for (let i = 0; i < 2; i++) {
    now += 1000;
    meter.add(1000);
  }
  assert.deepEqual(told(), { done: 2000, rate: 1000, eta: 8 });
  now += 1900;
  const before = seen.length;
  meter.look();
  assert.equal(seen.length, before, "a short pause is no news");
  now += 100;
  meter.look();
  assert.deepEqual(told(), { done: 2000, rate: null, eta: null });
  meter.look();
  assert.equal(seen.length, before + 1, "told once");

  now += 28_000;
  meter.retry({ attempt: 1, in: 2 });
  assert.deepEqual(told(), { done: 2000, rate: null, eta: null, attempt: 1, in: 2 });
  now += 1000;
  meter.look();
  assert.deepEqual(told(), { done: 2000, rate: null, eta: null, attempt: 1, in: 1 });
  now += 5000;
  meter.look();
  assert.deepEqual(told(), { done: 2000, rate: null, eta: null, attempt: 1, in: 0 });

  now += 1000;
  meter.add(500);
  assert.deepEqual(told(), { done: 2500, rate: null, eta: null });
  now += 1000;
  meter.add(2500);
  assert.deepEqual(told(), { done: 5000, rate: 2500, eta: 2 });
});
