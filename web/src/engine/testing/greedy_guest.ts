// A guest without a component: greedy decoding in the ABI's own words, for tests and benches of the engine alone.

import { opMessage, portMessage, splitMessage } from "../../messages.js";

export interface GreedyJob {
  /** Canonical text of an epilogue that gives one token id. */
  readonly program: string;
  readonly prompt: readonly number[];
  readonly tokens: number;
}

type Event = [id: number, ok: true, value: number] | [id: number, ok: false, error: { type: string; message: string }];

const SET = 1;
const PIPE = 2;
const PROGRAM = 3;
const FIRST_FUTURE = 100;

/** Serves one run over `port`: submits a pass, awaits its token, feeds it back. The result is the list of tokens. */
export function serveGreedy(port: MessagePort, job: GreedyJob): void {
  const tokens: number[] = [];
  const post = (name: string, payload: object): void => port.postMessage(opMessage(name, JSON.stringify(payload)));
  const answer = (value: object): void => port.postMessage(portMessage("answer", JSON.stringify(value)));
  const submit = (feed: readonly number[]): void => {
    const future = FIRST_FUTURE + tokens.length;
    const geo = { mode: "folding", window: 0, sinks: 0 };
    post("submit", { pipe: PIPE, tokens: feed, ws: [SET], geo, prog: PROGRAM, outs: [future] });
    answer({ s: "pending", w: [future] });
  };
  port.onmessage = ({ data }: MessageEvent<string>) => {
    const [kind, body] = splitMessage(data);
    if (kind === "limits") return;
    if (kind === "start") {
      post("ws.new", { ws: SET });
      post("pipe.new", { pipe: PIPE });
      post("program", { prog: PROGRAM, text: job.program });
      submit(job.prompt);
      return;
    }
    const [event] = JSON.parse(body) as [Event];
    if (!event[1]) {
      answer({ s: "failed", e: event[2] });
      return;
    }
    tokens.push(event[2]);
    if (tokens.length < job.tokens) submit([event[2]]);
    else answer({ s: "done", r: tokens });
  };
}
