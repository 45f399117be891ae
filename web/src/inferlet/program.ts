// What a submit must know of a program: its channels, parameters, outputs and read-outs. Verified by the tracer, and again in the engine.

import { Refusal } from "./refusal.js";

export interface ChannelUse {
  readonly dtype: string;
  readonly shape: readonly number[];
  /** Cells that a pass consumes, 0 or 1. */
  readonly takes: number;
  readonly puts: boolean;
  /** Whether a pass reads the front cell. */
  readonly usesCell: boolean;
}

export interface ProgramFacts {
  readonly channels: readonly ChannelUse[];
  readonly params: number;
  readonly outs: number;
  /** Read-outs that a pass must have at least; exactly, where it looks at `rows`. */
  readonly reads: number;
  readonly rows: number | null;
}

interface Text {
  chans: { dtype: string; shape: number[] }[];
  ops: [string, number[], { chan?: number; index?: number; name?: string }, string, number[]][];
  outs: number[];
  params: string[];
}

/**
 * The facts of a canonical text; null for one that is none, which the engine refuses in its own words. Throws Refusal (ProgramError) for one
 * that was traced for another model: `widths` are the elements of each read-out of this one.
 */
export function programFacts(text: string, widths: Readonly<Record<string, number>>): ProgramFacts | null {
  let parsed: Text;
  try {
    parsed = JSON.parse(text) as Text;
    const { ops } = parsed;
    for (const [name, width] of Object.entries(widths)) {
      const got = ops.find(([op, , attributes]) => isReadOut(op) && attributes.name === name)?.[4].at(-1);
      if (got !== undefined && got !== width) {
        throw new Refusal("ProgramError", `program: output '${name}' has ${got} elements, this model's has ${width}`);
      }
    }
    const rows = ops.find(([op]) => op === "outputs")?.[4][0] ?? null;
    const single = ops.reduce((most, [op, , { index = 0 }]) => (op === "output" ? Math.max(most, index + 1) : most), 0);
    return {
      channels: parsed.chans.map(({ dtype, shape }, chan) => ({ dtype, shape, ...effect(ops, chan) })),
      params: parsed.params.length,
      outs: parsed.outs.length,
      reads: rows ?? single,
      rows,
    };
  } catch (error) {
    if (error instanceof Refusal) throw error;
    return null;
  }
}

function isReadOut(op: string): boolean {
  return op === "output" || op === "outputs";
}

/** As pie_core/eta/flow.py: a channel is a register inside a pass. */
function effect(ops: Text["ops"], chan: number): { takes: number; puts: boolean; usesCell: boolean } {
  let state: "front" | "value" | "empty" = "front"; // the cell from before the pass, a value put, or nothing
  let [takes, usesCell] = [0, false];
  for (const [op, , attributes] of ops) {
    if (attributes.chan !== chan) continue;
    if (op === "put") {
      state = "value";
      continue;
    }
    if (state === "front") usesCell = true;
    if (op !== "take") continue;
    if (state === "front") takes = 1;
    state = "empty";
  }
  return { takes, puts: state === "value", usesCell };
}
