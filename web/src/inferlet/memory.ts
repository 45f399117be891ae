// Gives a core WebAssembly module a memory limit: browsers have none of their own, so the maximum in its memory section is rewritten.

const MEMORY_SECTION = 5;
const HEADER = 8; // magic and version
const HAS_MAXIMUM = 1; // the flag of plain 32-bit memories; shared and 64-bit ones have others

export const PAGE_BYTES = 65_536;

/**
 * `module` with the maximum of its own memory set to `bytes` (a smaller maximum is kept); the same array when it defines no memory.
 * Throws RangeError when the module starts with more than that, and for bytes that are no core module.
 */
export function limitMemory(module: Uint8Array, bytes: number): Uint8Array {
  const pages = Math.floor(bytes / PAGE_BYTES);
  let at = HEADER;
  while (at < module.length) {
    const start = at;
    const id = module[at++];
    const size = readLeb(module, at);
    at = size.end + size.value;
    if (id !== MEMORY_SECTION) continue;
    const body = limited(module.subarray(size.end, at), pages);
    const section = [MEMORY_SECTION, ...leb(body.length), ...body];
    const out = new Uint8Array(start + section.length + module.length - at);
    out.set(module.subarray(0, start));
    out.set(section, start);
    out.set(module.subarray(at), start + section.length);
    return out;
  }
  return module;
}

function limited(body: Uint8Array, pages: number): number[] {
  const count = readLeb(body, 0);
  if (count.value !== 1) throw new RangeError(`the module defines ${count.value} memories; 1 is expected`);
  const flags = body[count.end] ?? 0;
  const minimum = readLeb(body, count.end + 1);
  const maximum = flags & HAS_MAXIMUM ? readLeb(body, minimum.end).value : Number.POSITIVE_INFINITY;
  if ((flags & ~HAS_MAXIMUM) !== 0) {
    throw new RangeError(`the module's memory has flags ${flags}; only plain 32-bit memories can be limited`);
  }
  if (minimum.value > pages) throw new RangeError(`the module starts with ${minimum.value} pages of memory; ${pages} are allowed`);
  return [1, HAS_MAXIMUM, ...leb(minimum.value), ...leb(Math.min(maximum, pages))];
}

function readLeb(bytes: Uint8Array, at: number): { value: number; end: number } {
  let value = 0;
  for (let shift = 0; shift < 35; shift += 7) {
    const byte = bytes[at++];
    if (byte === undefined) break;
    value += (byte & 0x7f) * 2 ** shift;
    if (byte < 0x80) return { value, end: at };
  }
  throw new RangeError("this is no WebAssembly module: a number in it does not end");
}

function leb(value: number): number[] {
  const out: number[] = [];
  for (; value > 0x7f; value = Math.floor(value / 128)) out.push((value & 0x7f) | 0x80);
  out.push(value);
  return out;
}
