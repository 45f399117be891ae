// Runs over real ports: with guests of a script, and with the real language component.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, test } from "node:test";
import { pathToFileURL } from "node:url";
import { setFlagsFromString } from "node:v8";
import { type Guest, openGuest, type Transpiled } from "./guest.js";
import { type Limits, LIMITS, MEMORY_BYTES } from "./limits.js";
import { limitMemory } from "./memory.js";
import { type Port, Session } from "./session.js";
import type { TextService } from "./text.js";
import { WasiDenied } from "./wasi.js";

setFlagsFromString("--experimental-wasm-extended-const"); // Node 20 has it behind a flag, browsers do not

const BYTES: TextService = {
  encode: (text) => [...new TextEncoder().encode(text)],
  decode: (ids) => new TextDecoder().decode(Uint8Array.from(ids)),
  tokenBytes: (id) => Uint8Array.of(id),
  render: () => [1],
  renderText: () => "",
  role: () => [1],
  cue: () => [2],
  seal: () => [3],
};

interface Run {
  ops: [string, Record<string, unknown>][];
  answers: Record<string, unknown>[];
  fault: { type: string; message: string } | null;
  clean: boolean;
}

/** Drive a guest with a scripted engine: outputs are letters, sleeps end at once. */
async function run(
  guest: (call: (op: string, payload: string) => string) => Promise<Guest>,
  source = "",
  limits: Limits = LIMITS,
  refuses: (name: string, fields: Record<string, unknown>) => object | null = () => null,
): Promise<Run> {
  const { port1, port2 } = new MessageChannel();
  let session: Session | null = null;
  const opened = await guest((op, payload) => session?.host.call(op, payload) ?? "");
  const result: Run = { ops: [], answers: [], fault: null, clean: false };
  return new Promise((resolve) => {
    let events: unknown[] = [];
    let refused: object[] = [];
    let letters = 0;
    let clean: boolean | null = null;
    const finish = (): void => {
      const state = result.answers.at(-1)?.["s"] ?? "pending";
      if (clean === null || (result.fault === null && state === "pending")) return;
      port1.close();
      resolve({ ...result, clean });
    };
    port1.onmessage = ({ data }: MessageEvent<string | string[]>) => [data].flat().forEach(hear);
    const hear = (message: string): void => {
      const [kind, ...rest] = JSON.parse(message) as [string, ...unknown[]];
      if (kind === "op") {
        const [name, fields] = rest as [string, Record<string, unknown>];
        result.ops.push([name, fields]);
        const refusal = refuses(name, fields);
        if (refusal !== null) refused.push(refusal);
        else if (name === "submit") events.push(...(fields["outs"] as number[]).map((id) => [id, true, 65 + (letters++ % 26)]));
        else if (name === "sleep") events.push([fields["f"], true, null]);
      } else if (kind === "fault") {
        result.fault = rest[0] as Run["fault"];
        finish();
      } else {
        const answer = rest[0] as Record<string, unknown>;
        result.answers.push(answer);
        if (answer["s"] === "pending" && refused.length > 0) {
          port1.postMessage(`["refused",${JSON.stringify(refused)}]`);
          refused = [];
        } else if (answer["s"] === "pending") {
          port1.postMessage(`["resume",${JSON.stringify(events)}]`);
          events = [];
        } else finish();
      }
    };
    session = new Session(port2 as unknown as Port, opened, BYTES, (ended) => {
      clean = ended;
      finish();
    }, limits);
    const model = { name: "scripted", vocab: 256, hidden: 8, context: 64, eos: [2] };
    port1.postMessage(`["start",${JSON.stringify({ source, name: "program.py", input: {}, model, chat: { prefix: [9] } })}]`);
  });
}

const scripted = (...answers: (string | (() => string))[]) => async (): Promise<Guest> => {
  const step = (): string => {
    const answer = answers.shift() ?? "no more";
    return typeof answer === "string" ? answer : answer();
  };
  return { start: step, resume: step };
};
const stacked = (message: string, ...frames: string[]): Error =>
  Object.assign(new WebAssembly.RuntimeError(message), {
    stack: [`RuntimeError: ${message}`, ...frames.map((name) => `    at ${name} (wasm://wasm/python:wasm-function[1]:0x1)`)].join("\n"),
  });
const throwing = (error: unknown) => scripted(() => { throw error; });

test("steps follow messages; a clean end", async () => {
  const { answers, clean } = await run(scripted('{"s":"pending","w":[1]}', '{"s":"done","r":[1,"é"]}'));
  assert.deepEqual(answers, [{ s: "pending", w: [1] }, { s: "done", r: [1, "é"] }]);
  assert(clean);
});

for (const [what, guest, fault] of [
  ["a forbidden call", throwing(new WasiDenied("wasi:sockets/tcp#x")), /^GuestTrap: .*may not make: wasi:sockets\/tcp#x$/],
  ["a crash", throwing(new WebAssembly.RuntimeError("unreachable")), /^GuestTrap: the inferlet crashed: unreachable$/],
  ["Python's own failure", throwing(stacked("unreachable", "libpython3.14.so.fatal_error")), /^MemoryLimitExceeded: .* beyond its 256 MiB of memory$/],
  ["a text that cannot grow", throwing(stacked("null function", "libpython3.14.so._Py_Dealloc")), /^MemoryLimitExceeded: .*while an object grew/],
  ["a null function of its own", throwing(stacked("null function", "ext.call", "libpython3.14.so._Py_Dealloc")), /^GuestTrap: .*null function$/],
  ["its stack", throwing(new RangeError("Maximum call stack size exceeded")), /^StackLimitExceeded: .*nested too deeply/],
  ["no JSON", scripted("nonsense"), /^GuestFault: the guest answered nonsense, which is no state of the ABI$/],
  ["no state", scripted('{"s":"sleeping"}'), /^GuestFault: /],
  ["null", scripted("null"), /^GuestFault: /],
  ["too much", scripted(`{"s":"done","r":"${"x".repeat(100)}"}`), /^OutputLimitExceeded: the inferlet answered 119 characters at once; the limit is 99$/],
] as const) {
  test(`a guest is ended for ${what}, and its worker is not used again`, async () => {
    const ended = await run(guest, "", { ...LIMITS, text: 99 });
    assert.match(`${ended.fault?.type}: ${ended.fault?.message}`, fault);
    assert(!ended.clean);
  });
}

test("the time of all steps together is bounded", async () => {
  const busy = (): string => {
    const began = performance.now();
    while (performance.now() - began < 20);
    return '{"s":"pending","w":[1]}';
  };
  const { fault } = await run(scripted(busy, busy, busy, busy), "", { ...LIMITS, totalSeconds: 0.05 });
  assert.match(fault?.message ?? "", /0.05 s of CPU time in total/);
});

// --- the real component; what its programs can do wrong is tested in a browser: tests/web/test_inferlet_worker.py

const assets = process.env["PIE_WEB_ASSETS"];
const needs = { skip: assets === undefined && "PIE_WEB_ASSETS is not set: pytest tests/web/test_node.py sets it" };
const modules = new Map<string, Promise<WebAssembly.Module>>();
after(() => modules.clear());

async function python(call: (op: string, payload: string) => string): Promise<Guest> {
  const folder = `${assets}/component/`;
  const component = (await import(pathToFileURL(`${folder}component.js`).href)) as Transpiled;
  const get = (name: string): Promise<WebAssembly.Module> => {
    const module = modules.get(name) ?? readFile(folder + name).then((bytes) => WebAssembly.compile(limitMemory(bytes, MEMORY_BYTES) as BufferSource));
    modules.set(name, module);
    return module;
  };
  return openGuest(component, { get }, call);
}

test("the seed's example", needs, async () => {
  const source = await readFile(new URL("../../../../../inferlet_sdk/examples/hello.py", import.meta.url), "utf8");
  const { answers, ops, clean } = await run(python, source);
  assert.deepEqual(answers.at(-1), { s: "done", r: { text: "ABCDEFGH" } });
  assert.equal(ops.filter(([name]) => name === "submit").length, 8);
  assert(clean);
});

// What only the engine can refuse: the inferlet hears of it where it awaits, or at its next call. Sleeps are long enough to be waited for
// on a busy machine: one that is over before its step ends goes on in it.
const COMMIT = `
import asyncio
from inferlet import send, sleep
from inferlet.errors import InvalidState
from inferlet.eta import *

async def main(input):
    ws, pipe, fwd, told = WorkingSet(), Pipeline(), ForwardPass(), []
    fwd.embed([1, 2])
    fwd.state([ws], StateGeometry.buffered())
    out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    pipe.submit(fwd)
    ws.commit(1)
    try:
        BODY
    except InvalidState as error:
        told.append(str(error))
    finally:
        told.append("finally")
    return told
`;
const refuseCommit = (name: string): object | null =>
  name === "ws.commit" ? { futures: [], error: { type: "InvalidState", message: "ws.commit: no", held: 3 } } : null;

for (const [where, body] of [
  ["at what is awaited", "await out"],
  ["at the next call, where only the loop's own alarm is awaited", "await sleep(0.2); ws.discard()"],
] as const) {
  test(`what the engine refuses is raised ${where}`, needs, async () => {
    const { answers, clean } = await run(python, COMMIT.replace("BODY", body), LIMITS, refuseCommit);
    assert.deepEqual(answers.at(-1), { s: "done", r: ["ws.commit: no", "finally"] });
    assert(clean);
  });
}

test("a refused op that has an answer rejects that future", needs, async () => {
  const refuse = (name: string, fields: Record<string, unknown>): object | null =>
    name === "submit" ? { futures: fields["outs"], error: { type: "InvalidState", message: "submit: no" } } : null;
  const { answers } = await run(python, COMMIT.replace("BODY", "await out"), LIMITS, refuse);
  assert.deepEqual(answers.at(-1), { s: "done", r: ["submit: no", "finally"] });
});

test("what nobody has heard when main returns fails the run", needs, async () => {
  const { fault } = await run(python, COMMIT.replace("BODY", "await sleep(0.2)"), LIMITS, refuseCommit);
  assert.deepEqual(fault, { type: "InvalidState", message: "ws.commit: no" });
});
