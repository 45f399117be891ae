// Byte-pair merging over token ids: tables of a few MB and a heap, so that a run of a million characters takes a second, not a minute.

const CACHED_CHARS = 64; // longest word whose ids are remembered
const CACHED_WORDS = 8192;
const POSITIONS = 2 ** 23; // more than the bytes of the longest text

/** The merge of two neighbours: an open-addressing table from (left id, right id) to a rank. */
class PairTable {
  readonly #lefts: Int32Array;
  readonly #rights: Int32Array;
  readonly #ranks: Int32Array;
  readonly #mask: number;

  constructor(size: number) {
    const slots = 2 ** Math.ceil(Math.log2(Math.max(2, size) * 2));
    this.#lefts = new Int32Array(slots).fill(-1);
    this.#rights = new Int32Array(slots);
    this.#ranks = new Int32Array(slots);
    this.#mask = slots - 1;
  }

  set(left: number, right: number, rank: number): void {
    const slot = this.#slot(left, right);
    this.#lefts[slot] = left;
    this.#rights[slot] = right;
    this.#ranks[slot] = rank;
  }

  /** -1 when the two do not merge. */
  get(left: number, right: number): number {
    const slot = this.#slot(left, right);
    return this.#lefts[slot] === -1 ? -1 : (this.#ranks[slot] as number);
  }

  #slot(left: number, right: number): number {
    let slot = (Math.imul(left, 0x9e3779b1) ^ Math.imul(right, 0x85ebca6b)) >>> 0;
    slot = (slot ^ (slot >>> 15)) & this.#mask;
    while (this.#lefts[slot] !== -1 && (this.#lefts[slot] !== left || this.#rights[slot] !== right)) slot = (slot + 1) & this.#mask;
    return slot;
  }
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
  readonly #byteIds: Int32Array; // -1: a byte without a token
  readonly #pairs: PairTable;
  readonly #merged: Int32Array; // rank -> id
  readonly #cache = new Map<string, readonly number[]>();
  readonly #encoder = new TextEncoder();

  /** `byteIds`: the token of each byte, -1 for none. `merges`: [left id, right id, id of both], the most urgent first. */
  constructor(byteIds: Int32Array, merges: readonly (readonly [number, number, number])[]) {
    this.#byteIds = byteIds;
    this.#pairs = new PairTable(merges.length);
    this.#merged = new Int32Array(merges.length);
    merges.forEach(([left, right, both], rank) => {
      this.#pairs.set(left, right, rank);
      this.#merged[rank] = both;
    });
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
    const bytes = this.#encoder.encode(word);
    const ids = new Int32Array(bytes.length);
    let count = 0;
    for (const byte of bytes) {
      const id = this.#byteIds[byte] as number;
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
      const now = this.#pairs.get(id, ids[right] as number);
      if (now < 0 || this.#merged[now] !== this.#merged[rank]) continue; // a neighbour changed meanwhile
      const both = this.#merged[rank] as number;
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
    const rank = this.#pairs.get(left, right);
    if (rank >= 0) heap.push(rank * POSITIONS + at);
  }
}
