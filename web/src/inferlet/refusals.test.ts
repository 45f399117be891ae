// What the core's host refuses at the call, the page's host refuses in the same words, or leaves to the engine: never another, and never
// what the core takes. The scripts and the core's answers are made by tests/web/refusals.py, on the real engine.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { Host } from "./host.js";
import type { TextService } from "./text.js";

type Step = { op: string; fields: object; answer: unknown } | { events: [number, boolean, unknown][] };
interface Recorded {
  model: { vocab: number; hidden: number; max_tokens: number; max_reads: number };
  fixed: Step[][];
  random: Step[][];
}

const file = process.env["PIE_TEXT_FIXTURES"];
const needs = { skip: file === undefined && "PIE_TEXT_FIXTURES is not set: pytest tests/web/test_node.py sets it" };
const recorded = (): Recorded => (JSON.parse(readFileSync(file ?? "", "utf8")) as { refusals: Recorded }).refusals;

/** Go through a script. Calls `hear` with both answers of each call; a refusal that the page leaves to the engine ends the script. */
function replay({ model }: Recorded, script: Step[], hear: (call: string, page: unknown, core: unknown) => void): void {
  const host = new Host({} as TextService, () => undefined);
  host.beginEngine(JSON.stringify(model));
  host.beginRun(JSON.stringify({ model }));
  for (const step of script) {
    if ("events" in step) {
      host.beginStep(JSON.stringify(step.events));
      continue;
    }
    const answer = host.call(step.op, JSON.stringify(step.fields));
    const page: unknown = answer === "" ? "" : JSON.parse(answer);
    hear(`${step.op} ${JSON.stringify(step.fields)}`, page, step.answer);
    if (page === "" && step.answer !== "") return; // from here on the two have seen different calls
  }
}

test("every call that is refused for what was said before it is refused in the same words", needs, () => {
  const all = recorded();
  assert(all.fixed.length > 60);
  for (const script of all.fixed) {
    let last: unknown = "";
    replay(all, script, (call, page, core) => assert.deepEqual(page, (last = core), call));
    assert.notEqual(last, "", JSON.stringify(script.at(-1)));
  }
});

test("edits at random: the page refuses nothing that the core takes, and where nothing is under way all that it refuses", needs, () => {
  const all = recorded();
  let [refused, left] = [0, 0];
  for (const script of all.random) {
    replay(all, script, (call, page, core) => {
      if (page !== "") assert.deepEqual(page, core, call);
      if (core !== "") page === "" ? left++ : refused++;
    });
  }
  assert(refused > 100 && left < refused / 4, `${refused} refused, ${left} left to the engine`);
});
