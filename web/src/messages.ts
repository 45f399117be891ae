// Everything that crosses between the main thread, the engine worker and the inferlet workers.

import type { ErrorData } from "./errors.js";
import type { TextTables } from "./inferlet/text.js";

// --- shared values

export type DeviceChoice = "auto" | "webgpu" | "cpu";

/** What really runs, and why. */
export interface DeviceFacts {
  readonly kind: "webgpu" | "cpu";
  readonly name: string;
  readonly description: string;
  /** A rasteriser on the CPU. */
  readonly software: boolean;
  /** How it came to be chosen, a sentence. */
  readonly why: string;
}

export interface ModelFacts {
  readonly name: string;
  readonly vocab: number;
  readonly hidden: number;
  readonly context: number;
  readonly eos: readonly number[];
}

export interface PieInfo {
  readonly device: DeviceFacts;
  readonly model: ModelFacts;
  readonly version: string;
}

/**
 * `stage`: "runtime", "waiting", "download", "verify", "device", "selftest", "weights", "component". Bytes (0 of 0 where nothing is counted),
 * bytes a second, seconds (null: unknown, as while nothing comes).
 */
export interface Progress {
  readonly stage: string;
  readonly done: number;
  readonly total: number;
  readonly rate: number | null;
  readonly eta: number | null;
  /**
   * Only while the server of a download does not answer: `attempt` counts the tries since the last byte, the first is 1; it begins `in` so
   * many seconds, 0 while it is under way. Told each second.
   */
  readonly retrying?: { readonly attempt: number; readonly in: number };
}

/**
 * JSON text for the inferlet worker, made once from the checkpoint: {"spec": TokenizerSpec (pie_core/text/tokenizer.py),
 * "template": the chat template's source or null, "tokens": what it may name, such as {"bos_token": "<s>"}}.
 */
export type TextSpec = string;

// --- main thread -> engine worker

export type ToEngine =
  /** The first message. `base` ends with "/" and holds pyodide/, wheels/, kernels.wasm. Answered by "ready" or "failed". */
  | { kind: "boot"; base: string; model: string; device: DeviceChoice; kvPoolBytes?: number }
  /** End a load that goes on; answered by "failed" with Cancelled. */
  | { kind: "cancelLoad" }
  /** Run one inferlet over `port`, whose other end an inferlet worker holds. `input` is JSON text. `receives`: whether "deliver" may follow. Answered by "result" or "error". */
  | { kind: "run"; run: number; port: MessagePort; source: string; name: string; input: string; receives: boolean }
  /** End a run: "error" follows, an InferletError of this `type`. For cancels, the watchdog and a worker that died. */
  | { kind: "end"; run: number; type: string; message: string }
  /** JSON text for the inferlet's `receive`. */
  | { kind: "deliver"; run: number; value: string }
  /** Answered by "reply" with PieInfo. */
  | { kind: "info"; id: number }
  /** Answered by "reply" with EngineStats. */
  | { kind: "stats"; id: number }
  /** End every run and free the device; answered by "reply", after which the worker may be terminated. */
  | { kind: "dispose"; id: number };

// --- engine worker -> main thread

export type FromEngine =
  | { kind: "progress"; progress: Progress }
  | { kind: "ready"; info: PieInfo; text: TextSpec }
  | { kind: "failed"; error: ErrorData }
  /** The device was lost, or Python failed for good; every run has ended, nothing runs any more. */
  | { kind: "lost"; error: ErrorData }
  /** A value that the inferlet sent, as JSON text, in order and before "result". */
  | { kind: "message"; run: number; value: string }
  | { kind: "log"; run: number; level: string; text: string }
  /** One of the values delivered to the inferlet waits no longer. */
  | { kind: "received"; run: number }
  /** JSON text of what `main` returned. The port is closed. */
  | { kind: "result"; run: number; value: string }
  | { kind: "error"; run: number; error: ErrorData }
  | { kind: "reply"; id: number; value?: unknown; error?: ErrorData };

/** Counters of `Engine.status()`, the bytes of the Python heap and of the cpu device's memory, and milliseconds inside the device. */
export interface EngineStats {
  readonly engine: Readonly<Record<string, number>>;
  readonly heapBytes: number;
  readonly deviceBytes: number;
  readonly deviceMs: number;
}

// --- main thread -> inferlet worker

/** What every inferlet worker needs and one of them makes: compiled modules by file name, and the tables of the tokenizer. */
export interface SharedParts {
  readonly modules: Readonly<Record<string, WebAssembly.Module>>;
  readonly text: TextTables;
}

export type ToInferlet =
  /** The first message. `shared` is what the first worker made. Answered by "ready". */
  | { kind: "init"; base: string; text: TextSpec; shared?: SharedParts }
  /** Serve one run over `port`, the `last` one or not. Answered by "ended". */
  | { kind: "attach"; run: number; port: MessagePort; last: boolean }
  /** The watchdog's question, answered by "pong" as soon as the guest's step ends. `share`: of a core, that inferlets which compute have now. */
  | { kind: "ping"; n: number; share: number };

// --- inferlet worker -> main thread

export type FromInferlet =
  /** A fresh instance waits for a run: after "init", and again after a clean end. The first worker hands over what it made. */
  | { kind: "ready"; shared?: SharedParts }
  | { kind: "pong"; n: number }
  /** The port was closed. `clean`: the worker may serve another run. */
  | { kind: "ended"; run: number; clean: boolean }
  | { kind: "failed"; error: ErrorData };

// --- engine worker <-> inferlet worker: JSON text over the port of one run
//
// engine -> inferlet   ["limits",{"max_tokens","max_reads"}]  first: what the engine runs in one step
//                      ["start",REQUEST]     once
//                      ["resume",EVENTS]
//                      ["refused",[{"futures","error"}]]  ops of the last step, which is pending; answered like a step
// inferlet -> engine   ["op","NAME",PAYLOAD] posted and future ops, and "log", in order
//                      ["answer",ANSWER]     ends a step; ANSWER is what the guest's export returned
//                      ["fault",{"type","message"}]  ends the run: a trap, or whatever else the guest cannot say itself
// A text is a message; a list of texts is several messages, in order.
//
// REQUEST, EVENTS, PAYLOAD and ANSWER are JSON texts put in as they are, so that neither side parses what it only passes on.

export type PortKind = "limits" | "start" | "resume" | "refused" | "op" | "answer" | "fault";

/** The text of a message with one body. */
export function portMessage(kind: Exclude<PortKind, "op">, body: string): string {
  return `["${kind}",${body}]`;
}

/** The text of an op. `name` is one of the op table's names, so it needs no escapes. */
export function opMessage(name: string, payload: string): string {
  return `["op","${name}",${payload || "{}"}]`;
}

/** [kind, body] of a message that is not an op; the body is not parsed. */
export function splitMessage(text: string): [string, string] {
  const end = text.indexOf('"', 2);
  return [text.slice(2, end), text.slice(end + 2, -1)];
}
