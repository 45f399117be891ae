// Runs that end in other ways than with a program's result: what the page's engine makes of each.

import type { FromEngine } from "../../messages.js";
import { opMessage, portMessage } from "../../messages.js";
import type { NodeEngine } from "./node_engine.js";

type Answer = (...messages: readonly string[]) => void;
/** `step(reply, body)` is called for start and each resume; `then` once the first step came. */
interface Scenario {
  readonly step: (reply: Answer, body: string, count: number) => void;
  readonly then?: (engine: NodeEngine) => void;
}

const op = (name: string, payload: object): string => opMessage(name, JSON.stringify(payload));
const answer = (value: object): string => portMessage("answer", JSON.stringify(value));
const pending = (...w: number[]): string => answer({ s: "pending", w });
const done = (r: unknown): string => answer({ s: "done", r });
const prompt = [5, 6, 7, 8];
const pass = { pipe: 2, tokens: prompt, ws: [1], geo: { mode: "folding", window: 0, sinks: 0 } };

export const SCENARIOS: Readonly<Record<string, Scenario>> = {
  refused: { step: (reply) => reply(op("ws.drop", { ws: 7 }), done(1)) },
  malformed: { step: (reply) => reply('["op","ws.new",{"ws":]', pending(9)) },
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

/** How it ended, what was said before, and the pages still held. */
export async function play(engine: NodeEngine, { step, then }: Scenario): Promise<{ last: FromEngine; said: FromEngine[]; pages: number }> {
  const { port1, port2 } = new MessageChannel();
  const from = engine.messages.length;
  let count = 0;
  const stepped = new Promise<void>((resolve) => {
    port2.onmessage = ({ data }: MessageEvent<string>) => {
      const body = data.slice(data.indexOf(",") + 1, -1);
      step((...messages) => messages.forEach((message) => port2.postMessage(message)), count === 0 ? "" : body, count);
      count++;
      setTimeout(resolve, 20); // the engine has heard it
    };
  });
  const ended = engine.run(port1);
  await stepped;
  then?.(engine);
  const last = await ended;
  port2.close();
  await new Promise((resolve) => setTimeout(resolve, 20)); // a step in flight lands
  const said = engine.messages.slice(from).filter(({ kind }) => kind === "message" || kind === "log");
  const { engine: counters } = JSON.parse(engine.page.stats()) as { engine: { pages_used: number } };
  return { last, said, pages: counters.pages_used };
}
