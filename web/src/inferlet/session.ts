// One run in an inferlet worker: steps of the guest on the engine's messages, until it is done, has failed or trapped.

import { portMessage, splitMessage } from "../messages.js";
import { type Fault, faultOf, type Guest } from "./guest.js";
import { Host, type Refused } from "./host.js";
import { type Limits, LIMITS, MEMORY_BYTES } from "./limits.js";
import { Outbox } from "./outbox.js";
import type { TextService } from "./text.js";

/** The end of a MessagePort that a session uses; Node's has the same names. */
export interface Port {
  onmessage: ((event: MessageEvent<string>) => void) | null;
  postMessage(messages: string | string[]): void;
  close(): void;
}

export class Session {
  readonly host: Host;
  /** What the inferlet has of a core while it computes, as the page saw it last: so much of a step's time is its own. */
  share = 1;
  readonly #port: Port;
  readonly #guest: Guest;
  readonly #limits: Limits;
  readonly #outbox: Outbox;
  readonly #onEnd: (clean: boolean) => void;
  #last = ""; // answer
  #seconds = 0;
  #ended = false;

  /** `guest` must be an instance that served nobody before, and send its host calls to `host.call`. `onEnd` is called once. */
  constructor(port: Port, guest: Guest, text: TextService, onEnd: (clean: boolean) => void, limits: Limits = LIMITS) {
    this.#port = port;
    this.#guest = guest;
    this.#limits = limits;
    this.#onEnd = onEnd;
    this.#outbox = new Outbox((messages) => port.postMessage(messages));
    this.host = new Host(text, (message) => this.#outbox.say(message), limits);
    port.onmessage = ({ data }) => this.#receive(data);
  }

  #receive(message: string): void {
    if (this.#ended) return;
    const [kind, body] = splitMessage(message);
    if (kind === "start" || kind === "resume") this.#step(kind, body);
    else if (kind === "limits") this.host.beginEngine(body);
    else if (kind === "refused") this.#refused(JSON.parse(body) as Refused[]);
    else this.#fault({ type: "HostError", message: `the engine sent ${kind.slice(0, 40)}, which is no message of the ABI` });
  }

  #step(kind: "start" | "resume", body: string): void {
    const began = performance.now();
    let answer: string;
    try {
      if (kind === "start") this.host.beginRun(body);
      this.host.beginStep(kind === "resume" ? body : "");
      answer = this.#guest[kind](body);
    } catch (error) {
      this.#fault(faultOf(error, MEMORY_BYTES));
      return;
    }
    this.#seconds += (this.share * (performance.now() - began)) / 1000;
    const { text, totalSeconds } = this.#limits;
    if (answer.length > text) {
      const [got, limit] = [answer.length, text].map((n) => n.toLocaleString("en"));
      this.#fault({ type: "OutputLimitExceeded", message: `the inferlet answered ${got} characters at once; the limit is ${limit}` });
    } else if (this.#seconds > totalSeconds) {
      this.#fault({ type: "CpuBudgetExceeded", message: `the inferlet used ${totalSeconds} s of CPU time in total, which is its limit` });
    } else this.#conclude(answer);
  }

  /** The engine refused what was posted in the last step: the inferlet hears of it before anything else. */
  #refused(refused: readonly Refused[]): void {
    const { w } = JSON.parse(this.#last) as { w?: number[] };
    const events = this.host.refuse(refused, w ?? []);
    if (events.length > 0) this.#step("resume", JSON.stringify(events));
    else this.#outbox.end(portMessage("answer", this.#last));
  }

  #conclude(answer: string): void {
    const state = stateOf(answer);
    const { untold } = this.host;
    if (state === "done" && untold !== null) {
      this.#fault({ type: untold.kind, message: untold.message });
      return;
    }
    this.#last = answer;
    if (state === null) {
      this.#fault({ type: "GuestFault", message: `the guest answered ${answer.slice(0, 200)}, which is no state of the ABI` });
      return;
    }
    this.#outbox.end(portMessage("answer", answer));
    if (state !== "pending") this.#end(true);
  }

  #fault(fault: Fault): void {
    this.#outbox.end(portMessage("fault", JSON.stringify(fault)));
    this.#end(false);
  }

  #end(clean: boolean): void {
    this.#ended = true;
    this.#port.onmessage = null;
    this.#port.close(); // what was posted still arrives
    this.#onEnd(clean);
  }
}

/** The "s" of an answer; null for what is none. Parsed, since an author's code can make the guest answer anything. */
function stateOf(answer: string): "pending" | "done" | "failed" | null {
  try {
    const { s } = JSON.parse(answer) as { s?: unknown };
    return s === "pending" || s === "done" || s === "failed" ? s : null;
  } catch {
    return null;
  }
}
