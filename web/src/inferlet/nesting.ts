// How deep JSON may nest: what crosses to the engine is read by a parser that recurses, and a stack that is used up there ends the engine.

export const MAX_NESTING = 200; // as pie_core/eta/json_text.py; values that something carries may have one level less

/** Whether `text`, which must be JSON, nests deeper than `most` levels. */
export function nestsDeeper(text: string, most: number): boolean {
  let depth = 0;
  for (let at = 0; at < text.length; at++) {
    switch (text.charCodeAt(at)) {
      case 0x22: // a string, which has no brackets that count
        at = endOfString(text, at);
        break;
      case 0x5b:
      case 0x7b:
        if (++depth > most) return true;
        break;
      case 0x5d:
      case 0x7d:
        depth--;
        break;
    }
  }
  return false;
}

function endOfString(text: string, start: number): number {
  for (let at = text.indexOf('"', start + 1); at >= 0; at = text.indexOf('"', at + 1)) {
    let slashes = 0;
    while (text.charCodeAt(at - 1 - slashes) === 0x5c) slashes++;
    if (slashes % 2 === 0) return at;
  }
  return text.length;
}
