// The page's words: progress, devices and errors as people read them.

import assert from "node:assert/strict";
import { test } from "node:test";
import { DeviceUnavailable, InferletError, NetworkError } from "../errors.js";
import { amountText, deviceText, durationText, errorText, resultNote, stageText } from "./words.js";

const progress = { stage: "download", done: 45_200_000, total: 98_400_000, rate: 23_100_000, eta: 2.3 };

test("progress in bytes, rate and time left, each only when known", () => {
  assert.equal(amountText(progress), "45.2 of 98.4 MB, 23.1 MB/s, 3 s left");
  assert.equal(amountText({ ...progress, rate: null, eta: null }), "45.2 of 98.4 MB");
  assert.equal(amountText({ ...progress, done: progress.total, eta: 0 }), "98.4 of 98.4 MB, 23.1 MB/s");
  assert.equal(amountText({ stage: "device", done: 0, total: 0, rate: null, eta: null }), "");
  assert.equal(stageText(progress), "Downloading the model");
  assert.equal(stageText({ ...progress, stage: "something new" }), "Loading: something new");
});

test("a server that does not answer: no rate and no time left, but when it is tried again", () => {
  const waits = { ...progress, retrying: { attempt: 2, in: 4 } };
  assert.equal(stageText(waits), "Downloading the model: waiting for the server");
  assert.equal(amountText(waits), "45.2 of 98.4 MB, next try in 4 s");
  assert.equal(amountText({ ...waits, retrying: { attempt: 2, in: 0 } }), "45.2 of 98.4 MB, trying again");
  assert.equal(amountText({ ...waits, done: 0, total: 0 }), "next try in 4 s");
});

test("a file that is held for a moment is no other tab's yet", () => {
  const waiting = { ...progress, stage: "waiting", done: 0, total: 0 };
  assert.deepEqual([0, 2.9, 3].map((waited) => stageText(waiting, waited)), [
    "Opening the model's file",
    "Opening the model's file",
    "Waiting for another tab that downloads the model",
  ]);
});

test("durations", () => {
  assert.deepEqual([0.2, 59.1, 91, 3600, 9000].map(durationText), ["1 s", "60 s", "2 min", "60 min", "2.5 h"]);
});

test("a device: what runs, then why", () => {
  const cpu = { kind: "cpu", name: "cpu", description: "WebAssembly SIMD", software: false, why: "there is no WebGPU adapter" } as const;
  assert.equal(deviceText(cpu), "CPU: WebAssembly SIMD. There is no WebGPU adapter.");
  const software = { kind: "webgpu", name: "swiftshader", description: "swiftshader", software: true, why: "Asked for by name." } as const;
  assert.equal(deviceText(software), "WebGPU in software: swiftshader. Asked for by name.");
});

test("errors: a program's by its type and line, ours by what could not be done", () => {
  const author = errorText(new InferletError("division by zero", { type: "ZeroDivisionError", file: "hello.py", line: 3, traceback: "…" }));
  assert.deepEqual(author, { title: "ZeroDivisionError", message: "division by zero", line: 3, traceback: "…" });
  assert.equal(errorText(new DeviceUnavailable("this browser has no WebGPU")).message, "This browser has no WebGPU.");
  const network = errorText(new NetworkError("http://127.0.0.1/m could not be fetched"));
  assert.deepEqual([network.title, network.message], ["The network failed", "http://127.0.0.1/m could not be fetched."]);
});

test("errors that are not ours keep their names", () => {
  assert.equal(errorText(new TypeError("no")).title, "TypeError");
});

test("a result whose digits may not be those of the program", () => {
  for (const value of [2 ** 53, [{ a: [-(2 ** 53)] }], 1e300]) assert.match(resultNote(value) ?? "", /^Numbers beyond 9007199254740991 may be rounded here/);
  for (const value of [undefined, null, 2 ** 53 - 1, "9007199254740993", [1.5, { a: {} }], []]) assert.equal(resultNote(value), null);
});
