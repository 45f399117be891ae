// Checks of a pass's tokens, read-outs and channels that need no more than the table and the model's limits, as in
// pie_core/engine/pass_checks.py and pie_core/host/port.py: told at the author's line.

import { repr } from "./python.js";
import type { ProgramFacts } from "./program.js";
import { Refusal } from "./refusal.js";
import type { ChannelEntry } from "./table.js";

/** What the engine can run, fixed when the model is loaded. Infinite until it is known. */
export interface ModelLimits {
  readonly vocab: number;
  readonly hidden: number;
  /** Token rows, and read-outs, of one step. */
  readonly maxTokens: number;
  readonly maxReads: number;
}

export const UNKNOWN_MODEL: ModelLimits = { vocab: 2 ** 32, hidden: 0, maxTokens: Infinity, maxReads: Infinity };

/** A channel that the inferlet writes, and the cells of it that a pass takes. */
export interface Use {
  readonly channel: ChannelEntry;
  readonly takes: number;
}

/** The number of tokens for each of `sets` working sets. Throws Refusal (InvalidPass). */
export function checkTokens(tokens: unknown, sets: number, model: ModelLimits): number[] {
  if (!Array.isArray(tokens)) return checkCell(tokens as ChannelEntry, sets, model);
  const nested = Array.isArray(tokens[0]);
  const lists: unknown[] = nested ? tokens : [tokens];
  if (lists.length !== sets) throw invalid(`tokens: ${lists.length} lists of ids for ${sets} working sets: give one list each`);
  return lists.map((ids, k) => {
    const field = nested ? `tokens[${k}]` : "tokens";
    if (!Array.isArray(ids)) throw invalid(`${field}: a list of ids is needed, got ${typeName(ids)}`);
    if (ids.length === 0) throw invalid(`${field} is empty: a pass needs at least one token for each working set`);
    checkIds(field, ids, model.vocab);
    return ids.length;
  });
}

function checkCell({ dtype, words }: ChannelEntry, sets: number, { maxTokens }: ModelLimits): number[] {
  if (dtype !== "u32" && dtype !== "i32") throw invalid(`tokens: a channel of ids must be u32 or i32, this one is ${dtype}`);
  if (words % sets !== 0) throw invalid(`tokens: a cell of ${words} ids does not divide among ${sets} working sets`);
  if (words > maxTokens) throw invalid(`tokens: ${words} ids of a channel must run in one step of at most ${maxTokens}`);
  return new Array<number>(sets).fill(words / sets);
}

/** Throws Refusal (InvalidPass) for the first of `ids` that is no token id, as `field[i]`. */
export function checkIds(field: string, ids: readonly unknown[], vocab: number): void {
  const at = ids.findIndex((id) => typeof id !== "number" || !Number.isInteger(id) || id < 0 || id >= vocab);
  if (at >= 0) throw invalid(`${field}[${at}] = ${repr(ids[at], 80)} is not a token id: whole numbers 0 .. ${vocab - 1} are`);
}

/** The number of read-outs. `counts`: tokens of each working set; no `program`: nobody looks at them. Throws Refusal (InvalidPass). */
export function checkReads(reads: unknown, counts: readonly number[], program: boolean, { maxReads, maxTokens }: ModelLimits): number {
  const lists = reads === null ? counts.map((n) => [n - 1]) : readLists(reads, counts);
  if (!program) return 0;
  const total = lists.reduce((sum, positions) => sum + positions.length, 0);
  if (total > maxReads) throw invalid(`reads: ${total} read-outs in one pass; one step has at most ${maxReads}`);
  const tail = lists.reduce((sum, positions, k) => (positions.length > 0 ? sum + counts[k]! - Math.min(...positions) : sum), 0);
  if (tail > maxTokens) {
    throw invalid(
      `reads: from the earliest read-out to the end are ${tail} tokens, which must run in one step of at most ${maxTokens}: split the pass, ` +
        "or read later positions",
    );
  }
  return total;
}

function readLists(reads: unknown, counts: readonly number[]): number[][] {
  if (!Array.isArray(reads) || reads.length !== counts.length) {
    throw invalid(`reads: one list of positions for each of the ${counts.length} working sets is needed, got ${repr(reads, 80)}`);
  }
  for (const [k, positions] of reads.entries()) {
    if (!Array.isArray(positions)) throw invalid(`reads[${k}]: a list of positions is needed, got ${repr(positions, 80)}`);
    const n = counts[k]!;
    const bad = positions.findIndex((p) => !Number.isInteger(p) || p < 0 || p >= n);
    if (bad >= 0) throw invalid(`reads[${k}]: position ${repr(positions[bad], 80)} is not a token of this pass: 0 .. ${n - 1} are`);
  }
  return reads as number[][];
}

/** What the program of a pass wants of the lists of a submit. Throws Refusal (InvalidPass). */
export function checkProgram(
  program: ProgramFacts | null,
  given: Readonly<{ channels: readonly ChannelEntry[]; params: number; outs: number; reads: number }>,
): Use[] {
  const { channels, params, reads } = given;
  const wanted = [program?.channels.length ?? 0, program?.params ?? 0, program?.outs ?? 0] as const;
  const got = [channels.length, params, wanted[2] > 0 ? given.outs : Math.max(0, given.outs - 1)] as const; // of none, one may tell the end
  if (wanted.some((count, k) => count !== got[k])) {
    const [need, lists] = [wanted, got].map(([a, b, c]) => `${a} channels, ${b} parameters and ${c} outputs`);
    throw invalid(`submit: the program has ${need}; chans, params and outs give ${lists}`);
  }
  if (program === null) return [];
  if (reads < program.reads) throw invalid(`submit: the program looks at ${program.reads} read-outs, the pass has ${reads}: read more`);
  if (program.rows !== null && program.rows !== reads) {
    throw invalid(`submit: outputs() was traced for ${program.rows} read-outs, the pass has ${reads}`);
  }
  const uses: Use[] = [];
  for (const [k, channel] of channels.entries()) {
    const { dtype, shape, usesCell, puts, takes } = program.channels[k]!;
    const type = `${channel.dtype}${repr(channel.shape, 80)}`;
    if (type !== `${dtype}${repr(shape, 80)}`) throw invalid(`submit: chans[${k}] is ${type}, the program expects ${dtype}${repr(shape, 80)}`);
    if (usesCell && (channel.host === "reader" || channel.stops)) {
      throw invalid(`submit: chans[${k}]: a pass cannot take from a channel that the host reads`);
    }
    if (puts && channel.host === "writer") throw invalid(`submit: chans[${k}]: a pass cannot put into a host-written channel`);
    if (puts) channel.putByPass = true;
    if (usesCell) uses.push({ channel, takes });
  }
  return uses;
}

/** Throws Refusal (ChannelEmpty) where a cell that the inferlet has to put is not there yet. */
export function checkCells(uses: readonly Use[]): Use[] {
  const written = uses.filter(({ channel }) => channel.host === "writer");
  if (written.some(({ channel }) => channel.counted && channel.puts <= channel.reserved)) {
    throw new Refusal("ChannelEmpty", "submit: every cell put so far into the host-written channel is spoken for: put one first");
  }
  return written;
}

function typeName(value: unknown): string {
  if (value === null) return "NoneType";
  return ({ string: "str", boolean: "bool", object: "dict" } as Record<string, string>)[typeof value] ?? (Number.isInteger(value) ? "int" : "float");
}

function invalid(message: string): Refusal {
  return new Refusal("InvalidPass", message);
}
