// The rule for callers' functions: whatever way one fails, its load or run ends with that error, once, and nothing is left unhandled.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { Cancelled, NetworkError, PieError } from "../errors.js";
import { Callbacks } from "./callbacks.js";

const unhandled: unknown[] = [];
const note = (error: unknown): void => void unhandled.push(error);
before(() => void process.on("unhandledRejection", note));
after(async () => {
  await sleep(0);
  process.off("unhandledRejection", note);
  assert.deepEqual(unhandled, []);
});

/** Work that goes on until the signal ends it, as loads and runs do. */
function endless({ signal }: Callbacks): Promise<never> {
  return new Promise((_, reject) => signal.addEventListener("abort", () => reject(new Cancelled("it was cancelled"))));
}

const MINE = new RangeError("mine");
const FAILING: Record<string, () => unknown> = {
  throws: () => {
    throw MINE;
  },
  rejects: () => Promise.reject(MINE),
  "rejects later": () => sleep(5).then(() => Promise.reject(MINE)),
  "rejects by a thenable": () => ({ then: (_: unknown, fail: (error: unknown) => void) => fail(MINE) }),
};

for (const [name, fails] of Object.entries(FAILING)) {
  test(`a callback that ${name} ends what goes on, with its error`, async () => {
    const callbacks = new Callbacks(undefined);
    const settling = callbacks.settle(endless(callbacks));
    callbacks.call(fails);
    await assert.rejects(settling, (error) => error === MINE);
    let called = 0;
    callbacks.call(() => called++);
    assert.equal(called, 0, "none is called any more");
  });

  test(`a callback that ${name} ends what is done already, before it is told`, async () => {
    const callbacks = new Callbacks(undefined);
    callbacks.call(fails);
    await assert.rejects(callbacks.settle(Promise.resolve(1)), (error) => error === MINE);
  });
}

test("the first of several failures is told", async () => {
  const callbacks = new Callbacks(undefined);
  const settling = callbacks.settle(endless(callbacks).catch(() => sleep(20)));
  callbacks.call(() => sleep(5).then(() => Promise.reject(new Error("second"))));
  callbacks.call(FAILING["throws"]!);
  await assert.rejects(settling, (error) => error === MINE);
});

test("a thrown undefined is an error too", async () => {
  const callbacks = new Callbacks(undefined);
  callbacks.call(() => {
    throw undefined;
  });
  assert.equal(await callbacks.settle(Promise.resolve("value")).catch((error: unknown) => error), undefined);
});

test("a value waits for the callbacks that still run", async () => {
  const callbacks = new Callbacks(undefined);
  const said: string[] = [];
  callbacks.call(async () => {
    await sleep(5);
    callbacks.call(async () => {
      await sleep(5);
      said.push("inner");
    });
    said.push("outer");
  });
  assert.equal(await callbacks.settle(Promise.resolve("value")), "value");
  assert.deepEqual(said, ["outer", "inner"]);
});

test("neither the caller's signal nor the end of the engine waits for callbacks", async () => {
  const control = new AbortController();
  const stopped = new Callbacks(control.signal);
  stopped.call(() => new Promise(() => undefined));
  const settling = stopped.settle(Promise.resolve(1));
  setTimeout(() => control.abort("enough"), 5);
  await assert.rejects(settling, (error) => error instanceof Cancelled && error.cause === "enough" && error.message.endsWith(": enough"));

  const gone = new AbortController();
  const left = new Callbacks(undefined);
  left.call(() => new Promise(() => undefined));
  const lost = new PieError("the engine was lost");
  setTimeout(() => gone.abort(lost), 5);
  await assert.rejects(left.settle(Promise.resolve(1), gone.signal), (error) => error === lost);
});

const REASONS: readonly (readonly [unknown, string])[] = [
  [undefined, "it was cancelled"], // the browser's own AbortError
  [new Error("why"), "it was cancelled: why"],
  ["a word", "it was cancelled: a word"],
  [new DOMException("signal timed out", "TimeoutError"), "it was cancelled: signal timed out"],
  [{ code: 5 }, "it was cancelled"],
  [null, "it was cancelled"],
];

test("a cancel keeps the signal's reason as its cause", async () => {
  for (const [reason, words] of REASONS) {
    const control = new AbortController();
    const callbacks = new Callbacks(control.signal);
    const settling = callbacks.settle(endless(callbacks));
    control.abort(reason);
    const error = await settling.catch((caught: unknown) => caught as Cancelled);
    assert.ok(error instanceof Cancelled);
    assert.equal(error.message, words);
    assert.equal(error.cause, control.signal.reason);
  }
});

test("what the work itself fails with is passed on as it is", async () => {
  const failure = new NetworkError("no answer");
  const cancelled = new Cancelled("the engine was disposed");
  for (const error of [failure, cancelled]) {
    await assert.rejects(new Callbacks(new AbortController().signal).settle(Promise.reject(error)), (caught) => caught === error);
  }
});
