// Runs that end in other ways than with a program's result: what the page's engine makes of each.

import { opMessage, portMessage, splitMessage } from "../../messages.js";
import type { NodeEngine } from "./node_engine.js";

type Answer = (...messages: readonly string[]) => void;
/** `step(reply, body)` is called for start and each resume; `then` once the first step came. */
interface Scenario {
  readonly step: (reply: Answer, body: string, count: number) => void;
  readonly then?: (engine: NodeEngine) => void;
  readonly input?: string;
  readonly receives?: boolean;
}

const op = (name: string, payload: object): string => opMessage(name, JSON.stringify(payload));
const answer = (value: object): string => portMessage("answer", JSON.stringify(value));
const pending = (...w: number[]): string => answer({ s: "pending", w });
const done = (r: unknown): string => answer({ s: "done", r });
const sleeps = op("sleep", { ms: 60_000, f: 9 });
const deep = "[".repeat(5000) + "]".repeat(5000);
/** The inferlet goes on and is told; the body of that message is its result. */
const told = (...ops: string[]): Scenario => ({
  step: (reply, body, count) => (count === 0 ? reply(...ops, sleeps, pending(9)) : reply(done(JSON.parse(body)))),
});
const prompt = [5, 6, 7, 8];
const pass = { pipe: 2, tokens: prompt, ws: [1], geo: { mode: "folding", window: 0, sinks: 0 } };

export const SCENARIOS: Readonly<Record<string, Scenario>> = {
  refused: { step: (reply) => reply(op("ws.drop", { ws: 7 }), done(1)) },
  "refused with a future, unheard": { step: (reply) => reply(op("ws.length", { ws: 7, f: 1 }), done(1)) },
  "refused and told": told(op("ws.drop", { ws: 7 }), op("ws.length", { ws: 8, f: 1 }), op("submit", { ...pass, outs: [3, 4] })),
  "deep input": { step: () => undefined, input: deep },
  "deep value": { step: (reply) => reply(sleeps, pending(9)), then: (engine) => engine.page.deliver(engine.lastRun, deep) },
  "deep answer": { step: (reply) => reply(portMessage("answer", `{"s":"done","r":${deep}}`)) },
  "deep op": { step: (reply) => reply(opMessage("send", `{"value":${deep}}`), done(1)) },
  "nobody sends": {
    step: (reply, body, count) => (count === 0 ? reply(op("receive", { f: 1 }), pending(1)) : reply(done(JSON.parse(body)))),
    receives: false,
  },
  malformed: { step: (reply) => reply('["op","ws.new",{"ws":]', done(1)) },
  "unknown op": { step: (reply) => reply(op("rm", {}), done(1)) },
  "sync op": { step: (reply) => reply(op("encode", { text: "a" }), done(1)) },
  "answer twice": { step: (reply) => reply(op("sleep", { ms: 60_000, f: 1 }), pending(1), pending(1), op("ws.new", { ws: 1 })) },
  fault: { step: (reply) => reply(portMessage("fault", '{"type":"Trap","message":"unreachable"}')) },
  "fault without words": { step: (reply) => reply(portMessage("fault", "nothing")) },
  "fault while it waits": {
    step: (reply) => reply(op("sleep", { ms: 60_000, f: 1 }), pending(1), portMessage("fault", '{"type":"Trap","message":"later"}')),
  },
  "no JSON": { step: (reply) => reply(portMessage("answer", "{")) },
  "no state": { step: (reply) => reply(answer({ s: "asleep" })) },
  deadlock: { step: (reply) => reply(pending()) },
  author: {
    step: (reply) => reply(answer({ s: "failed", e: { type: "ValueError", message: "no", file: "a.py", line: 3, traceback: "t" } })),
  },
  "out of pages": { step: (reply) => reply(answer({ s: "failed", e: { type: "OutOfPages", message: "9 pages" } })) },
  "ended in a step": { step: () => undefined, then: (engine) => engine.page.end(engine.lastRun, "CpuBudgetExceeded", "10 s") },
  "ended while it waits": {
    step: (reply) => reply(op("sleep", { ms: 2 ** 40, f: 1 }), pending(1)),
    then: (engine) => engine.page.end(engine.lastRun, "Cancelled", "stopped"),
  },
  "ended with pages": {
    step: (reply) =>
      reply(op("ws.new", { ws: 1 }), op("pipe.new", { pipe: 2 }), op("submit", pass), op("sleep", { ms: 60_000, f: 9 }), pending(9)),
    then: (engine) => engine.page.end(engine.lastRun, "Cancelled", "stopped"),
  },
  talks: {
    step: (reply, body, count) => {
      if (count === 0) reply(op("send", { value: "ready" }), op("log", { level: "info", text: "hi" }), op("receive", { f: 1 }), pending(1));
      else reply(op("send", { value: body }), done({ "ü": null }));
    },
    then: (engine) => engine.page.deliver(engine.lastRun, '{"a":[1]}'),
  },
};

/** How it ended, what was said before, how many values were received, and the pages and instances still held. */
export async function play(engine: NodeEngine, { step, then, input, receives }: Scenario): Promise<object> {
  const { port1, port2 } = new MessageChannel();
  const from = engine.messages.length;
  let count = 0;
  const stepped = new Promise<void>((resolve) => {
    port2.onmessage = ({ data }: MessageEvent<string>) => {
      const [kind, body] = splitMessage(data);
      if (kind === "limits") return;
      step((...messages) => messages.forEach((message) => port2.postMessage(message)), count === 0 ? "" : body, count);
      count++;
      setTimeout(resolve, 20); // the engine has heard it
    };
  });
  const ended = engine.run(port1, input, receives);
  await Promise.race([stepped, ended]);
  then?.(engine);
  const last = await ended;
  port2.close();
  await new Promise((resolve) => setTimeout(resolve, 20)); // a step in flight lands
  const messages = engine.messages.slice(from);
  const said = messages.filter(({ kind }) => kind === "message" || kind === "log");
  const received = messages.filter(({ kind }) => kind === "received").length;
  const { engine: counters } = JSON.parse(engine.page.stats()) as { engine: { pages_used: number; instances: number } };
  return { last, said, received, pages: counters.pages_used, instances: counters.instances };
}
