// Memory limits of core modules: what is rewritten still compiles and cannot grow past its maximum.

import assert from "node:assert/strict";
import { test } from "node:test";
import { limitMemory, PAGE_BYTES } from "./memory.js";

const HEADER = [0, 0x61, 0x73, 0x6d, 1, 0, 0, 0];
const EXPORT = [7, 5, 1, 1, 0x6d, 2, 0]; // (export "m" (memory 0))
const module = (...sections: number[][]): Uint8Array<ArrayBuffer> => Uint8Array.from([HEADER, ...sections].flat());

function memoryOf(bytes: Uint8Array): WebAssembly.Memory {
  return new WebAssembly.Instance(new WebAssembly.Module(bytes as BufferSource)).exports["m"] as WebAssembly.Memory;
}

test("a memory without a maximum gets one", () => {
  const memory = memoryOf(limitMemory(module([5, 3, 1, 0, 2], EXPORT), 5 * PAGE_BYTES + 17));
  assert.equal(memory.grow(3), 2);
  assert.throws(() => memory.grow(1), RangeError);
});

test("a larger maximum shrinks, a smaller one stays", () => {
  assert.throws(() => memoryOf(limitMemory(module([5, 5, 1, 1, 1, 0x80, 0x20], EXPORT), 4 * PAGE_BYTES)).grow(4), RangeError);
  assert.throws(() => memoryOf(limitMemory(module([5, 4, 1, 1, 1, 2], EXPORT), 4 * PAGE_BYTES)).grow(2), RangeError);
});

test("a limit whose encoding is longer moves what follows", () => {
  const name = [0, 4, 2, 0x68, 0x69, 9]; // a custom section
  const limited = limitMemory(module([5, 3, 1, 0, 1], EXPORT, name), 4096 * PAGE_BYTES);
  assert.deepEqual([...limited.slice(8, 15)], [5, 5, 1, 1, 1, 0x80, 0x20]);
  assert.deepEqual([...limited.slice(-6)], name);
  assert.equal(memoryOf(limited).grow(4095), 1);
});

test("a module without a memory of its own is left alone", () => {
  const bytes = module();
  assert.equal(limitMemory(bytes, PAGE_BYTES), bytes);
});

test("what cannot be limited is refused", () => {
  assert.throws(() => limitMemory(module([5, 3, 1, 0, 9]), 8 * PAGE_BYTES), /starts with 9 pages of memory; 8 are allowed/);
  assert.throws(() => limitMemory(module([5, 4, 1, 3, 1, 2]), 8 * PAGE_BYTES), /flags 3/);
  assert.throws(() => limitMemory(module([5, 1, 0]), 8 * PAGE_BYTES), /defines 0 memories/);
  assert.throws(() => limitMemory(module([5, 0xff]), 8 * PAGE_BYTES), /no WebAssembly module/);
});
