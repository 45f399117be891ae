// The op table of `host.call`, as in pie_core/host/ops.py: names, classes, fields with their caps, and the one validator.

import { MAX_NESTING, nestsDeeper } from "./nesting.js";
import { Refusal } from "./refusal.js";

export type OpClass = "sync" | "posted" | "future";
export type Fields = Record<string, unknown>;
/** What is wanted instead, or null when the value is fine. */
type Check = (value: unknown) => string | null;

export interface Op {
  readonly kind: OpClass;
  readonly fields: Readonly<Record<string, Check>>;
  /** Fields that may be left out. */
  readonly defaults: Fields;
}

export const MAX_TEXT = 1 << 20; // characters of one text
const MAX_CALL = 1 << 24; // characters that any call brings: for texts whose own limit the tokenizer tells, with both lengths
export const MAX_IDS = 1 << 20; // token ids or words in one list
const MAX_SETS = 256;
const MAX_CHANNELS = 64;
const MAX_OUTS = 64;
const MAX_PATH = 1 << 16; // tokens of a tree path
const MAX_NAME = 100; // characters of the name of a saved set
const MAX_MESSAGES = 4096;
const MAX_RANDOM = 4096; // bytes
const MAX_SLEEP_MS = 2 ** 40;

function isWhole(value: unknown, low: number, high: number): value is number {
  return typeof value === "number" && Number.isInteger(value) && value >= low && value <= high;
}

function whole(low: number, high: number): Check {
  const wanted = `a whole number ${low} .. ${high}`;
  return (value) => (isWhole(value, low, high) ? null : wanted);
}

/** Characters are code points, as in Python; the length in UTF-16 is never smaller. */
function text(most = MAX_TEXT): Check {
  const wanted = `text of at most ${most} characters`;
  return (value) => (typeof value === "string" && (value.length <= most || characters(value) <= most) ? null : wanted);
}

/** The code points of a text. */
export function characters(value: string): number {
  let count = value.length;
  for (let at = 1; at < value.length; at++) {
    if ((value.charCodeAt(at) & 0xfc00) === 0xdc00 && (value.charCodeAt(at - 1) & 0xfc00) === 0xd800) count--;
  }
  return count;
}

function numbers(most: number, high: number): Check {
  const wanted = `a list of at most ${most} whole numbers 0 .. ${high}`;
  return (value) => (Array.isArray(value) && value.length <= most && value.every((item) => isWhole(item, 0, high)) ? null : wanted);
}

function maybe(check: Check): Check {
  return (value) => {
    const wanted = value === null ? null : check(value);
    return wanted === null ? null : `${wanted}, or null`;
  };
}

function oneOf(...allowed: readonly string[]): Check {
  return (value) => (typeof value === "string" && allowed.includes(value) ? null : `one of ${allowed.join(", ")}`);
}

function list(most: number): Check {
  return (value) => (Array.isArray(value) && value.length <= most ? null : `a list of at most ${most} entries`);
}

function isObject(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

const flag: Check = (value) => (typeof value === "boolean" ? null : "true or false");
const anything: Check = () => null;
const object: Check = (value) => (isObject(value) ? null : "an object");
const id = whole(1, Number.MAX_SAFE_INTEGER);
const ids = numbers(MAX_SETS, Number.MAX_SAFE_INTEGER);
const tokenIds = numbers(MAX_IDS, 2 ** 32 - 1);
const words = tokenIds;
const count = whole(0, 2 ** 31);
const path = numbers(MAX_PATH, 2 ** 31);
const shape = numbers(4, 1 << 20);

function tokens(value: unknown): string | null {
  if (Array.isArray(value)) return value.length <= MAX_IDS ? null : `at most ${MAX_IDS} ids`;
  if (isObject(value) && Object.keys(value).length === 1 && id(value["ch"]) === null) return null;
  return 'a list of ids, a list of lists, or {"ch": id}';
}

/** Which buffered tokens become part of a set: so many, a path of them, or what a channel or an output says. */
function commit(value: unknown): string | null {
  const keys = isObject(value) ? Object.keys(value) : [];
  if (isObject(value) && keys.length === 1 && (keys[0] === "ch" || keys[0] === "out") && id(value[keys[0]]) === null) return null;
  if ((Array.isArray(value) ? path : count)(value) === null) return null;
  return `a whole number, a list of at most ${MAX_PATH} indices, {"ch": id} or {"out": id}`;
}

function op(kind: OpClass, fields: Readonly<Record<string, Check>>, defaults: Fields = {}): Op {
  return { kind, fields, defaults };
}

const chat = { messages: list(MAX_MESSAGES), cue: flag, tools: maybe(list(MAX_MESSAGES)) };

export const OPS: ReadonlyMap<string, Op> = new Map(
  Object.entries({
    encode: op("sync", { text: text(MAX_CALL) }),
    decode: op("sync", { ids: tokenIds }),
    bytes: op("sync", { ids: tokenIds }),
    "chat.render": op("sync", chat, { cue: true, tools: null }),
    "chat.text": op("sync", chat, { cue: true, tools: null }),
    "chat.role": op("sync", { role: text(64), content: text(MAX_CALL) }),
    "chat.cue": op("sync", {}),
    "chat.seal": op("sync", {}),
    log: op("sync", { level: oneOf("debug", "info", "warning", "error"), text: text() }),
    time: op("sync", {}),
    random: op("sync", { n: whole(0, MAX_RANDOM) }),

    "ws.new": op("posted", { ws: id, reuse: flag }, { reuse: true }),
    "ws.drop": op("posted", { ws: id }),
    "ws.fork": op("posted", { ws: id, of: id, pipe: maybe(id), buffer: flag }, { pipe: null, buffer: false }),
    "ws.commit": op("posted", { ws: id, n: commit }),
    "ws.discard": op("posted", { ws: id, n: maybe(count) }),
    "ws.truncate": op("posted", { ws: id, n: count }),
    "pipe.new": op("posted", { pipe: id }),
    "pipe.close": op("posted", { pipe: id }),
    "pipe.stop_when": op("posted", { pipe: id, ch: id }),
    "ch.new": op(
      "posted",
      {
        ch: id,
        dtype: oneOf("f32", "i32", "u32", "bool"),
        shape,
        capacity: whole(1, 1 << 12),
        seed: maybe(words),
        host: maybe(oneOf("reader", "writer")),
      },
      { shape: [], capacity: 1, seed: null, host: null },
    ),
    "ch.drop": op("posted", { ch: id }),
    "ch.put": op("posted", { ch: id, words }),
    "ch.set": op("posted", { ch: id, words }),
    program: op("posted", { prog: id, text: text(1 << 18) }),
    "program.drop": op("posted", { prog: id }),
    submit: op(
      "posted",
      {
        pipe: id,
        tokens,
        ws: ids,
        geo: object,
        reads: maybe(list(MAX_SETS)),
        prog: maybe(id),
        params: words,
        chans: numbers(MAX_CHANNELS, Number.MAX_SAFE_INTEGER),
        outs: numbers(MAX_OUTS, Number.MAX_SAFE_INTEGER),
      },
      { reads: null, prog: null, params: [], chans: [], outs: [] },
    ),
    send: op("posted", { value: anything }),

    "ch.take": op("future", { ch: id, f: id }),
    "ch.read": op("future", { ch: id, f: id }),
    sleep: op("future", { ms: whole(0, MAX_SLEEP_MS), f: id }),
    receive: op("future", { f: id }),
    "ws.length": op("future", { ws: id, f: id }),
    "ws.cached": op("future", { ws: id, f: id }),
    "ws.save": op("future", { ws: id, name: text(MAX_NAME), f: id }),
    "ws.open": op("future", { ws: id, name: text(MAX_NAME), f: id }),
    prewarm: op("future", { ids: tokenIds, f: id }),
  }),
);

/** The op and the checked fields of a call. Throws Refusal (UsageError) naming op, field, value and what is wanted. */
export function parse(name: string, payload: string): { op: Op; fields: Fields } {
  const op = OPS.get(name);
  if (op === undefined) throw usage(`unknown op '${name.slice(0, 80)}'; known: ${[...OPS.keys()].join(", ")}`);
  const fields = parseObject(name, payload);
  for (const [key, check] of Object.entries(op.fields)) {
    if (!Object.hasOwn(fields, key)) {
      if (!Object.hasOwn(op.defaults, key)) throw usage(`${name}: field '${key}' is missing`);
      fields[key] = op.defaults[key];
      continue;
    }
    const wanted = check(fields[key]);
    if (wanted !== null) throw usage(`${name}: ${key} = ${short(fields[key])} must be ${wanted}`);
  }
  const extra = Object.keys(fields).find((key) => !Object.hasOwn(op.fields, key));
  if (extra !== undefined) {
    throw usage(`${name}: unknown field '${extra.slice(0, 80)}'; known: ${Object.keys(op.fields).join(", ")}`);
  }
  return { op, fields };
}

function parseObject(name: string, payload: string): Fields {
  let value: unknown;
  try {
    value = payload === "" ? {} : JSON.parse(payload);
    if (nestsDeeper(payload, MAX_NESTING)) throw new Error(`it is nested deeper than ${MAX_NESTING} levels`);
  } catch (error) {
    throw usage(`${name}: the payload is not JSON: ${error instanceof Error ? error.message : String(error)}`);
  }
  if (!isObject(value)) throw usage(`${name}: the payload must be an object`);
  return value;
}

function usage(message: string): Refusal {
  return new Refusal("UsageError", message);
}

/** A value as a message shows it: of a long one the beginning, and what closes it. */
function short(value: unknown): string {
  const shown = JSON.stringify(typeof value === "string" ? value.slice(0, 61) : value) ?? String(value);
  return shown.length > 60 ? `${shown.slice(0, 56).replace(/[\ud800-\udbff]$/, "")}…${shown.slice(-1)}` : shown;
}
