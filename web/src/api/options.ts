// Checks of what callers give to the API: at the call, with a sentence that names the field, its value and what it must be.

import { UsageError } from "../errors.js";

/** Whether a value may be given, and the words for what it must be. */
export interface Rule {
  readonly fits: (value: unknown) => boolean;
  readonly must: string;
}

const SHOWN_CHARS = 60;
const LONE = /\p{Surrogate}/u; // with the flag, only one without its other half

export const TEXT: Rule = { fits: (value) => typeof value === "string" && !LONE.test(value), must: "must be a text of whole characters" };
export const FLAG: Rule = { fits: (value) => typeof value === "boolean", must: "must be true or false" };
export const CALLBACK: Rule = { fits: (value) => typeof value === "function", must: "must be a function" };
export const ADDRESS: Rule = {
  fits: (value) => (typeof value === "string" && value !== "") || value instanceof URL,
  must: "must be a URL, which may be relative to the page",
};
export const SIGNAL: Rule = { fits: isSignal, must: "must be the signal of an AbortController, or another AbortSignal" };
export const ANY: Rule = { fits: () => true, must: "" };

/** One of these words. */
export function oneOf(words: readonly string[]): Rule {
  const quoted = words.map((word) => `"${word}"`);
  return { fits: (value) => words.includes(value as string), must: `must be ${quoted.slice(0, -1).join(", ")} or ${quoted.at(-1)}` };
}

/** A whole number of bytes. */
export function bytesBetween(least: number, most: number): Rule {
  const fits = (value: unknown): boolean => Number.isInteger(value) && (value as number) >= least && (value as number) <= most;
  return { fits, must: `must be a whole number of bytes from ${grouped(least)} to ${grouped(most)}` };
}

/** A number of seconds above 0. */
export function secondsUpTo(most: number): Rule {
  const fits = (value: unknown): boolean => typeof value === "number" && value > 0 && value <= most;
  return { fits, must: `must be a number of seconds above 0 and at most ${grouped(most)}` };
}

/** One argument. Raises UsageError. */
export function checkArgument(call: string, name: string, value: unknown, { fits, must }: Rule): void {
  if (!fits(value)) throw new UsageError(`${call}: ${name} is ${shown(value)}; it ${must}`);
}

/** An object of options, each of which may be left out or undefined. Raises UsageError, also for a name that is not one of `rules`. */
export function checkOptions(call: string, options: unknown, rules: Readonly<Record<string, Rule>>): void {
  const names = Object.keys(rules);
  if (typeof options !== "object" || options === null || Array.isArray(options)) {
    throw new UsageError(`${call}: the options are ${shown(options)}; they must be an object with any of ${names.join(", ")}`);
  }
  for (const name of Object.keys(options)) {
    if (!Object.hasOwn(rules, name)) throw new UsageError(`${call}: there is no option ${shown(name)}; there are ${names.join(", ")}`);
  }
  for (const name of names) {
    const value = (options as Record<string, unknown>)[name];
    if (value !== undefined) checkArgument(call, name, value, rules[name]!);
  }
}

/** A value in an error's words, cut short. */
export function shown(value: unknown): string {
  if (typeof value === "function") return "a function";
  if (typeof value === "bigint") return `${value}n`;
  if (typeof value === "string") return value.length > SHOWN_CHARS ? `${JSON.stringify(value.slice(0, SHOWN_CHARS))}…` : JSON.stringify(value);
  if (typeof value !== "object") return String(value);
  let text: string | undefined;
  try {
    text = JSON.stringify(value);
  } catch {
    text = undefined; // it refers to itself, or refuses
  }
  if (text !== undefined && text.length <= SHOWN_CHARS) return text;
  return Array.isArray(value) ? "an array" : "an object";
}

/** Also one of another frame, whose class is another one. */
function isSignal(value: unknown): boolean {
  const { aborted, addEventListener } = (value ?? {}) as Partial<AbortSignal>;
  return typeof aborted === "boolean" && typeof addEventListener === "function";
}

function grouped(number: number): string {
  return number.toLocaleString("en");
}
