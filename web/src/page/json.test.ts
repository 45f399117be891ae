// Values of the caller as JSON text: what JSON would change without a word, or what the engine cannot read, is refused by name.

import assert from "node:assert/strict";
import { test } from "node:test";
import { nestsDeeper } from "../inferlet/nesting.js";
import { jsonText, MOST_LEVELS } from "./json.js";

const nested = (levels: number): unknown => JSON.parse("[".repeat(levels) + "]".repeat(levels));

for (const [value, text] of [
  [{ a: [null, undefined, 1.5, "null"] }, '{"a":[null,null,1.5,"null"]}'],
  [null, "null"],
  [nested(MOST_LEVELS), "[".repeat(MOST_LEVELS) + "]".repeat(MOST_LEVELS)],
  ["[".repeat(500), `"${"[".repeat(500)}"`],
  [[..."\\\"[[["].join("\\").repeat(100), JSON.stringify([..."\\\"[[["].join("\\").repeat(100))],
  [Array.from({ length: 400 }, () => []), `[${Array.from({ length: 400 }, () => "[]").join()}]`],
  [{ when: new Date(0) }, '{"when":"1970-01-01T00:00:00.000Z"}'],
] as const) {
  test(`taken: ${text.slice(0, 60)}`, () => assert.equal(jsonText("pie.run", "input", value), text));
}

const loop: unknown[] = [];
loop.push({ loop });

for (const [value, words] of [
  [{ n: Infinity }, "pie.run: input.n is Infinity, which JSON cannot carry; give a finite number, or a text"],
  [[1, { "a b": [NaN] }], 'pie.run: input[1]["a b"][0] is NaN, which JSON cannot carry; give a finite number, or a text'],
  [-Infinity, "pie.run: input is -Infinity, which JSON cannot carry; give a finite number, or a text"],
  [{ big: [2n ** 60n] }, "pie.run: input.big[0] is 1152921504606846976n, which JSON cannot carry; give a finite number, or a text"],
  [nested(MOST_LEVELS + 1), "pie.run: input is nested deeper than 199 levels; give a flatter one"],
  [{ a: nested(5000) }, "pie.run: input is nested deeper than 199 levels; give a flatter one"],
  [nested(100_000), "pie.run: input is nested deeper than 199 levels; give a flatter one"],
  [() => 1, "pie.run: input is a function; it must be a JSON value"],
] as const) {
  test(`refused: ${words.slice(9, 60)}`, () => {
    assert.throws(() => jsonText("pie.run", "input", value), { name: "UsageError", message: words });
  });
}

test("a value that refers to itself is refused in words", () => {
  assert.throws(() => jsonText("run.send", "the value", loop), { name: "UsageError", message: /^run\.send: the value is an array; it must be a JSON value \(/ });
});

test("brackets in texts do not nest", () => {
  assert(!nestsDeeper('{"[[[\\"[[":"[[[[\\\\"}', 1));
  assert(nestsDeeper('["\\\\",[1]]', 1));
});
