// What a working set holds in the engine, as far as the inferlet can know it without asking: edits of a set to which nothing posted is
// still to happen are checked at the call, in the words of pie_core/engine/set_edits.py.

import { Refusal } from "./refusal.js";

/** Something that was posted and is still to happen. `apply` is called once it is known to have happened. */
interface Later {
  readonly futures: readonly number[];
  readonly apply: (value: unknown) => void;
}

const MOST_LATER = 4096;

/**
 * A mirror of one set. Whatever it cannot follow (a failure, a count of the device, a stop) makes it unknown, and then it refuses nothing:
 * the engine tells. What happens to a set happens in the order of the posts, so that whatever is told to have happened says the same of
 * all before it.
 */
export class SetState {
  #known = true;
  #length = 0;
  #frozen: number | null = 0; // null: of a set that was opened, until a folding pass says so
  #parents: number[] = []; // of each buffered token: an index in the buffer, -1 for the end of the prefix
  #points: Set<number> = new Set([0]); // lengths to which its prefix can be cut
  #later: Later[] = [];

  /** The child of a fork. */
  static fork(parent: SetState, buffer: boolean): SetState {
    const child = new SetState();
    const frozen = parent.#frozen;
    if (!parent.#quiet || frozen === null) {
      parent.after([], () => (parent.#frozen === null ? parent.lose() : parent.#fork(buffer)));
      child.lose();
      return child;
    }
    child.#length = parent.#fork(buffer);
    child.#frozen = frozen;
    child.#parents = buffer ? [...parent.#parents] : [];
    child.#points = new Set([frozen, child.#length]);
    return child;
  }

  /** A set that was saved; future `f` brings its length. */
  static open(f: number): SetState {
    const set = new SetState();
    set.after([f], (value) => {
      if (typeof value !== "number") return set.lose();
      set.#length = value;
      set.#frozen = null;
      set.#points = new Set([value]);
    });
    return set;
  }

  get #quiet(): boolean {
    return this.#known && this.#later.length === 0;
  }

  /** Nothing is known any more. */
  lose(): void {
    this.#known = false;
    this.#later = [];
  }

  /** A pass of `count` tokens; `tree`: their parents, where they are given. */
  extend(futures: readonly number[], count: number, mode: "folding" | "buffered", tree: readonly number[] | null): void {
    this.after(futures, () => {
      if (mode === "folding") {
        if (this.#frozen === null) this.#points = new Set([this.#length]); // its buffer was empty: the prefix was all of it
        this.#frozen = this.#length + count;
      } else {
        const buffered = this.#parents.length;
        for (let k = 0; k < count; k++) this.#parents.push(tree?.[k] ?? buffered + k - 1);
      }
      this.#length += count;
    });
  }

  /** The engine was asked for the length. */
  asked(future: number): void {
    this.after([future], (value) => {
      if (value !== this.#length) this.lose(); // what cannot be must not refuse anything
    });
  }

  /** Something happens to the set, or is answered of it, once all before it has happened. One of `futures` settles with it. */
  after(futures: readonly number[], apply: (value: unknown) => void = () => undefined): void {
    if (!this.#known) return;
    this.#later.push({ futures, apply });
    if (this.#later.length > MOST_LATER) this.lose();
  }

  /** A future settled. */
  settled(future: number, ok: boolean, value: unknown): void {
    const at = this.#later.findIndex(({ futures }) => futures.includes(future));
    if (at < 0) return;
    if (!ok) return this.lose();
    for (const [k, { apply }] of this.#later.splice(0, at + 1).entries()) if (this.#known) apply(k === at ? value : undefined);
  }

  /** Throws Refusal (InvalidState). */
  commit(n: number): void {
    this.#edit(() => this.#checkCommit(n), () => {
      this.#parents = this.#parents.slice(n).map((parent) => parent - n);
      this.#frozen = (this.#frozen ?? 0) + n;
    });
  }

  /** Throws Refusal (InvalidState). */
  commitPath(path: readonly number[]): void {
    this.#edit(() => this.#checkPath(path), () => {
      const end = (this.#frozen ?? 0) + path.length;
      this.#restore(end, end);
    });
  }

  /** The last `n` buffered tokens, or all. Throws Refusal (InvalidState). */
  discard(n: number | null): void {
    this.#edit(() => this.#checkBuffer("discard", n ?? 0), () => {
      this.#restore(this.#length - (n ?? this.#parents.length), this.#frozen ?? 0);
    });
  }

  /** Throws Refusal (InvalidState). */
  truncate(n: number): void {
    this.#edit(() => this.#checkTruncate(n), () => {
      this.#restore(n, Math.min(this.#frozen ?? 0, n));
    });
  }

  #edit(check: () => void, apply: () => void): void {
    if (this.#frozen === null && this.#quiet) return this.lose();
    if (this.#quiet) {
      check();
      apply();
    } else this.after([], () => (this.#frozen === null ? this.lose() : apply()));
  }

  #restore(length: number, frozen: number): void {
    [this.#length, this.#frozen] = [length, frozen];
    this.#parents.length = length - frozen;
    for (const point of this.#points) if (point > length) this.#points.delete(point);
  }

  #fork(buffer: boolean): number {
    const frozen = this.#frozen ?? 0;
    const length = buffer ? this.#length : frozen;
    this.#points.add(frozen).add(length);
    return length;
  }

  #checkBuffer(verb: string, n: number): void {
    const buffered = this.#parents.length;
    if (n > buffered) throw state(`${verb}(${n}): the buffer of the working set holds ${buffered} tokens`, { buffered });
  }

  #checkCommit(n: number): void {
    this.#checkBuffer("commit", n);
    if (n === 0) return;
    for (const [k, parent] of this.#parents.entries()) {
      if (k < n ? parent === k - 1 : parent >= n - 1) continue;
      throw state(
        `commit(${n}): the buffer is a tree, and its token ${k} does not continue the ${Math.min(k, n)} before it (its parent is ` +
          `${parent}): commit a path of indices instead, or discard what branches off`,
        { parent },
      );
    }
  }

  #checkPath(path: readonly number[]): void {
    let before = -1;
    for (const [k, at] of path.entries()) {
      const parent = this.#parents[at];
      if (parent === undefined) {
        const buffered = this.#parents.length;
        throw state(`commit: path[${k}] = ${at} is not in the buffer of ${buffered} tokens`, { buffered });
      }
      if (parent !== before) {
        const wanted = before < 0 ? "the frozen prefix" : `token ${before}`;
        throw state(`commit: path[${k}] = ${at} does not follow ${wanted}: its parent is ${parent}`, { parent });
      }
      before = at;
    }
  }

  #checkTruncate(n: number): void {
    const [length, frozen] = [this.#length, this.#frozen ?? 0];
    if (n > length) throw state(`truncate(${n}) is past the end: the working set has ${length} tokens`, { length });
    if (n >= frozen || this.#points.has(n)) return;
    const points = [...this.#points].filter((point) => point < frozen).sort((a, b) => a - b);
    throw state(
      `truncate(${n}) cuts into the frozen prefix of ${frozen} tokens; allowed: ${frozen}${length > frozen ? ` to ${length}` : ""}` +
        (points.length > 0 ? `, or where it was made or forked: ${points.join(", ")}` : ""),
      { frozen },
    );
  }
}

function state(message: string, fields: Readonly<Record<string, number>>): Refusal {
  return new Refusal("InvalidState", message, fields);
}
