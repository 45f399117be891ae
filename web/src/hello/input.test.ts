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

test("what is not JSON is told with the parser's reason", () => {
  const { value, fault } = parseInput("{oops");
  assert.equal(value, null);
  assert.match(fault ?? "", /^The input is not JSON, such as .+: .*JSON/);
});
