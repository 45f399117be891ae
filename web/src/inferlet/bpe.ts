// Byte-pair merging over token ids: tables of a few MB and a heap, so that a run of a million characters takes a second, not a minute.

const CACHED_CHARS = 64; // longest word whose ids are remembered
const CACHED_WORDS = 8192;
const POSITIONS = 2 ** 23; // more than the bytes of the longest text

/** What merging needs; plain arrays, so that one worker can make it for all. */
export interface PairTables {
  /** The token of each byte, -1 for none. */
  readonly byteIds: Int32Array;
  // An open-addressing table from (left id, right id) to a rank; a left of -1 is a free slot.
  readonly lefts: Int32Array;
  readonly rights: Int32Array;
  readonly ranks: Int32Array;
  /** rank -> id of both together. */
  readonly merged: Int32Array;
}

/** `merges`: [left id, right id, id of both], the most urgent first. */
export function pairTables(byteIds: Int32Array, merges: readonly (readonly [number, number, number])[]): PairTables {
  const slots = 2 ** Math.ceil(Math.log2(Math.max(2, merges.length) * 2));
  const tables = {
    byteIds,
    lefts: new Int32Array(slots).fill(-1),
    rights: new Int32Array(slots),
    ranks: new Int32Array(slots),
    merged: new Int32Array(merges.length),
  };
  merges.forEach(([left, right, both], rank) => {
    const slot = slotOf(tables, left, right);
    tables.lefts[slot] = left;
    tables.rights[slot] = right;
    tables.ranks[slot] = rank;
    tables.merged[rank] = both;
  });
  return tables;
}

/** Where the pair is, or the free slot where it would be. */
function slotOf({ lefts, rights }: PairTables, left: number, right: number): number {
  const mask = lefts.length - 1;
  let slot = (Math.imul(left, 0x9e3779b1) ^ Math.imul(right, 0x85ebca6b)) >>> 0;
  slot = (slot ^ (slot >>> 15)) & mask;
  while (lefts[slot] !== -1 && (lefts[slot] !== left || rights[slot] !== right)) slot = (slot + 1) & mask;
  return slot;
}

/** A binary heap of numbers, smallest first. */
class Heap {
  readonly #items: number[] = [];

  get size(): number {
    return this.#items.length;
  }

  push(item: number): void {
    const items = this.#items;
    let at = items.length;
    items.push(item);
    while (at > 0) {
      const parent = (at - 1) >> 1;
      const above = items[parent] as number;
      if (above <= item) break;
      items[at] = above;
      at = parent;
    }
    items[at] = item;
  }

  pop(): number {
    const items = this.#items;
    const top = items[0] as number;
    const last = items.pop() as number;
    const count = items.length;
    if (count === 0) return top;
    let at = 0;
    for (;;) {
      let child = 2 * at + 1;
      if (child >= count) break;
      if (child + 1 < count && (items[child + 1] as number) < (items[child] as number)) child++;
      const below = items[child] as number;
      if (below >= last) break;
      items[at] = below;
      at = child;
    }
    items[at] = last;
    return top;
  }
}

export class BytePairs {
  readonly #tables: PairTables;
  readonly #cache = new Map<string, readonly number[]>();
  readonly #encoder = new TextEncoder();

  constructor(tables: PairTables) {
    this.#tables = tables;
  }

  /** Append the ids of one word. Bytes without a token are left out before merging, as the reference implementation does. */
  encode(word: string, out: number[]): void {
    if (word.length > CACHED_CHARS) {
      this.#merge(word, out);
      return;
    }
    let ids = this.#cache.get(word);
    if (ids === undefined) {
      const made: number[] = [];
      this.#merge(word, made);
      if (this.#cache.size >= CACHED_WORDS) this.#cache.clear();
      this.#cache.set(word, made);
      ids = made;
    }
    for (const id of ids) out.push(id);
  }

  #merge(word: string, out: number[]): void {
    const { byteIds, merged } = this.#tables;
    const bytes = this.#encoder.encode(word);
    const ids = new Int32Array(bytes.length);
    let count = 0;
    for (const byte of bytes) {
      const id = byteIds[byte] as number;
      if (id >= 0) ids[count++] = id;
    }
    const next = new Int32Array(count);
    const previous = new Int32Array(count);
    const heap = new Heap();
    for (let at = 0; at < count; at++) {
      next[at] = at + 1 < count ? at + 1 : -1;
      previous[at] = at - 1;
      if (at + 1 < count) this.#offer(heap, at, ids[at] as number, ids[at + 1] as number);
    }
    while (heap.size > 0) {
      const item = heap.pop();
      const at = item % POSITIONS;
      const rank = (item - at) / POSITIONS;
      const id = ids[at] as number;
      const right = next[at] as number;
      if (id < 0 || right < 0) continue; // merged meanwhile
      const now = this.#rank(id, ids[right] as number);
      if (now < 0 || merged[now] !== merged[rank]) continue; // a neighbour changed meanwhile
      const both = merged[rank] as number;
      const after = next[right] as number;
      ids[at] = both;
      ids[right] = -1;
      next[at] = after;
      if (after >= 0) {
        previous[after] = at;
        this.#offer(heap, at, both, ids[after] as number);
      }
      const before = previous[at] as number;
      if (before >= 0) this.#offer(heap, before, ids[before] as number, both);
    }
    for (let at = 0; at >= 0 && at < count; at = next[at] as number) out.push(ids[at] as number);
  }

  /** Equal ranks merge from the left. */
  #offer(heap: Heap, at: number, left: number, right: number): void {
    const rank = this.#rank(left, right);
    if (rank >= 0) heap.push(rank * POSITIONS + at);
  }
  /** -1 when the two do not merge. */
  #rank(left: number, right: number): number {
    const slot = slotOf(this.#tables, left, right);
    return this.#tables.lefts[slot] === -1 ? -1 : (this.#tables.ranks[slot] as number);
  }
}
