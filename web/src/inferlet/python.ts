// Values in messages as Python writes them, so that the page's host says what the server's says.

/** `repr` of a JSON value, of which `most` characters are shown. */
export function repr(value: unknown, most: number): string {
  return written(value, most).slice(0, most);
}

function written(value: unknown, most: number): string {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return quoted(value.slice(0, most));
  if (Array.isArray(value)) {
    let text = "[";
    for (const [k, item] of value.entries()) {
      if (text.length > most) break;
      text += (k > 0 ? ", " : "") + written(item, most);
    }
    return `${text}]`;
  }
  if (typeof value !== "object") return String(value);
  let text = "{";
  for (const [key, item] of Object.entries(value)) {
    if (text.length > most) break;
    text += `${text === "{" ? "" : ", "}${quoted(key.slice(0, most))}: ${written(item, most)}`;
  }
  return `${text}}`;
}

function quoted(text: string): string {
  const mark = text.includes("'") && !text.includes('"') ? '"' : "'";
  const escaped = text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll("\r", "\\r").replaceAll("\t", "\\t");
  return mark + (mark === "'" ? escaped.replaceAll("'", "\\'") : escaped) + mark;
}
