// All ids of one run, as in pie_core/host/table.py: what the page's host must know to refuse a wrong op at the call.

import type { Limits } from "./limits.js";
import type { ProgramFacts } from "./program.js";
import { over, Refusal } from "./refusal.js";
import type { SetState } from "./set_state.js";

export interface SetEntry {
  readonly kind: "working set";
  /** The most that its buffer can hold; null where a truncate made that unknown, or the set was opened. */
  buffered: number | null;
  readonly state: SetState;
}

export interface PipeEntry {
  readonly kind: "pipeline";
  stops: boolean;
}

export interface ChannelEntry {
  readonly kind: "channel";
  readonly dtype: string;
  readonly shape: readonly number[];
  /** Of a cell. */
  readonly words: number;
  readonly capacity: number;
  readonly host: string | null;
  /** Cells that the inferlet put, that submitted passes take, and that passes have taken as far as is known. */
  puts: number;
  reserved: number;
  consumed: number;
  /** False once a pass that took a cell failed, or was skipped: only the engine knows whether the cell was given back. */
  counted: boolean;
  putByPass: boolean;
  stops: boolean;
}

export interface ProgramEntry {
  readonly kind: "program";
  /** Null for a text that the engine will refuse. */
  readonly facts: ProgramFacts | null;
}

export interface FutureEntry {
  readonly kind: "future";
  /** What it brings. A message would be lost to a rejection, and no code of the author awaits an alarm: the inferlet's own loop sleeps. */
  readonly brings: "output" | "answer" | "value" | "message" | "alarm";
  /** Called when it settles; not by a Deadlock, which ends a wait only. */
  readonly settled: ((ok: boolean, value: unknown) => void) | null;
}

export type Entry = SetEntry | PipeEntry | ChannelEntry | ProgramEntry | FutureEntry;
type Named<Kind extends Entry["kind"]> = Extract<Entry, { kind: Kind }>;

const CLOSED = 1 << 14; // pipelines of which it is known that they were closed; of those before them nothing is

export class Table {
  readonly #limits: Limits;
  readonly #byId = new Map<number, Entry>();
  readonly #closed = new Set<number>();
  #handles = 0;
  #programs = 0;
  #futures = 0;
  /** Of all channel rings. */
  cellWords = 0;

  constructor(limits: Limits) {
    this.#limits = limits;
  }

  /** Throws Refusal for an id that is taken. */
  fresh(op: string, id: number): void {
    const entry = this.#byId.get(id);
    if (entry !== undefined) throw new Refusal("UsageError", `${op}: id ${id} is taken by a ${entry.kind}; ids are unique within the instance`);
  }

  /** Enter a new id. Throws Refusal for one that is taken and for a budget that is used up. */
  add(op: string, id: number, entry: Entry): void {
    this.fresh(op, id);
    const { handles, programs } = this.#limits;
    if (entry.kind === "program") {
      if (this.#programs >= programs) {
        throw over("programs", this.#programs, programs, "each new shape of an epilogue is one: submit passes before tracing more, or pad to one length");
      }
      this.#programs++;
    } else if (entry.kind === "future") this.#futures += Number(entry.brings !== "output");
    else {
      if (this.#handles >= handles) {
        throw over("handles", this.#handles, handles, "let go of working sets, pipelines and channels");
      }
      this.#handles++;
    }
    this.#byId.set(id, entry);
  }

  /** The entry of `id`. Throws Refusal for one that is unknown, dropped or of another kind. */
  get<Kind extends "working set" | "pipeline" | "channel" | "program">(op: string, id: number, kind: Kind): Named<Kind> {
    const entry = this.#byId.get(id);
    if (entry?.kind === kind) return entry as Named<Kind>;
    const what = entry === undefined ? "is unknown, or was dropped" : `is a ${entry.kind}`;
    throw new Refusal("UsageError", `${op}: id ${id} ${what}; a ${kind} is needed`);
  }

  /** A handle was dropped. */
  remove(id: number): void {
    const entry = this.#byId.get(id);
    if (entry === undefined) return;
    this.#byId.delete(id);
    if (entry.kind === "program") this.#programs--;
    else this.#handles--;
    if (entry.kind === "channel") this.cellWords -= entry.words * (entry.capacity + 1);
  }

  /** A pipeline was closed. */
  close(pipe: number): void {
    this.remove(pipe);
    this.#closed.add(pipe);
    for (const oldest of this.#closed) {
      if (this.#closed.size <= CLOSED) break;
      this.#closed.delete(oldest);
    }
  }

  isClosed(pipe: number): boolean {
    return this.#closed.has(pipe);
  }

  /** Throws Refusal where no more futures may be in flight; outputs of passes are not among them. */
  roomForAFuture(): void {
    const waiting = this.#futures;
    if (waiting >= this.#limits.futures) throw over("futures in flight", waiting, this.#limits.futures, "await some first");
  }

  /** The future of this id, if it is in flight. */
  future(id: number): FutureEntry | null {
    const entry = this.#byId.get(id);
    return entry?.kind === "future" ? entry : null;
  }

  /** An event of the engine. */
  settle(id: number, ok: boolean, value: unknown): void {
    const entry = this.future(id);
    if (entry === null || (!ok && isDeadlock(value))) return;
    this.#byId.delete(id);
    if (entry.brings !== "output") this.#futures--;
    entry.settled?.(ok, value);
  }
}

function isDeadlock(error: unknown): boolean {
  return typeof error === "object" && error !== null && (error as { type?: unknown }).type === "Deadlock";
}
