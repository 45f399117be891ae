// The input of a run, from the text of its field: a JSON object, or why it is none.

export type ParsedInput = { readonly value: Record<string, unknown>; readonly fault: null } | { readonly value: null; readonly fault: string };

const EXAMPLE = '{"prompt": "Hello"}';

/** An empty text is the empty object. `fault` is one sentence for the field. */
export function parseInput(text: string): ParsedInput {
  let value: unknown;
  try {
    value = JSON.parse(text.trim() || "{}");
  } catch (error) {
    return { value: null, fault: `The input is not JSON, such as ${EXAMPLE}: ${(error as Error).message}` };
  }
  const kind = kindOf(value);
  if (kind !== "an object") return { value: null, fault: `The input must be a JSON object, such as ${EXAMPLE}; this is ${kind}.` };
  return { value: value as Record<string, unknown>, fault: null };
}

function kindOf(value: unknown): string {
  if (value === null) return "null";
  if (Array.isArray(value)) return "a list";
  return { object: "an object", string: "a text", number: "a number", boolean: "true or false" }[typeof value as string] ?? typeof value;
}
