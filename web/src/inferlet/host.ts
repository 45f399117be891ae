// `host.call` in the page: synchronous ops are answered here, posted and future ops are checked and forwarded in order. Never throws.

import { opMessage } from "../messages.js";
import { type Limits, LIMITS } from "./limits.js";
import { characters, type Fields, parse } from "./ops.js";
import { checkIds, checkTokens } from "./passes.js";
import { over, Refusal } from "./refusal.js";
import { TextError, type TextService } from "./text.js";

/** One inferlet's way out of its sandbox. `post` sends the text of a message to the engine. */
export class Host {
  readonly #text: TextService;
  readonly #post: (message: string) => void;
  readonly #limits: Limits;
  /** Futures in flight; those of a pass share one record. */
  readonly #futures = new Map<number, Pass | null>();
  #vocab = 2 ** 32;
  #passes = 0; // submitted, with outputs that have not settled
  #handles = 0; // working sets, pipelines and channels
  #programs = 0;
  #cellWords = 0; // of all channel rings
  #silent = 0; // submitted in this step, without outputs: nothing will say here that they settled
  #ops = 0; // posted in this step
  #chars = 0; // of them
  #stepSent = 0;
  #sent = 0;
  #logged = 0;

  constructor(text: TextService, post: (message: string) => void, limits: Limits = LIMITS) {
    this.#text = text;
    this.#post = post;
    this.#limits = limits;
  }

  /** Run one op. The answer is JSON text, "" for nothing, or {"error": {…}}. */
  call(name: string, payload: string): string {
    try {
      if (payload.length > this.#limits.text) {
        const limit = this.#limits.text.toLocaleString("en");
        throw new Refusal(
          "OutputLimitExceeded",
          `${name.slice(0, 40)}: ${payload.length.toLocaleString("en")} characters in one call; the limit is ${limit}`,
        );
      }
      const { op, fields } = parse(name, payload);
      if (op.kind === "sync") return this.#answer(name, fields, payload);
      this.#admit(name, op.kind === "future", fields, payload);
      this.#forward(name, payload);
      return "";
    } catch (error) {
      if (error instanceof Refusal) return error.json();
      if (error instanceof TextError) return new Refusal(error.name, error.message).json();
      // The boundary to the guest: whatever is wrong on this side must not trap it.
      return new Refusal("HostError", `${name.slice(0, 40)}: the host failed: ${String(error).slice(0, 200)}`).json();
    }
  }

  /** The run begins with this request (JSON text of a start). */
  beginRun(request: string): void {
    const { model } = JSON.parse(request) as { model?: { vocab?: unknown } };
    if (typeof model?.vocab === "number") this.#vocab = model.vocab;
  }

  /** A step begins, and brings these events (JSON text of a resume; "" for a start). */
  beginStep(events: string): void {
    this.#silent = this.#ops = this.#chars = this.#stepSent = 0;
    if (events === "" || this.#futures.size === 0) return;
    for (const [id] of JSON.parse(events) as [number][]) this.#settle(id);
  }

  #settle(id: number): void {
    const pass = this.#futures.get(id);
    if (pass === undefined) return;
    this.#futures.delete(id);
    if (pass === null || pass.settled) return;
    pass.settled = true;
    this.#passes--;
  }

  #answer(name: string, fields: Fields, payload: string): string {
    switch (name) {
      case "encode":
        return JSON.stringify(this.#text.encode(fields["text"] as string));
      case "decode":
        return JSON.stringify(this.#text.decode(fields["ids"] as number[]));
      case "bytes":
        return JSON.stringify((fields["ids"] as number[]).map((id) => hex(this.#text.tokenBytes(id))));
      case "chat.render":
        return JSON.stringify(this.#text.render(fields["messages"], fields["cue"] as boolean, fields["tools"] as unknown[] | null));
      case "chat.text":
        return JSON.stringify(this.#text.renderText(fields["messages"], fields["cue"] as boolean, fields["tools"] as unknown[] | null));
      case "chat.role":
        return JSON.stringify(this.#text.role(fields["role"] as string, fields["content"] as string));
      case "chat.cue":
        return JSON.stringify(this.#text.cue());
      case "chat.seal":
        return JSON.stringify(this.#text.seal());
      case "log":
        return this.#log(fields["text"] as string, payload);
      case "time":
        return JSON.stringify({ wall: (performance.timeOrigin + performance.now()) / 1000, mono: performance.now() / 1000 });
      case "random":
        return JSON.stringify(hex(crypto.getRandomValues(new Uint8Array(fields["n"] as number))));
      default:
        throw new Refusal("HostError", `${name}: this host does not answer it`);
    }
  }

  #log(text: string, payload: string): string {
    this.#logged += characters(text);
    if (this.#logged > this.#limits.logged) throw over("characters printed and logged", this.#logged, this.#limits.logged, "print() and log() less");
    this.#forward("log", payload); // in order with what else happens
    return "";
  }

  /** Check an op that the engine will carry out against this inferlet's budgets. */
  #admit(name: string, isFuture: boolean, fields: Fields, payload: string): void {
    const limits = this.#limits;
    if (this.#ops >= limits.stepOps) throw over("ops of one step", this.#ops, limits.stepOps, "await something first");
    if (this.#chars + payload.length > limits.stepChars) {
      throw over("characters of one step's ops", this.#chars + payload.length, limits.stepChars, "await something first");
    }
    if (name === "submit") {
      checkTokens(fields["tokens"], (fields["ws"] as number[]).length, this.#vocab);
      this.#admitPass(name, fields["outs"] as number[]);
    } else if (name === "prewarm") {
      checkIds("prewarm: ids", fields["ids"] as number[], this.#vocab);
      this.#checkFutures();
      this.#admitPass(name, [fields["f"] as number]); // it is one, too
    } else if (name === "send") this.#admitSend(payload.length);
    else if (isFuture) {
      this.#checkFutures();
      const future = this.#fresh(name, fields["f"] as number);
      this.#admitHandle(name, fields);
      this.#futures.set(future, null);
    } else this.#admitHandle(name, fields);
  }

  #checkFutures(): void {
    const inFlight = this.#futures.size;
    if (inFlight >= this.#limits.futures) throw over("futures in flight", inFlight, this.#limits.futures, "await some first");
  }

  /** Handles, programs and channel cells, as in pie_core/host/table.py; a drop of what is not there ends the run in the engine. */
  #admitHandle(name: string, fields: Fields): void {
    const { handles, programs, cellWords } = this.#limits;
    if (name === "program") {
      if (this.#programs >= programs) throw over("programs", this.#programs, programs, "reuse the ones sent before");
      this.#programs++;
    } else if (name === "ws.drop" || name === "pipe.close") this.#handles--;
    else if (MAKES_HANDLE.has(name)) {
      const words = name === "ch.new" ? this.#cellWords + ringWords(fields) : this.#cellWords;
      if (words > cellWords) throw over("words of channel cells", words, cellWords, "use smaller cells or capacities");
      if (this.#handles >= handles) throw over("handles", this.#handles, handles, "drop working sets, close pipelines, and use channels again");
      this.#cellWords = words;
      this.#handles++;
    }
  }

  #admitPass(name: string, outs: readonly number[]): void {
    const inFlight = this.#passes + this.#silent;
    if (inFlight >= this.#limits.outstanding) throw over("passes outstanding", inFlight, this.#limits.outstanding, "await some first");
    for (const id of outs) this.#fresh(name, id);
    if (outs.length === 0) {
      this.#silent++;
      return;
    }
    const pass: Pass = { settled: false };
    for (const id of outs) this.#futures.set(id, pass);
    this.#passes++;
  }

  #admitSend(size: number): void {
    if (this.#stepSent + size > this.#limits.stepSent) {
      throw over("characters sent in one step", this.#stepSent + size, this.#limits.stepSent, "await something, or send less");
    }
    if (this.#sent + size > this.#limits.sent) throw over("characters sent", this.#sent + size, this.#limits.sent, "send less");
    this.#stepSent += size;
    this.#sent += size;
  }

  #fresh(name: string, id: number): number {
    if (this.#futures.has(id)) {
      throw new Refusal("UsageError", `${name}: id ${id} is taken by a future; ids are unique within the instance`);
    }
    return id;
  }

  #forward(name: string, payload: string): void {
    this.#ops++;
    this.#chars += payload.length;
    this.#post(opMessage(name, payload));
  }
}

const MAKES_HANDLE: ReadonlySet<string> = new Set(["ws.new", "ws.fork", "ws.open", "pipe.new", "ch.new"]);

/** u32 words of a channel's ring: one cell more than its capacity. */
function ringWords(fields: Fields): number {
  const cell = (fields["shape"] as number[]).reduce((words, extent) => words * extent, 1);
  return cell * ((fields["capacity"] as number) + 1);
}

interface Pass {
  settled: boolean;
}

function hex(bytes: Uint8Array): string {
  let out = "";
  for (const byte of bytes) out += byte.toString(16).padStart(2, "0");
  return out;
}
