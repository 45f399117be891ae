// Checks of a pass's geometry that need no more than its fields, as in pie_core/engine/geometry.py: told at the author's line.

import { repr } from "./python.js";
import { Refusal } from "./refusal.js";

export interface Geometry {
  readonly mode: "folding" | "buffered";
  /** Rows of its mask, null where it has none. */
  readonly masked: number | null;
  /** The parent of each token: an index in the buffer, or -1. */
  readonly tree: readonly number[] | null;
}

const U32_END = 2 ** 32;
const MAX_MASK_BITS = 1 << 24; // of all rows of one mask together
const KNOWN: ReadonlySet<string> = new Set(["mode", "window", "sinks", "mask", "width", "tree"]);

/** The geometry of these fields. Throws Refusal: UnsupportedGeometry for what no engine runs, InvalidPass for bad values. */
export function checkGeometry(fields: Readonly<Record<string, unknown>>): Geometry {
  for (const [name, value] of Object.entries(fields)) {
    if (!KNOWN.has(name) && value !== null) {
      throw unsupported(`geometry field ${repr(name, 40)} is unknown; known: mode, window, sinks, mask, width, tree`);
    }
  }
  const { mode = "folding", window = 0, sinks = 0 } = fields;
  if (mode !== "folding" && mode !== "buffered") {
    throw unsupported(`geometry mode ${repr(mode, 40)} is unknown; use 'folding' or 'buffered'`);
  }
  for (const [name, value] of [["window", window], ["sinks", sinks]] as const) {
    if (!isWhole(value, 0, U32_END)) throw invalid(`geometry ${name}=${repr(value, 40)} must be a whole number >= 0`);
  }
  if (sinks !== 0 && window === 0) throw invalid(`geometry sinks=${String(sinks)} needs a window: without one every position is visible`);
  const masked = checkMask(fields["mask"] ?? null, fields["width"] ?? null);
  const tree = checkTree(fields["tree"] ?? null);
  if (mode === "buffered" || tree === null) return { mode, masked, tree };
  if (tree.some((parent, k) => parent !== k - 1)) {
    throw unsupported(
      `geometry tree=${repr(tree, 60)} branches, and a folding pass freezes one sequence: use buffered(tree=…) and commit a path`,
    );
  }
  return { mode, masked, tree: null }; // a chain behind the prefix is what a folding pass is anyway
}

/** Throws Refusal for a mask or a tree that does not fit `counts`, the tokens of each working set. */
export function checkShape({ masked, tree }: Geometry, counts: readonly number[]): void {
  if (masked === null && tree === null) return;
  if (counts.length !== 1) {
    throw invalid(`a pass with a mask or a tree extends one working set, this one has ${counts.length}: submit a pass for each`);
  }
  for (const [name, given] of [["mask", masked], ["tree", tree?.length ?? null]] as const) {
    if (given !== null && given !== counts[0]) {
      throw invalid(`geometry ${name} has ${given} entries for the ${counts[0]} tokens of the pass: give one for each`);
    }
  }
}

function checkMask(mask: unknown, width: unknown): number | null {
  if (mask === null) return null;
  if (!Array.isArray(mask) || mask.length === 0 || !mask.every((row) => Array.isArray(row) && row.length > 0)) {
    throw invalid(`geometry mask=${repr(mask, 60)} must be a list of rows, one a new token, each a list of bools or of 32-bit words`);
  }
  const rows = mask as unknown[][];
  const size = rows[0]!.length;
  const packed = typeof rows[0]![0] !== "boolean";
  if (rows.length * size * (packed ? 32 : 1) > MAX_MASK_BITS) {
    throw invalid(`geometry mask: ${rows.length} rows of ${size} are over the cap of ${MAX_MASK_BITS} bits: split the pass`);
  }
  for (const [k, row] of rows.entries()) {
    if (row.length !== size) {
      throw invalid(`geometry mask[${k}] has ${row.length} entries and mask[0] has ${size}: all rows are equally long`);
    }
    if (!row.every((entry) => (packed ? isWhole(entry, 0, U32_END) : typeof entry === "boolean"))) {
      throw invalid(`geometry mask[${k}] must hold ${packed ? "whole numbers 0 .. 2^32-1" : "bools"}, like mask[0]`);
    }
  }
  if (packed && width !== null && !(isWhole(width, 0, U32_END) && Math.ceil(width / 32) === size)) {
    throw invalid(`geometry width=${repr(width, 40)} does not fit rows of ${size} words: ${32 * size - 31} .. ${32 * size} tokens do`);
  }
  return rows.length;
}

function checkTree(tree: unknown): readonly number[] | null {
  if (tree === null) return null;
  if (!Array.isArray(tree) || tree.length === 0) {
    throw invalid(`geometry tree=${repr(tree, 60)} must list the parent of each new token: an index in the buffer, or -1`);
  }
  for (const [k, parent] of tree.entries()) {
    if (isWhole(parent, -1, 2 ** 31)) continue;
    throw invalid(`geometry tree[${k}] = ${repr(parent, 40)} must be an index in the buffer, or -1 for the end of the frozen prefix`);
  }
  return tree as number[];
}

function isWhole(value: unknown, low: number, end: number): value is number {
  return Number.isInteger(value) && (value as number) >= low && (value as number) < end;
}

function invalid(message: string): Refusal {
  return new Refusal("InvalidPass", message);
}

function unsupported(message: string): Refusal {
  return new Refusal("UnsupportedGeometry", message);
}
