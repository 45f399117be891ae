// The pool with workers of a script: who gets which worker, what the watchdog does, what is thrown away.

import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import type { FromInferlet, SharedParts, ToInferlet } from "../messages.js";
import { InferletPool, type PoolOptions, type WorkerLike } from "./pool.js";

class ScriptedWorker implements WorkerLike {
  onmessage: WorkerLike["onmessage"] = null;
  onerror: WorkerLike["onerror"] = null;
  readonly got: ToInferlet[] = [];
  terminated = false;
  hung = false;

  postMessage(message: ToInferlet): void {
    this.got.push(message);
    if (message.kind === "ping" && !this.hung) queueMicrotask(() => this.say({ kind: "pong", n: message.n }));
  }

  terminate(): void {
    this.terminated = true;
  }

  say(data: FromInferlet): void {
    this.onmessage?.({ data } as MessageEvent<FromInferlet>);
  }

  get runs(): number[] {
    return this.got.flatMap((message) => (message.kind === "attach" ? [message.run] : []));
  }
}

function pool(options: Partial<PoolOptions> = {}): { pool: InferletPool; workers: ScriptedWorker[]; alive: () => number } {
  const workers: ScriptedWorker[] = [];
  const makeWorker = (): WorkerLike => {
    const worker = new ScriptedWorker();
    workers.push(worker);
    return worker;
  };
  const made = new InferletPool({ base: "http://127.0.0.1/web/", text: "{}", stepSeconds: 0.08, ...options, makeWorker });
  return { pool: made, workers, alive: () => workers.filter((worker) => !worker.terminated).length };
}

const port = (): MessagePort => ({}) as MessagePort;
const SHARED = { modules: { "a.wasm": {} as WebAssembly.Module } } as unknown as SharedParts;
const never = (): void => assert.fail("the run lost its worker");

test("the first worker makes what all need; one is kept ahead", async () => {
  const { pool: made, workers } = pool();
  assert.equal(workers.length, 1);
  made.attach(1, port(), never);
  made.attach(2, port(), never);
  assert.equal(workers.length, 1, "nobody makes it twice");
  workers[0]?.say({ kind: "ready", shared: SHARED });
  await made.ready();
  assert.deepEqual(workers[0]?.runs, [1]);
  assert.equal(workers.length, 3, "one for the run that waits and one ahead");
  assert.equal((workers[1]?.got[0] as { shared?: unknown }).shared, SHARED);
  workers[1]?.say({ kind: "ready" });
  assert.deepEqual(workers[1]?.runs, [2]);
  made.dispose();
  assert(workers.every((worker) => worker.terminated));
});

test("a worker serves a few runs, and another is ready by then", () => {
  const { pool: made, workers, alive } = pool({ runs: 2 });
  workers[0]?.say({ kind: "ready", shared: SHARED });
  made.attach(1, port(), never);
  workers[1]?.say({ kind: "ready" });
  workers[0]?.say({ kind: "ended", run: 1, clean: true });
  workers[0]?.say({ kind: "ready" });
  made.attach(2, port(), never);
  workers[0]?.say({ kind: "ended", run: 2, clean: true });
  assert.deepEqual(workers[0]?.got.flatMap((message) => (message.kind === "attach" ? [message.last] : [])), [false, true]);
  assert(workers[0]?.terminated);
  made.attach(3, port(), never);
  assert.deepEqual(workers[1]?.runs, [3]);
  assert.equal(alive(), 2, "the one that runs, and one ahead");
  made.dispose();
});

test("a worker that ended clean serves again, one that did not is thrown away", () => {
  const { pool: made, workers, alive } = pool({ idle: 2 });
  workers[0]?.say({ kind: "ready", shared: SHARED });
  const first = made.attach(1, port(), never);
  workers[0]?.say({ kind: "ended", run: 1, clean: true });
  first.release();
  first.release();
  workers[0]?.say({ kind: "ready" });
  workers[1]?.say({ kind: "ready" });
  made.attach(2, port(), never);
  assert.deepEqual(workers[0]?.runs, [1, 2]);
  workers[0]?.say({ kind: "ended", run: 2, clean: false });
  assert(workers[0]?.terminated);
  assert.equal(alive(), 1);
  made.dispose();
});

test("a released run that had not ended loses its worker; a waiting one leaves the queue", () => {
  const { pool: made, workers } = pool({ most: 1 });
  workers[0]?.say({ kind: "ready", shared: SHARED });
  const first = made.attach(1, port(), never);
  const second = made.attach(2, port(), never);
  made.attach(3, port(), never);
  assert.equal(workers.length, 1, "no more than `most`");
  second.release();
  first.release();
  assert(workers[0]?.terminated);
  workers[1]?.say({ kind: "ready" });
  assert.deepEqual(workers[1]?.runs, [3]);
  made.dispose();
});

test("more idle workers than wanted are given back", () => {
  const { pool: made, workers, alive } = pool({ idle: 1 });
  workers[0]?.say({ kind: "ready", shared: SHARED });
  for (const run of [1, 2, 3]) made.attach(run, port(), never);
  for (const worker of workers.slice(1)) worker.say({ kind: "ready" });
  for (const [index, run] of [1, 2, 3].entries()) {
    workers[index]?.say({ kind: "ended", run, clean: true });
    workers[index]?.say({ kind: "ready" });
  }
  assert.equal(alive(), 1);
  made.dispose();
});

test("the watchdog ends a step that takes too long, and no other", async () => {
  const { pool: made, workers } = pool();
  workers[0]?.say({ kind: "ready", shared: SHARED });
  workers[1]?.say({ kind: "ready" });
  const dead: string[] = [];
  made.attach(1, port(), (...why) => dead.push("one", ...why));
  made.attach(2, port(), (...why) => dead.push("two", ...why));
  const [hung, well] = workers;
  assert(hung !== undefined && well !== undefined);
  await sleep(150);
  assert.deepEqual(dead, []);
  hung.hung = true;
  while (dead.length === 0) await sleep(20);
  assert.match(dead.join(), /^one,CpuBudgetExceeded,the inferlet ran for \d+\.\d s without awaiting; the limit is 0\.08 s$/);
  assert(hung.terminated && !well.terminated);
  made.dispose();
});

test("inferlets that compute at once have the time that they wait for each other", async () => {
  const { pool: made, workers } = pool({ cores: 1 });
  workers[0]?.say({ kind: "ready", shared: SHARED });
  const dead: [number, string][] = [];
  const runs = [0, 1, 2, 3];
  for (const run of runs) made.attach(run, port(), (_, message) => dead.push([run, message]));
  for (const worker of workers.slice(1)) worker.say({ kind: "ready" });
  const busy = runs.map((run) => workers.find((worker) => worker.runs.includes(run))!);
  for (const worker of busy) worker.hung = true;
  const began = performance.now();
  while (dead.length < runs.length) await sleep(10);
  const took = performance.now() - began;
  assert(took > 4 * 80, `each of four has a fifth of the core, beside the engine: ${took} ms`);
  assert(dead.every(([, message]) => /ran for 0\.\d s without awaiting; the limit is 0\.08 s$/.test(message)), dead.join());
  const shares = busy[0]!.got.flatMap((message) => (message.kind === "ping" ? [message.share] : []));
  assert.equal(shares[0], 1, "nobody was busy when it was asked");
  made.dispose();
});

test("a worker that cannot start fails the runs that wait, and `ready`", async () => {
  const { pool: made, workers } = pool();
  const dead: string[] = [];
  made.attach(1, port(), (type, message) => dead.push(`${type}: ${message}`));
  const failed = assert.rejects(made.ready(), { name: "NetworkError" });
  workers[0]?.say({ kind: "failed", error: { name: "NetworkError", message: "component.core.wasm could not be fetched" } });
  await failed;
  assert.match(dead.join(), /^WorkerFailed: .*could not be fetched/);
  const again = made.ready();
  assert.equal(workers.length, 2, "the next call tries again");
  made.attach(2, port(), never);
  workers[1]?.say({ kind: "ready", shared: SHARED });
  await again;
  assert.deepEqual(workers[1]?.runs, [2]);
  made.dispose();
});

test("workers that cannot start behind the first are not started for ever; who waits is told once nobody is left", () => {
  const { pool: made, workers, alive } = pool({ runs: 2 });
  const told: string[] = [];
  const dead = (type: string, message: string): void => void told.push(`${type}: ${message}`);
  const failed = { name: "NetworkError", message: "offline" };
  workers[0]?.say({ kind: "ready", shared: SHARED });
  for (const run of [1, 2, 3]) made.attach(run, port(), dead);
  for (let at = 1; at < workers.length && at < 50; at++) workers[at]?.say({ kind: "failed", error: failed });
  assert(workers.length < 10, `${workers.length} workers were started`);
  assert.equal(alive(), 1);
  assert.deepEqual(told, [], "the first worker takes one after the other");
  workers[0]?.say({ kind: "ended", run: 1, clean: true });
  workers[0]?.say({ kind: "ready" });
  assert.deepEqual(workers[0]?.runs, [1, 2]);
  for (let at = 1; at < workers.length && at < 50; at++) workers[at]?.say({ kind: "failed", error: failed });
  workers[0]?.say({ kind: "ended", run: 2, clean: false });
  for (let at = 1; at < workers.length && at < 50; at++) workers[at]?.say({ kind: "failed", error: failed });
  assert.deepEqual(told, ["WorkerFailed: the inferlet's worker could not start: offline"]);
  const before = workers.length;
  made.attach(4, port(), never); // the network may be back
  assert(workers.length > before);
  workers.at(-1)?.say({ kind: "ready" });
  assert.deepEqual(workers.at(-1)?.runs, [4]);
  made.dispose();
});

test("a worker that crashes ends its run only", () => {
  const { pool: made, workers } = pool();
  workers[0]?.say({ kind: "ready", shared: SHARED });
  const dead: string[] = [];
  made.attach(1, port(), (type) => dead.push(type));
  workers[0]?.onerror?.({ message: "out of memory" } as ErrorEvent);
  assert.deepEqual(dead, ["WorkerFailed"]);
  workers[1]?.say({ kind: "ready" });
  made.attach(2, port(), never);
  assert.deepEqual(workers[1]?.runs, [2]);
  made.dispose();
  assert.throws(() => made.attach(3, port(), never), /disposed/);
});

test("dispose rejects who waits for a worker", async () => {
  const { pool: made } = pool();
  const waiting = assert.rejects(made.ready(), { name: "Cancelled" });
  made.dispose();
  await waiting;
});
