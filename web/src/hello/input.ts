// The input of a run, from the text of its field: a JSON object, or why it is none.

export type ParsedInput = { readonly value: Record<string, unknown>; readonly fault: null } | { readonly value: null; readonly fault: string };

const EXAMPLE = '{"prompt": "Hello"}';
const SHOWN = 40; // characters of a number in a message

/** An empty text is the empty object. `fault` is for the field: what is wrong, and what helps. */
export function parseInput(text: string): ParsedInput {
  let value: unknown;
  try {
    value = JSON.parse(text.trim() || "{}");
  } catch (error) {
    const reason = (error as Error).message.replace(/\.$/, "");
    return refused(`The input is not JSON: ${reason}. It must be a JSON object, such as ${EXAMPLE}.`);
  }
  const kind = kindOf(value);
  if (kind !== "an object") return refused(`The input must be a JSON object, such as ${EXAMPLE}; this is ${kind}.`);
  const fault = numberFault(text);
  return fault === null ? { value: value as Record<string, unknown>, fault } : refused(fault);
}

/** What a number of this JSON text would lose on its way, in one sentence. Numbers travel as doubles; a program's own have no bounds. */
function numberFault(text: string): string | null {
  for (const [token] of text.matchAll(/"[^"\\]*(?:\\.[^"\\]*)*"|-?\d[\d.eE+-]*/g)) {
    if (token.startsWith('"')) continue;
    const number = Number(token);
    const shown = token.length > SHOWN ? `${token.slice(0, SHOWN)}…` : token;
    if (!/[.eE]/.test(token)) {
      if (Number.isSafeInteger(number)) continue;
      return `The input holds ${shown}, which this page cannot hand on digit by digit: whole numbers go up to ${Number.MAX_SAFE_INTEGER} here; write it as a text, in quotes.`;
    }
    if (!Number.isFinite(number)) return `The input holds ${shown}, which is beyond the largest number, about 1.8e308.`;
  }
  return null;
}

function refused(fault: string): ParsedInput {
  return { value: null, fault };
}

function kindOf(value: unknown): string {
  if (value === null) return "null";
  if (Array.isArray(value)) return "a list";
  return { object: "an object", string: "a text", number: "a number", boolean: "true or false" }[typeof value as string] ?? typeof value;
}
