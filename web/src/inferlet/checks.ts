// What is refused at the call, by op: all that the inferlet's own table and the model's limits tell, as in pie_core/host/port.py and
// set_edits.py. Each check also enters what the op makes and counts what it changes; one that refuses has changed nothing.

import { checkGeometry, checkShape } from "./geometry.js";
import type { Limits } from "./limits.js";
import type { Fields } from "./ops.js";
import { checkCells, checkIds, checkProgram, checkReads, checkTokens, type ModelLimits, type Use } from "./passes.js";
import { programFacts } from "./program.js";
import { repr } from "./python.js";
import { over, Refusal } from "./refusal.js";
import { SetState } from "./set_state.js";
import type { ChannelEntry, SetEntry, Table } from "./table.js";

/** What the checks ask and tell a host. */
export interface Checked {
  readonly table: Table;
  readonly limits: Limits;
  readonly model: ModelLimits;
  /** Throws Refusal where no more passes may be in flight. */
  roomForAPass(): void;
  /** A pass was accepted; `silent`: nothing will say that it has ended. Returns what to call when it has. */
  passAccepted(silent: boolean): () => void;
}

type Check = (host: Checked, fields: Fields) => void;

const NAME = /^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}$/; // of a saved set

export const CHECKS: Readonly<Record<string, Check>> = {
  "ws.new": ({ table }, { ws }) => table.add("ws.new", ws as number, { kind: "working set", buffered: 0, state: new SetState() }),
  "ws.drop": ({ table }, { ws }) => {
    table.get("ws.drop", ws as number, "working set");
    table.remove(ws as number);
  },
  "ws.fork": ({ table }, fields) => {
    const { ws, of, buffer } = fields as { ws: number; of: number; buffer: boolean };
    const parent = table.get("ws.fork", of, "working set");
    const pipe = table.isClosed(fields["pipe"] as number) ? null : (fields["pipe"] as number | null);
    if (pipe !== null) table.get("ws.fork", pipe, "pipeline");
    table.fresh("ws.fork", ws);
    if (pipe !== null) parent.state.lose(); // behind a pipeline it may happen at another time than the parent's other passes
    table.add("ws.fork", ws, { kind: "working set", buffered: buffer ? parent.buffered : 0, state: SetState.fork(parent.state, buffer) });
  },
  "ws.commit": commit,
  "ws.discard": ({ table }, fields) => {
    const entry = table.get("ws.discard", fields["ws"] as number, "working set");
    shrink("ws.discard", entry, fields["n"] as number | null);
  },
  "ws.truncate": ({ table }, fields) => {
    const entry = table.get("ws.truncate", fields["ws"] as number, "working set");
    entry.state.truncate(fields["n"] as number);
    entry.buffered = null;
  },
  "ws.length": (host, fields) => ask("ws.length", host, fields, (state, f) => state.asked(f)),
  "ws.cached": (host, fields) => ask("ws.cached", host, fields, (state, f) => state.after([f])),
  "ws.save": (host, fields) => {
    host.table.get("ws.save", fields["ws"] as number, "working set");
    checkName(fields["name"] as string);
    ask("ws.save", host, fields, (state, f) => state.after([f]));
  },
  "ws.open": ({ table }, fields) => {
    const { ws, f } = fields as { ws: number; f: number };
    checkName(fields["name"] as string);
    if (f === ws) throw new Refusal("UsageError", `ws.open: ws and f are both ${f}; ids are unique within the instance`);
    announce("ws.open", table, f);
    const state = SetState.open(f);
    table.add("ws.open", ws, { kind: "working set", buffered: null, state });
    future("ws.open", table, f, (ok, value) => state.settled(f, ok, value));
  },
  "pipe.new": ({ table }, { pipe }) => table.add("pipe.new", pipe as number, { kind: "pipeline", stops: false }),
  "pipe.close": ({ table }, { pipe }) => {
    table.get("pipe.close", pipe as number, "pipeline");
    table.close(pipe as number);
  },
  "pipe.stop_when": ({ table }, fields) => {
    const pipe = table.get("pipe.stop_when", fields["pipe"] as number, "pipeline");
    const channel = table.get("pipe.stop_when", fields["ch"] as number, "channel");
    if (channel.dtype !== "bool" || channel.words !== 1) {
      throw usage(`pipe.stop_when: the channel is ${channel.dtype}${repr(channel.shape, 80)}; one bool is needed`);
    }
    if (channel.host === "writer" || channel.puts > 0 || channel.putByPass) {
      throw usage("pipe.stop_when: call it before the first submit that puts, on a channel that only passes write");
    }
    if (pipe.stops || channel.stops) throw usage("pipe.stop_when: the pipeline has a stop channel, or the channel ends another pipeline");
    pipe.stops = channel.stops = true;
  },
  "ch.new": makeChannel,
  "ch.drop": ({ table }, { ch }) => {
    table.get("ch.drop", ch as number, "channel");
    table.remove(ch as number);
  },
  "ch.put": ({ table }, fields) => {
    const channel = written("ch.put", table, fields);
    const { capacity } = channel;
    const held = channel.puts - channel.consumed;
    if (channel.counted && held >= capacity) {
      throw new Refusal("ChannelFull", `ch.put: the ring holds ${held} of ${capacity} cells; await a pass that takes one`, { capacity });
    }
    channel.puts++;
  },
  "ch.set": ({ table }, fields) => {
    const channel = written("ch.set", table, fields);
    if (channel.puts <= channel.reserved) channel.puts++;
  },
  "ch.take": (host, fields) => receiveFrom("ch.take", host, fields),
  "ch.read": (host, fields) => receiveFrom("ch.read", host, fields),
  program: ({ table, model }, fields) => {
    const { prog, text } = fields as { prog: number; text: string };
    table.fresh("program", prog);
    const widths = model.hidden > 0 ? { logits: model.vocab, hidden: model.hidden } : {};
    table.add("program", prog, { kind: "program", facts: programFacts(text, widths) });
  },
  "program.drop": ({ table }, { prog }) => {
    table.get("program.drop", prog as number, "program");
    table.remove(prog as number);
  },
  submit,
  prewarm: (host, fields) => {
    const { ids, f } = fields as { ids: number[]; f: number };
    announce("prewarm", host.table, f);
    checkIds("prewarm: ids", ids, host.model.vocab);
    host.roomForAPass(); // it is one, too
    future("prewarm", host.table, f, host.passAccepted(false));
  },
  sleep: ({ table }, { f }) => {
    announce("sleep", table, f as number);
    table.add("sleep", f as number, { kind: "future", brings: "alarm", settled: null });
  },
  receive: ({ table }, { f }) => {
    announce("receive", table, f as number);
    table.add("receive", f as number, { kind: "future", brings: "message", settled: null });
  },
};

function announce(op: string, table: Table, f: number): void {
  table.roomForAFuture();
  table.fresh(op, f);
}

function future(op: string, table: Table, f: number, settled: (ok: boolean, value: unknown) => void): void {
  table.add(op, f, { kind: "future", brings: "answer", settled });
}

function ask(op: string, { table }: Checked, fields: Fields, tell: (state: SetState, f: number) => void): void {
  const f = fields["f"] as number;
  announce(op, table, f);
  const { state } = table.get(op, fields["ws"] as number, "working set");
  tell(state, f);
  future(op, table, f, (ok, value) => state.settled(f, ok, value));
}

function checkName(name: string): void {
  if (NAME.test(name)) return;
  throw new Refusal(
    "InvalidState",
    `a saved set cannot be named ${repr(name, 120)}: use 1 to 100 letters, digits, '_', '-' and '.', not '.' first`,
  );
}

function commit({ table }: Checked, fields: Fields): void {
  const { ws, n } = fields as { ws: number; n: number | number[] | { ch?: number } };
  const entry = table.get("ws.commit", ws, "working set");
  if (typeof n === "number") shrink("ws.commit", entry, n);
  else if (Array.isArray(n)) {
    const most = n.reduce((a, b) => Math.max(a, b), 0);
    if (entry.buffered !== null && n.length > 0 && most >= entry.buffered) {
      throw invalidState(`ws.commit: index ${most}: the buffer of the working set holds at most ${entry.buffered} tokens`);
    }
    entry.state.commitPath(n);
    entry.buffered = 0;
  } else {
    if (n.ch !== undefined) readable("ws.commit", table, n.ch);
    entry.state.lose(); // only the device knows how many
  }
}

function shrink(op: "ws.commit" | "ws.discard", entry: SetEntry, n: number | null): void {
  if (n !== null && entry.buffered !== null && n > entry.buffered) {
    throw invalidState(`${op}(${n}): the buffer of the working set holds at most ${entry.buffered} tokens`);
  }
  if (op === "ws.discard") entry.state.discard(n);
  else entry.state.commit(n ?? 0);
  if (n === null) entry.buffered = 0;
  else if (entry.buffered !== null) entry.buffered -= n;
}

function makeChannel({ table, limits }: Checked, fields: Fields): void {
  const { ch, shape, dtype, capacity, seed, host } = fields as {
    ch: number; shape: number[]; dtype: string; capacity: number; seed: number[] | null; host: string | null;
  };
  if (shape.includes(0)) throw usage(`ch.new: shape ${repr(shape, 80)} has an empty extent`);
  const words = shape.reduce((product, extent) => product * extent, 1);
  const total = table.cellWords + words * (capacity + 1); // a ring has one cell more than its capacity
  if (total > limits.cellWords) {
    throw over("words of channel cells", total, limits.cellWords, "cells have a word an element, rings capacity + 1: use smaller ones, or let go of channels");
  }
  if (seed !== null && seed.length !== words) {
    throw usage(`ch.new: the seed has ${seed.length} words, a cell of shape ${repr(shape, 80)} has ${words}`);
  }
  const puts = seed === null ? 0 : 1;
  table.add("ch.new", ch, {
    kind: "channel", dtype, shape, words, capacity, host, puts, reserved: 0, consumed: 0, counted: true, putByPass: false, stops: false,
  });
  table.cellWords = total;
}

function written(op: string, table: Table, fields: Fields): ChannelEntry {
  const channel = table.get(op, fields["ch"] as number, "channel");
  const words = (fields["words"] as number[]).length;
  if (channel.host !== "writer") throw channelError(`${op}: the channel is not host-written; create it with host="writer"`);
  if (words !== channel.words) throw channelError(`${op}: ${words} words for a cell of ${channel.words}`);
  return channel;
}

function readable(op: string, table: Table, ch: number): void {
  if (table.get(op, ch, "channel").host !== "reader") {
    throw channelError(`${op}: the host does not read this channel; create it with host="reader"`);
  }
}

function receiveFrom(op: string, { table }: Checked, fields: Fields): void {
  const f = fields["f"] as number;
  announce(op, table, f);
  readable(op, table, fields["ch"] as number);
  table.add(op, f, { kind: "future", brings: "value", settled: null });
}

function submit(host: Checked, fields: Fields): void {
  const { table, model } = host;
  const { pipe: pipeId, ws, prog, outs } = fields as { pipe: number; ws: number[]; prog: number | null; outs: number[] };
  if (table.isClosed(pipeId)) throw new Refusal("PipelineClosed", "submit: the pipeline is closed; make a new one");
  const pipe = table.get("submit", pipeId, "pipeline");
  host.roomForAPass();
  const sets = ws.map((key) => table.get("submit", key, "working set"));
  if (sets.length === 0 || new Set(ws).size !== sets.length) {
    throw new Refusal("InvalidPass", "submit: ws must name at least one working set, each once");
  }
  const geometry = checkGeometry(fields["geo"] as Fields);
  const fed = Array.isArray(fields["tokens"]) ? null : table.get("submit", (fields["tokens"] as { ch: number }).ch, "channel");
  const counts = checkTokens(fed ?? fields["tokens"], sets.length, model);
  checkShape(geometry, counts);
  const reads = checkReads(fields["reads"], counts, prog !== null, model);
  const uses = channelUses(host, fields, fed, reads);
  for (const id of outs) table.fresh("submit", id);
  if (new Set(outs).size !== outs.length) throw usage("submit: outs names a future twice");
  // nothing below refuses
  const ended = host.passAccepted(outs.length === 0);
  for (const { channel, takes } of uses) {
    channel.reserved += takes;
    if (outs.length === 0) channel.consumed += takes; // nothing will say when: the engine refuses a put that comes too early
  }
  for (const [k, { state }] of sets.entries()) {
    if (pipe.stops) state.lose(); // whether the pass is skipped shows on the device
    else state.extend(outs, counts[k]!, geometry.mode, geometry.tree);
  }
  if (geometry.mode === "buffered") for (const [k, entry] of sets.entries()) if (entry.buffered !== null) entry.buffered += counts[k]!;
  let over = false;
  for (const id of outs) {
    const settled = (ok: boolean, value: unknown): void => {
      for (const { state } of sets) state.settled(id, ok, value);
      if (over) return;
      over = true;
      ended();
      for (const { channel, takes } of uses) {
        channel.consumed += takes;
        channel.counted &&= ok;
      }
    };
    table.add("submit", id, { kind: "future", brings: "output", settled });
  }
}

function channelUses({ table }: Checked, fields: Fields, fed: ChannelEntry | null, reads: number): Use[] {
  const channels = (fields["chans"] as number[]).map((key) => table.get("submit", key, "channel"));
  const feed: Use[] = fed === null ? [] : [{ channel: fed, takes: 1 }];
  if (fields["prog"] === null) {
    checkProgram(null, { channels, params: (fields["params"] as unknown[]).length, outs: (fields["outs"] as unknown[]).length, reads });
    return checkCells(feed);
  }
  const { facts } = table.get("submit", fields["prog"] as number, "program");
  if (facts === null) return [];
  const given = { channels, params: (fields["params"] as unknown[]).length, outs: (fields["outs"] as unknown[]).length, reads };
  return checkCells([...feed, ...checkProgram(facts, given)]);
}

function usage(message: string): Refusal {
  return new Refusal("UsageError", message);
}

function invalidState(message: string): Refusal {
  return new Refusal("InvalidState", message);
}

function channelError(message: string): Refusal {
  return new Refusal("ChannelError", message);
}
