// `host.call` in the page: synchronous ops are answered here, posted and future ops are checked and forwarded in order. Never throws.

import { opMessage } from "../messages.js";
import { type Checked, CHECKS } from "./checks.js";
import { type Limits, LIMITS } from "./limits.js";
import { characters, type Fields, parse } from "./ops.js";
import { type ModelLimits, UNKNOWN_MODEL } from "./passes.js";
import { over, Refusal } from "./refusal.js";
import { Table } from "./table.js";
import { TextError, type TextService } from "./text.js";

/** An op that the engine refused after the inferlet had gone on: the futures that it was to settle, and the error, which names the op. */
export interface Refused {
  readonly futures: readonly number[];
  readonly error: Readonly<Record<string, number | string>> & { readonly type: string; readonly message: string };
}

/** One inferlet's way out of its sandbox. `post` sends the text of a message to the engine. */
export class Host implements Checked {
  readonly table: Table;
  readonly limits: Limits;
  model: ModelLimits = UNKNOWN_MODEL;
  readonly #text: TextService;
  readonly #post: (message: string) => void;
  #untold: Refusal[] = []; // refusals of the engine, for the author's next calls
  #passes = 0; // submitted, with outputs that have not settled
  #silent = 0; // submitted in this step, without outputs: nothing will say here that they settled
  #ops = 0; // posted in this step
  #chars = 0; // of them
  #stepSent = 0;
  #sent = 0;
  #logged = 0;

  constructor(text: TextService, post: (message: string) => void, limits: Limits = LIMITS) {
    this.#text = text;
    this.#post = post;
    this.limits = limits;
    this.table = new Table(limits);
  }

  /** Run one op. The answer is JSON text, "" for nothing, or {"error": {…}}. */
  call(name: string, payload: string): string {
    try {
      if (payload.length > this.limits.text) {
        const limit = this.limits.text.toLocaleString("en");
        throw new Refusal(
          "OutputLimitExceeded",
          `${name.slice(0, 40)}: ${payload.length.toLocaleString("en")} characters in one call; the limit is ${limit}`,
        );
      }
      const { op, fields } = parse(name, payload);
      if (op.kind === "sync") return this.#answer(name, fields, payload);
      if (this.#untold.length > 0 && !UNHEARD.has(name)) throw this.#untold.shift()!;
      this.#admit(name, fields, payload);
      this.#forward(name, payload);
      return "";
    } catch (error) {
      if (error instanceof Refusal) return error.json();
      if (error instanceof TextError) return new Refusal(error.name, error.message).json();
      // The boundary to the guest: whatever is wrong on this side must not trap it.
      return new Refusal("HostError", `${name.slice(0, 40)}: the host failed: ${String(error).slice(0, 200)}`).json();
    }
  }

  /** What the engine runs at most: JSON text of {"max_tokens", "max_reads"}. */
  beginEngine(limits: string): void {
    const { max_tokens, max_reads } = JSON.parse(limits) as { max_tokens: number; max_reads: number };
    this.model = { ...this.model, maxTokens: max_tokens, maxReads: max_reads };
  }

  /** The run begins with this request (JSON text of a start). */
  beginRun(request: string): void {
    const { model } = JSON.parse(request) as { model?: { vocab?: unknown; hidden?: unknown } };
    const { vocab, hidden } = model ?? {};
    if (typeof vocab === "number" && typeof hidden === "number") this.model = { ...this.model, vocab, hidden };
  }

  /** A step begins, and brings these events (JSON text of a resume; "" for a start). */
  beginStep(events: string): void {
    this.#silent = this.#ops = this.#chars = this.#stepSent = 0;
    if (events === "") return;
    for (const [id, ok, value] of JSON.parse(events) as [number, boolean, unknown][]) this.table.settle(id, ok, value);
  }

  /**
   * The engine refused ops that were posted: the events that tell the inferlet, which awaits `awaited`. Without a future of its own, a
   * refusal is raised by what is awaited, a channel's value last; where that is nothing of the author's, or a message, by the next call.
   */
  refuse(refused: readonly Refused[], awaited: readonly number[]): [number, false, Refused["error"]][] {
    const events: [number, false, Refused["error"]][] = [];
    const free = (["output", "answer", "value"] as const).flatMap((what) => awaited.filter((id) => this.table.future(id)?.brings === what));
    for (const { futures, error } of refused) {
      const ids = futures.length > 0 ? futures : free.splice(0, 1);
      for (const id of ids) events.push([id, false, error]);
      const { type, message, ...fields } = error;
      if (ids.length === 0) this.#untold.push(new Refusal(type, message, fields as Record<string, number | string>));
    }
    return events;
  }

  /** The first refusal that the inferlet has not heard of. */
  get untold(): Refusal | null {
    return this.#untold[0] ?? null;
  }

  /** Throws Refusal where no more passes may be in flight. */
  roomForAPass(): void {
    const inFlight = this.#passes + this.#silent;
    if (inFlight >= this.limits.outstanding) throw over("passes outstanding", inFlight, this.limits.outstanding, "await some first");
  }

  passAccepted(silent: boolean): () => void {
    if (silent) this.#silent++;
    else this.#passes++;
    return () => void this.#passes--;
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
    if (this.#logged > this.limits.logged) throw over("characters printed and logged", this.#logged, this.limits.logged, "print() and log() less");
    this.#forward("log", payload); // in order with what else happens
    return "";
  }

  /** Check an op that the engine will carry out. */
  #admit(name: string, fields: Fields, payload: string): void {
    const { stepOps, stepChars } = this.limits;
    if (name === "send") return this.#admitSend(payload.length);
    if (this.#ops >= stepOps) throw over("ops of one step", this.#ops, stepOps, BETWEEN);
    if (this.#chars + payload.length > stepChars) throw over("characters of one step's ops", this.#chars + payload.length, stepChars, BETWEEN);
    CHECKS[name]?.(this, fields);
    this.#ops++;
    this.#chars += payload.length;
  }

  #admitSend(size: number): void {
    if (this.#stepSent + size > this.limits.stepSent) {
      throw over("characters sent in one step", this.#stepSent + size, this.limits.stepSent, "await something between them, or send less");
    }
    if (this.#sent + size > this.limits.sent) throw over("characters sent", this.#sent + size, this.limits.sent, "send less");
    this.#stepSent += size;
    this.#sent += size;
  }

  #forward(name: string, payload: string): void {
    this.#post(opMessage(name, payload));
  }
}

const BETWEEN = "await something between them";

/** Ops that no code of the author calls to hear of anything: of the inferlet's own loop, of destructors, and the log. */
const UNHEARD: ReadonlySet<string> = new Set(["sleep", "ws.drop", "ch.drop", "program.drop", "pipe.close", "log"]);

function hex(bytes: Uint8Array): string {
  let out = "";
  for (const byte of bytes) out += byte.toString(16).padStart(2, "0");
  return out;
}
