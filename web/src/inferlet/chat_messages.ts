// Checks chat messages as pie_core.text.stream does: roles, contents and nesting, with the index and field of what is wrong.

import { MessageError } from "./text_errors.js";

export const ROLES = ["system", "developer", "user", "assistant", "tool"];
export const MAX_DEPTH = 32; // nesting of lists and objects in a message

export interface CheckedMessage {
  readonly role: string;
  readonly content: string;
  readonly [field: string]: unknown;
}

type Fields = Readonly<Record<string, unknown>>;

function isObject(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * Checked copies: role known ("developer" becomes "system"), content a string (parts are joined). An assistant message with
 * `tool_calls` may have null content, which becomes "". Other fields are kept, null ones left out. Throws MessageError.
 */
export function checkMessages(messages: unknown): CheckedMessage[] {
  if (!Array.isArray(messages)) throw new MessageError(`messages must be a list, got ${nameOf(messages)}`);
  if (messages.length === 0) throw new MessageError("messages is empty; give at least one message");
  return messages.map(checkMessage);
}

function checkMessage(message: unknown, index: number): CheckedMessage {
  if (!isObject(message)) throw new MessageError(`messages[${index}] must be an object, got ${nameOf(message)}`);
  if (!Object.hasOwn(message, "role")) throw new MessageError(`messages[${index}].role is missing`);
  const role = message["role"];
  if (typeof role !== "string" || !ROLES.includes(role)) {
    throw new MessageError(`messages[${index}].role is ${short(role)}, it must be one of ${ROLES.join(", ")}`);
  }
  const checked: Record<string, unknown> = {};
  for (const [key, value] of Object.entries(message)) {
    if (key !== "content" && value !== null) checked[key] = checkValue(value, index, key, 0);
  }
  return { ...checked, role: role === "developer" ? "system" : role, content: contentOf(message, index) };
}

function contentOf(message: Fields, index: number): string {
  const content = message["content"];
  if (content === null || content === undefined) {
    const calls = message["tool_calls"];
    if (message["role"] === "assistant" && (Array.isArray(calls) ? calls.length > 0 : Boolean(calls))) return "";
    const missing = Object.hasOwn(message, "content") ? "is null" : "is missing";
    throw new MessageError(`messages[${index}].content ${missing}; give a string`);
  }
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part, number) => partOf(part, index, number)).join("");
  throw new MessageError(`messages[${index}].content must be a string or a list of parts, got ${nameOf(content)}`);
}

function partOf(part: unknown, index: number, number: number): string {
  const where = `messages[${index}].content[${number}]`;
  if (typeof part === "string") return part;
  if (!isObject(part)) throw new MessageError(`${where} must be an object, got ${nameOf(part)}`);
  if (part["type"] !== "text") throw new MessageError(`${where}.type is ${short(part["type"])}, only 'text' parts are supported`);
  if (typeof part["text"] !== "string") throw new MessageError(`${where}.text must be a string, got ${nameOf(part["text"])}`);
  return part["text"];
}

/** JSON, and not too deep: templates walk these values. */
function checkValue(value: unknown, index: number, field: string, depth: number): unknown {
  if (depth > MAX_DEPTH) throw new MessageError(`messages[${index}].${field} is nested deeper than ${MAX_DEPTH}`);
  if (Array.isArray(value)) return value.map((item) => checkValue(item, index, field, depth + 1));
  if (isObject(value)) {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, checkValue(item, index, field, depth + 1)]));
  }
  return value;
}

/** A JSON value's type by Python's name, as the author of an inferlet knows it. */
function nameOf(value: unknown): string {
  if (value === null || value === undefined) return "null";
  if (Array.isArray(value)) return "list";
  if (typeof value === "number") return Number.isInteger(value) ? "int" : "float";
  return { string: "str", boolean: "bool", object: "dict" }[typeof value as string] ?? typeof value;
}

function short(value: unknown): string {
  const text = value === null || value === undefined ? "None" : typeof value === "string" ? `'${value}'` : JSON.stringify(value);
  return text.length <= 60 ? text : `${text.slice(0, 57)}...`;
}
