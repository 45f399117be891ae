// What the caller gives to a run, as JSON text: within what the engine reads, and nothing changed on the way without a word.

import { shown } from "../api/options.js";
import { UsageError } from "../errors.js";
import { MAX_NESTING, nestsDeeper } from "../inferlet/nesting.js";

/** Levels of a value; what carries it is one more. */
export const MOST_LEVELS = MAX_NESTING - 1;

/**
 * `value` as JSON text. Raises UsageError for what has none, for numbers that JSON.stringify would turn into null, naming the place, and for
 * more than MOST_LEVELS levels.
 */
export function jsonText(call: string, name: string, value: unknown): string {
  let text: string | undefined;
  let why = "";
  try {
    text = JSON.stringify(value) as string | undefined;
  } catch (error) {
    if (error instanceof RangeError) throw tooDeep(call, name); // of the stack
    refuseNumbers(call, name, value, 0);
    why = ` (${error instanceof Error ? error.message.replace(/\n.*/s, "") : String(error)})`;
  }
  if (text === undefined) throw new UsageError(`${call}: ${name} is ${shown(value)}; it must be a JSON value${why}`);
  if (nestsDeeper(text, MOST_LEVELS)) throw tooDeep(call, name);
  if (text.includes("null")) refuseNumbers(call, name, value, 0);
  return text;
}

/** Raises UsageError for the first number in `value` that JSON has no word for. */
function refuseNumbers(call: string, place: string, value: unknown, level: number): void {
  if (typeof value === "bigint" || (typeof value === "number" && !Number.isFinite(value))) {
    throw new UsageError(`${call}: ${place} is ${shown(value)}, which JSON cannot carry; give a finite number, or a text`);
  }
  if (typeof value !== "object" || value === null || level > MOST_LEVELS) return; // deeper only where it refers to itself
  if (typeof (value as { toJSON?: unknown }).toJSON === "function") return;
  if (Array.isArray(value)) value.forEach((item, k) => refuseNumbers(call, `${place}[${k}]`, item, level + 1));
  else for (const [key, item] of Object.entries(value)) refuseNumbers(call, `${place}${member(key)}`, item, level + 1);
}

function member(key: string): string {
  return /^[A-Za-z_$][\w$]{0,60}$/.test(key) ? `.${key}` : `[${JSON.stringify(key.slice(0, 60))}]`;
}

function tooDeep(call: string, name: string): UsageError {
  return new UsageError(`${call}: ${name} is nested deeper than ${MOST_LEVELS} levels; give a flatter one`);
}
