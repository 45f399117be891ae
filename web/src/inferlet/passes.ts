// Checks of a pass's tokens that need no more than the model's vocabulary, as in pie_core/engine/pass_checks.py: told at the author's line.

import { Refusal } from "./refusal.js";

/** Throws Refusal (InvalidPass). Tokens that a channel feeds are left to the engine. */
export function checkTokens(tokens: unknown, sets: number, vocab: number): void {
  if (!Array.isArray(tokens)) return;
  const lists: unknown[] = Array.isArray(tokens[0]) ? tokens : [tokens];
  if (lists.length !== sets) throw invalid(`tokens: ${lists.length} lists of ids for ${sets} working sets: give one list each`);
  lists.forEach((ids, k) => {
    if (!Array.isArray(ids)) throw invalid(`tokens[${k}]: a list of ids is needed`);
    if (ids.length === 0) throw invalid(`tokens[${k}] is empty: a pass needs at least one token for each working set`);
    checkIds(`tokens[${k}]`, ids, vocab);
  });
}

/** Throws Refusal (InvalidPass) for the first of `ids` that is no token id, as `field[i]`. */
export function checkIds(field: string, ids: readonly unknown[], vocab: number): void {
  const at = ids.findIndex((id) => typeof id !== "number" || !Number.isInteger(id) || id < 0 || id >= vocab);
  if (at >= 0) {
    const value = (JSON.stringify(ids[at]) ?? "").slice(0, 80);
    throw invalid(`${field}[${at}] = ${value} is not a token id: whole numbers 0 .. ${vocab - 1} are`);
  }
}

function invalid(message: string): Refusal {
  return new Refusal("InvalidPass", message);
}
