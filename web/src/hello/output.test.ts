// Cutting the output: whole characters, counted as Python counts them.

import assert from "node:assert/strict";
import { test } from "node:test";
import { codePoints, cutAt, droppedText } from "./output.js";

test("characters outside the basic plane count once", () => {
  for (const text of ["", "abc", "é", "😀", "a😀b😀", "\ud83d", "\ude00\ud83d"]) assert.equal(codePoints(text), [...text].length, JSON.stringify(text));
});

test("a cut never falls into a character", () => {
  assert.deepEqual([-5, 0, 1, 2, 3, 4].map((units) => cutAt("a😀b", units)), [0, 0, 1, 3, 3, 4]);
  assert.equal(cutAt("a\ud83dx", 2), 2);
});

test("what is not shown, in words", () => {
  assert.deepEqual([1, 2, 1_234_567].map(droppedText), [
    "… the first character is not shown",
    "… the first 2 characters are not shown",
    "… the first 1,234,567 characters are not shown",
  ]);
});
