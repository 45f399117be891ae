// Runtime values of `@huggingface/jinja`, which exports its interpreter but not their classes: made, told apart and printed here.

import { Environment, type Interpreter } from "@huggingface/jinja";

export interface Value {
  readonly type: string;
  readonly value: unknown;
}

export type Node = Parameters<Interpreter["evaluate"]>[0];

const scratch = new Environment();

/** A JavaScript value as the interpreter's. */
export function toValue(value: unknown): Value {
  scratch.variables.clear();
  return scratch.set("value", value);
}

/** A list of values that exist already. */
export function listOf(items: readonly Value[]): Value {
  const made = toValue([]);
  (made.value as Value[]).push(...items);
  return made;
}

/** A float, also where it is whole: the interpreter prints it with ".0" then. */
export function floatValue(value: number): Value {
  const made = toValue(0.5) as { value: unknown } & Value;
  made.value = value;
  return made;
}

export function isText(value: Value): value is Value & { value: string } {
  return value.type === "StringValue";
}

export function isList(value: Value): value is Value & { value: Value[] } {
  return value.type === "ArrayValue" || value.type === "TupleValue";
}

export function isMap(value: Value): value is Value & { value: Map<string, Value> } {
  return value.type === "ObjectValue" || value.type === "NamespaceValue" || value.type === "KeywordArgumentsValue";
}

/** `a == b` of Python. */
export function equal(a: Value, b: Value): boolean {
  if (isText(a) || isText(b)) return isText(a) && isText(b) && a.value === b.value;
  if (isList(a) || isList(b)) {
    return isList(a) && isList(b) && a.value.length === b.value.length && a.value.every((item, at) => equal(item, b.value[at] as Value));
  }
  if (isMap(a) || isMap(b)) {
    if (!isMap(a) || !isMap(b) || a.value.size !== b.value.size) return false;
    return [...a.value].every(([key, item]) => {
      const other = b.value.get(key);
      return other !== undefined && equal(item, other);
    });
  }
  if (isNumber(a) || isNumber(b)) return isNumber(a) && isNumber(b) && Number(a.value) === Number(b.value);
  return a.type === b.type && a.value === b.value;
}

function isNumber(value: Value): boolean {
  return value.type === "IntegerValue" || value.type === "FloatValue" || value.type === "BooleanValue";
}

/** `str(value)` of Python. */
export function printed(value: Value): string {
  return isText(value) ? value.value : value.type === "UndefinedValue" ? "" : repr(value);
}

function repr(value: Value): string {
  if (isText(value)) return reprText(value.value);
  if (isList(value)) return `[${value.value.map(repr).join(", ")}]`;
  if (isMap(value)) return `{${[...value.value].map(([key, item]) => `${reprText(key)}: ${repr(item)}`).join(", ")}}`;
  if (value.type === "BooleanValue") return value.value ? "True" : "False";
  if (value.type === "NullValue") return "None";
  if (value.type === "UndefinedValue") return "Undefined";
  if (value.type === "IntegerValue" || value.type === "FloatValue") return String(value);
  throw new Error(`it prints a value of type ${value.type}`);
}

const ESCAPES: Readonly<Record<string, string>> = { "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t" };

function reprText(text: string): string {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  const body = text.replace(/[\\\n\r\t]/g, (sign) => ESCAPES[sign] ?? sign);
  return quote + (quote === "'" ? body.replaceAll("'", "\\'") : body) + quote;
}
