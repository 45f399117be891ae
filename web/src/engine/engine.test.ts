// The engine worker's small parts: the cpu module's memory, ports and timers.

import assert from "node:assert/strict";
import { test } from "node:test";

import { opMessage, portMessage } from "../messages.js";
import { CpuKernels } from "./cpu.js";
import { Host } from "./host.js";
import { RunPort } from "./link.js";
import { Replay } from "./replay.js";
import { Ticker } from "./ticker.js";

/** One page of memory that may grow to two; heap_base() = 64, load(a) = the word at a. */
// prettier-ignore
const MODULE = new Uint8Array([
  0, 97, 115, 109, 1, 0, 0, 0,
  1, 10, 2, 96, 0, 1, 127, 96, 1, 127, 1, 127,
  3, 3, 2, 0, 1,
  5, 4, 1, 1, 1, 2,
  7, 29, 3, 6, 109, 101, 109, 111, 114, 121, 2, 0, 9, 104, 101, 97, 112, 95, 98, 97, 115, 101, 0, 0, 4, 108, 111, 97, 100, 0, 1,
  10, 15, 2, 5, 0, 65, 192, 0, 11, 7, 0, 32, 0, 40, 2, 0, 11,
]);

test("linear memory is written, grown and read in call order", () => {
  const kernels = new CpuKernels(new WebAssembly.Module(MODULE));
  assert.equal(kernels.heapBase, 64);
  kernels.write(128, new Uint8Array([255, 255, 255, 255]));
  assert.equal(kernels.call("load", 128), 0xffffffff, "results are u32");
  assert.throws(() => kernels.window(65536 - 4, 8), /leave the module's memory of 65536 bytes/);
  assert.equal(kernels.grow(65537), true);
  assert.equal(kernels.size, 131072);
  assert.deepEqual([...kernels.window(126, 4)], [0, 0, 255, 255], "bytes stay where they are");
  assert.equal(kernels.grow(1 << 20), false, "the browser refuses");
  assert.throws(() => kernels.call("load", 1 << 30), WebAssembly.RuntimeError);
  assert.ok(kernels.busyMs >= 0);
});

test("a list of work is done in order, between Python's memory and the module's, up to a result that is not 0", () => {
  const kernels = new CpuKernels(new WebAssembly.Module(MODULE));
  const heap = { HEAPU8: new Uint8Array(new ArrayBuffer(256)) };
  kernels.useHeap(heap);
  const run = (...list: readonly number[]): number => {
    new Uint32Array(heap.HEAPU8.buffer, 64, list.length).set(list);
    return kernels.work(64, list.length);
  };
  const [call, write, read] = [0, 1, 2];
  const load = kernels.indexOf("load");
  assert.equal(kernels.indexOf("absent"), -1);
  heap.HEAPU8.set([1, 2, 3, 4, 5, 6, 7, 8], 0);
  assert.equal(run(write, 512, 8, 0, read, 514, 4, 16), 0);
  assert.deepEqual([...heap.HEAPU8.subarray(16, 20)], [3, 4, 5, 6]);
  assert.equal(run(call, load, 1, 1024, call, load, 1, 512, read, 512, 4, 32), 0x04030201, "the first load gave 0");
  assert.deepEqual([...heap.HEAPU8.subarray(32, 36)], [0, 0, 0, 0], "nothing is done behind a fault");
  assert.equal(kernels.lastExport, "load");
  heap.HEAPU8 = new Uint8Array(new ArrayBuffer(512)); // Python's memory has grown
  assert.equal(run(read, 512, 4, 32), 0);
  assert.deepEqual([...heap.HEAPU8.subarray(32, 36)], [1, 2, 3, 4]);
  assert.throws(() => run(write, 65536, 4, 0), { name: "OutsideMemory" });
  assert.throws(() => run(call, load, 1, 1 << 30), WebAssembly.RuntimeError);
  assert.equal(run(), 0);
});

test("a list that is no plan is refused", () => {
  for (const length of [0, 4]) assert.throws(() => new Replay([], [], new Int32Array(length)), RangeError);
});

test("a port gives ops and answers as they were sent, and nothing after it is closed", async () => {
  const { port1, port2 } = new MessageChannel();
  const heard: string[][] = [];
  const port = new RunPort(port1);
  port2.postMessage(opMessage("ws.new", '{"ws":1}')); // before anybody listens
  port2.postMessage(opMessage("receive", ""));
  port2.postMessage(portMessage("answer", '{"s":"done","r":"]"}'));
  port2.postMessage({ not: "text" });
  port2.postMessage([opMessage("ws.new", '{"ws":2}'), 7, portMessage("answer", '{"s":"pending","w":[]}')]);
  port2.postMessage([opMessage("submit", '{"outs":[3]}'), portMessage("answer", '{"s":"pending","w":[3]}')]);
  port2.postMessage(portMessage("fault", '{"type":"Trap","message":"unreachable"}'));
  const told = new Promise<string>((resolve) => (port2.onmessage = ({ data }) => resolve(data as string)));
  await new Promise<void>((resolve) =>
    port.open(
      (...what) => {
        heard.push(what);
        if (what[0] === "fault") resolve();
      },
      (...what) => heard.push(["step", ...what]),
    ),
  );
  assert.deepEqual(heard, [
    ["op", "ws.new", '{"ws":1}'],
    ["op", "receive", "{}"],
    ["answer", "", '{"s":"done","r":"]"}'],
    ["op", "ws.new", '{"ws":2}'],
    ["answer", "", '{"s":"pending","w":[]}'],
    ["step", "submit", '{"outs":[3]}', '{"s":"pending","w":[3]}'],
    ["fault", "", '{"type":"Trap","message":"unreachable"}'],
  ]);
  port.send("resume", "[[1,true,2]]");
  assert.equal(await told, '["resume",[[1,true,2]]]');
  port.close();
  port.close();
  port.send("resume", "[]");
  port2.close();
});

test("turns and work come when they are asked for, timers by their numbers unless cancelled", async () => {
  const ticker = new Ticker();
  const seen = new Set<number | string>();
  await new Promise<void>((resolve) => {
    const see = (what: number | string): void => {
      seen.add(what);
      if (["turn", "work", 1, 3].every((each) => seen.has(each))) resolve();
    };
    ticker.open(() => see("turn"), see, () => see("work"));
    ticker.after(2, 5);
    ticker.after(3, 20);
    ticker.after(1, 1);
    ticker.cancel(2);
    ticker.alone();
    ticker.soon();
  });
  ticker.close();
  assert.equal(seen.has(2), false);
  assert.equal(seen.size, 4);
});

test("the host reports bytes with a rate, and keeps the first reason of a failure", async () => {
  const posted: unknown[] = [];
  const source = { size: 0, read: () => new Uint8Array(0), close: () => undefined };
  const kernels = (): Promise<WebAssembly.Module> => Promise.reject(new Error("no SIMD"));
  const host = new Host({ device: "cpu", kvPoolBytes: 1, modelName: "m", source, gpu: null, kernels, post: (m) => posted.push(m) });
  host.progress("selftest", 0, 0);
  host.progress("weights", 5, 10);
  host.progress("weights", 10, 10);
  assert.deepEqual(posted[0], { kind: "progress", progress: { stage: "selftest", done: 0, total: 0, rate: null, eta: null } });
  const last = posted.at(-1) as { progress: { stage: string; done: number; total: number } };
  assert.deepEqual([last.progress.stage, last.progress.done, last.progress.total], ["weights", 10, 10]);
  assert.equal(await host.openCpu(), null);
  host.fail("SelfTestFailed", "later");
  assert.match(host.failure?.message ?? "", /no SIMD/);
  host.error(3, "message", '{"type":"Deadlock"}');
  const error = posted.at(-1) as { kind: string; run: number; error: { fields: { type: string } } };
  assert.deepEqual([error.kind, error.run, error.error.fields.type], ["error", 3, "Deadlock"]);
});
