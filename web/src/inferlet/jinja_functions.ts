// String methods and filters of chat templates that `@huggingface/jinja` lacks or does not bound, with Python's results.

import { MAX_FIELD, type RenderBudget } from "./jinja_guard.js";
import { floatValue, isList, isText, printed, toValue, type Value } from "./jinja_values.js";
import { TemplateError } from "./text_errors.js";

type Method = (text: string, args: readonly Value[], budget: RenderBudget) => unknown;
/** null: leave this operand to the library. */
type Filter = (operand: Value, args: readonly Value[], named: ReadonlyMap<string, Value>, budget: RenderBudget) => Value | null;

function textArg(args: readonly Value[], at: number, method: string): string {
  const arg = args[at];
  if (arg === undefined || !isText(arg)) throw new TemplateError(`the chat template calls ${method} without a text as argument ${at + 1}`);
  return arg.value;
}

function wholeArg(value: Value | undefined): number | null {
  return value?.type === "IntegerValue" ? (value.value as number) : null;
}

function replaced(text: string, from: string, to: string, count: number | null, budget: RenderBudget): string {
  const pieces = from === "" ? ["", ...text, ""] : text.split(from);
  const most = count === null || count < 0 ? pieces.length - 1 : Math.min(count, pieces.length - 1);
  budget.charge(text.length + most * Math.max(0, to.length - from.length));
  if (most === pieces.length - 1) return pieces.join(to);
  return [...pieces.slice(0, most), pieces.slice(most).join(from)].join(to);
}

function joined(items: readonly Value[], separator: string, budget: RenderBudget): string {
  const parts = items.map((item) => {
    if (!isText(item)) budget.measure(item);
    return printed(item);
  });
  budget.charge(parts.reduce((size, part) => size + part.length + separator.length, 0));
  return parts.join(separator);
}

const charset = (chars: string, end: "start" | "end", text: string): string => {
  const set = new Set(chars);
  const letters = [...text];
  let at = end === "start" ? 0 : letters.length;
  if (end === "start") while (at < letters.length && set.has(letters[at] ?? "")) at++;
  else while (at > 0 && set.has(letters[at - 1] ?? "")) at--;
  return end === "start" ? letters.slice(at).join("") : letters.slice(0, at).join("");
};

function stripped(text: string, args: readonly Value[], ends: readonly ("start" | "end")[]): string {
  const chars = args.length > 0 && args[0] !== undefined && isText(args[0]) ? args[0].value : " \t\n\r\v\f\u0085\u00a0\u1680\u2028\u2029\u202f\u205f\u3000\x1c\x1d\x1e\x1f\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a";
  return ends.reduce((rest, end) => charset(chars, end, rest), text);
}

function partitioned(text: string, separator: string, at: number, missing: readonly string[]): readonly string[] {
  return at < 0 ? missing : [text.slice(0, at), separator, text.slice(at + separator.length)];
}

export const METHODS: Readonly<Record<string, Method>> = {
  replace: (text, args, budget) => replaced(text, textArg(args, 0, "replace"), textArg(args, 1, "replace"), wholeArg(args[2]), budget),
  join: (text, args, budget) => {
    const [items] = args;
    if (items === undefined || !isList(items)) throw new TemplateError("the chat template calls join without a list");
    return joined(items.value, text, budget);
  },
  strip: (text, args) => stripped(text, args, ["start", "end"]),
  lstrip: (text, args) => stripped(text, args, ["start"]),
  rstrip: (text, args) => stripped(text, args, ["end"]),
  find: (text, args) => text.indexOf(textArg(args, 0, "find")),
  rfind: (text, args) => text.lastIndexOf(textArg(args, 0, "rfind")),
  count: (text, args) => text.split(textArg(args, 0, "count")).length - 1,
  removeprefix: (text, args) => {
    const prefix = textArg(args, 0, "removeprefix");
    return text.startsWith(prefix) ? text.slice(prefix.length) : text;
  },
  removesuffix: (text, args) => {
    const suffix = textArg(args, 0, "removesuffix");
    return suffix !== "" && text.endsWith(suffix) ? text.slice(0, -suffix.length) : text;
  },
  partition: (text, args) => {
    const separator = textArg(args, 0, "partition");
    return partitioned(text, separator, text.indexOf(separator), [text, "", ""]);
  },
  rpartition: (text, args) => {
    const separator = textArg(args, 0, "rpartition");
    return partitioned(text, separator, text.lastIndexOf(separator), ["", "", text]);
  },
  splitlines: (text) => text.replace(/(?:\r\n|\r|\n)$/, "").split(/\r\n|\r|\n/),
  isdigit: (text) => /^\p{Nd}+$/u.test(text),
  isalpha: (text) => /^\p{L}+$/u.test(text),
  isalnum: (text) => /^[\p{L}\p{N}]+$/u.test(text),
  isspace: (text) => /^\p{White_Space}+$/u.test(text),
};

export const FILTERS: Readonly<Record<string, Filter>> = {
  join: (operand, args, named, budget) => {
    if (!isList(operand)) return null;
    const attribute = args[1] ?? named.get("attribute");
    const items = attribute === undefined || !isText(attribute) ? operand.value : operand.value.map((item) => attributeOf(item, attribute.value));
    const separator = args[0] ?? named.get("d");
    return toValue(joined(items, separator === undefined ? "" : printed(separator), budget));
  },
  replace: (operand, args, named, budget) =>
    toValue(replaced(printed(operand), textArg(args, 0, "replace"), textArg(args, 1, "replace"), wholeArg(args[2] ?? named.get("count")), budget)),
  indent: (operand, args, named, budget) => {
    const width = args[0] ?? named.get("width") ?? toValue(4);
    const lead = isText(width) ? width.value : " ".repeat(Math.min(Math.max(wholeArg(width) ?? 4, 0), MAX_FIELD + 1));
    if (lead.length > MAX_FIELD) {
      throw new TemplateError(`the chat template indents by ${lead.length} characters or more; ${MAX_FIELD} are allowed`);
    }
    const [first, blank] = [args[1] ?? named.get("first"), args[2] ?? named.get("blank")].map((value) => Boolean(value?.value));
    const lines = printed(operand).split("\n");
    budget.charge(lines.length * lead.length);
    return toValue(lines.map((line, at) => ((line !== "" || blank) && (first || at > 0) ? lead + line : line)).join("\n"));
  },
  tojson: (operand, args, named, budget) => {
    const indent = wholeArg(named.get("indent") ?? args[0]) ?? 0;
    if (indent < 0 || indent > 16) throw new TemplateError(`the chat template asks for an indent of ${indent}; 0 to 16 are allowed`);
    if (operand.type === "UndefinedValue") throw new TemplateError("the chat template uses tojson on an undefined value");
    budget.charge(budget.measure(operand));
    return null;
  },
  string: (operand, _args, _named, budget) => {
    budget.measure(operand);
    return toValue(printed(operand));
  },
  trim: (operand) => toValue(stripped(printed(operand), [], ["start", "end"])),
  sum: (operand) => (isList(operand) ? toValue(operand.value.reduce((total, item) => total + Number(item.value), 0)) : null),
  round: (operand, args, named) => {
    const places = wholeArg(args[0] ?? named.get("precision")) ?? 0;
    if (places < -20 || places > 20) throw new TemplateError(`the chat template rounds to ${places} places; -20 to 20 are allowed`);
    if (typeof operand.value !== "number") return null;
    return floatValue(Number(operand.value.toFixed(Math.max(0, places))));
  },
};

function attributeOf(item: Value, name: string): Value {
  return (item.value instanceof Map ? (item.value.get(name) as Value | undefined) : undefined) ?? toValue("");
}
