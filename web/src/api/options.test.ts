// What Pie.load and pie.run refuse at the call: each time a UsageError that names field, value and fix.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Cancelled, errorFrom, UsageError } from "../errors.js";
import { Pie } from "../pie.js";
import { checkArgument, shown, TEXT } from "./options.js";

const REFUSED: readonly (readonly [unknown, string])[] = [
  [null, "Pie.load: the options are null; they must be an object with any of model, device,"],
  ["cpu", 'Pie.load: the options are "cpu"; they must be an object'],
  [[], "Pie.load: the options are []; they must be an object"],
  [{ Device: "cpu" }, 'Pie.load: there is no option "Device"; there are model, device, base, kvPoolBytes, stepSeconds, prepare, onProgress, signal'],
  [{ device: "abacus" }, 'Pie.load: device is "abacus"; it must be "auto", "webgpu" or "cpu"'],
  [{ device: null }, "Pie.load: device is null; it must be"],
  [{ model: 5 }, "Pie.load: model is 5; it must be a URL"],
  [{ model: "" }, 'Pie.load: model is ""; it must be a URL'],
  [{ base: {} }, "Pie.load: base is {}; it must be a URL"],
  [{ kvPoolBytes: "x" }, 'Pie.load: kvPoolBytes is "x"; it must be a whole number of bytes from 1,048,576 to 68,719,476,736'],
  [{ kvPoolBytes: "268435456" }, "kvPoolBytes is"],
  [{ kvPoolBytes: 1e12 }, "Pie.load: kvPoolBytes is 1000000000000; it must be"],
  [{ kvPoolBytes: (1 << 20) - 1 }, "Pie.load: kvPoolBytes is 1048575; it must be"],
  [{ kvPoolBytes: 2 ** 28 + 0.5 }, "Pie.load: kvPoolBytes is 268435456.5; it must be a whole number"],
  [{ kvPoolBytes: NaN }, "Pie.load: kvPoolBytes is NaN; it must be"],
  [{ kvPoolBytes: 1n }, "Pie.load: kvPoolBytes is 1n; it must be"],
  [{ stepSeconds: 0 }, "Pie.load: stepSeconds is 0; it must be a number of seconds above 0 and at most 86,400"],
  [{ stepSeconds: Infinity }, "Pie.load: stepSeconds is Infinity; it must be"],
  [{ prepare: 1 }, "Pie.load: prepare is 1; it must be true or false"],
  [{ onProgress: 5 }, "Pie.load: onProgress is 5; it must be a function"],
  [{ onProgress: null }, "Pie.load: onProgress is null; it must be a function"],
  [{ signal: {} }, "Pie.load: signal is {}; it must be the signal of an AbortController"],
  [{ signal: new AbortController() }, "Pie.load: signal is {}; it must be"],
  [{ signal: () => 1 }, "Pie.load: signal is a function; it must be"],
];

for (const [options, words] of REFUSED) {
  test(`refused: ${words}`, async () => {
    await assert.rejects(Pie.load(options as object), (error: Error) => error instanceof UsageError && error.message.includes(words));
  });
}

test("what may be given passes, undefined included", async () => {
  const given = { model: new URL("http://127.0.0.1/m.json"), device: "cpu", kvPoolBytes: 1 << 20, stepSeconds: 0.5, prepare: true, onProgress: undefined } as const;
  const why = new Error("why");
  const loading = Pie.load({ ...given, signal: AbortSignal.abort(why) } as object); // the checks come first
  await assert.rejects(loading, (error) => error instanceof Cancelled && error.cause === why && error.message === "the load was cancelled: why");
});

test("a text is of whole characters", () => {
  checkArgument("pie.run", "name", "a 😀 b", TEXT);
  for (const [value, words] of [["a\ud83d", 'name is "a\\ud83d"; it must be a text of whole characters'], [null, "name is null; it must be a text"]] as const) {
    assert.throws(() => checkArgument("pie.run", "name", value, TEXT), (error: Error) => error instanceof UsageError && error.message.includes(words));
  }
});

test("values are shown short, in closed quotes", () => {
  const loop: unknown[] = [];
  loop.push(loop);
  const words = [shown("a".repeat(61)), shown({ a: "b".repeat(60) }), shown(loop), shown(new Array(60).fill(1)), shown(undefined), shown(-0.5)];
  assert.deepEqual(words, [`"${"a".repeat(60)}"…`, "an object", "an array", "an array", "undefined", "-0.5"]);
});

test("the error keeps its class between realms", () => {
  assert.ok(errorFrom(new UsageError("no").toData()) instanceof UsageError);
});
