// The input of a run: JSON objects, and words for everything else.

import assert from "node:assert/strict";
import { test } from "node:test";
import { parseInput } from "./input.js";

test("a JSON object, or nothing at all", () => {
  assert.deepEqual(parseInput(' {"prompt": "hi", "n": [1]}\n').value, { prompt: "hi", n: [1] });
  for (const text of ["", " \n", "{}"]) assert.deepEqual(parseInput(text), { value: {}, fault: null });
});

test("other JSON is refused by its kind", () => {
  const kinds = { "[1]": "a list", "[]": "a list", '"a"': "a text", "5": "a number", "true": "true or false", "null": "null" };
  for (const [text, kind] of Object.entries(kinds)) {
    const { value, fault } = parseInput(text);
    assert.equal(value, null);
    assert.equal(fault, `The input must be a JSON object, such as {"prompt": "Hello"}; this is ${kind}.`);
  }
});

test("what is not JSON is told with the parser's reason, and what would be", () => {
  const { value, fault } = parseInput("{oops");
  assert.equal(value, null);
  assert.match(fault ?? "", /^The input is not JSON: .*JSON.*[^.]\. It must be a JSON object, such as {"prompt": "Hello"}\.$/);
});

for (const [number, words] of [
  ["9007199254740992", "The input holds 9007199254740992, which this page cannot hand on digit by digit: whole numbers go up to 9007199254740991"],
  ["-9007199254740993", "The input holds -9007199254740993, which this page cannot"],
  ["1" + "0".repeat(400), `The input holds 1${"0".repeat(39)}…, which this page cannot`],
  ["1e400", "The input holds 1e400, which is beyond the largest number, about 1.8e308."],
  ["-1.5E+999", "The input holds -1.5E+999, which is beyond"],
] as const) {
  test(`a number that would not arrive as it is: ${number.slice(0, 30)}`, () => {
    for (const text of [`{"n": ${number}}`, `{"a": [{"b": [1, ${number}]}]}`, `{"\\"5":${number},"x":1}`]) {
      const { value, fault } = parseInput(text);
      assert.equal(value, null);
      assert.ok(fault?.startsWith(words), fault ?? "taken");
    }
  });
}

test("numbers that arrive as they are, and digits in texts", () => {
  for (const text of ['{"a": 9007199254740991, "b": -9007199254740991, "c": 1.7976931348623157e308, "d": 0, "e": -0.5, "f": 5e-324}', '{"a": "\\"99999999999999999", "99999999999999999": 1}']) {
    assert.deepEqual(parseInput(text), { value: JSON.parse(text), fault: null });
  }
});

test("an input that is nested deeply is looked through all the same", () => {
  assert.match(parseInput(`{"a": ${"[".repeat(5000)}1e999${"]".repeat(5000)}}`).fault ?? "", /holds 1e999/);
});
