// What the visitor typed, kept in this browser from visit to visit. A store that is blocked, full or damaged only costs the next visit its draft.

export interface Draft {
  readonly source: string;
  readonly input: string;
}

/** The part of a Storage that drafts use. */
export type Store = Pick<Storage, "getItem" | "setItem" | "removeItem">;

const KEY = "pie-hello-draft";

/** `open` gives the store and may throw: browsers refuse it in some windows. Nothing here throws. */
export class Drafts {
  readonly #open: () => Store;

  constructor(open: () => Store = () => localStorage) {
    this.#open = open;
  }

  /** The draft of the last visit; null where there is none that can be used. */
  load(): Draft | null {
    const text = this.#with((store) => store.getItem(KEY));
    if (text === null) return null;
    try {
      return draftOf(JSON.parse(text));
    } catch {
      return null; // not JSON: somebody else wrote it
    }
  }

  save({ source, input }: Draft): void {
    this.#with((store) => store.setItem(KEY, JSON.stringify({ source, input })));
  }

  /** The next visit starts with the example. */
  forget(): void {
    this.#with((store) => store.removeItem(KEY));
  }

  #with<T>(use: (store: Store) => T): T | null {
    try {
      return use(this.#open());
    } catch {
      return null; // blocked or full: the text box still holds what was typed
    }
  }
}

function draftOf(data: unknown): Draft | null {
  if (typeof data !== "object" || data === null) return null;
  const { source, input } = data as Record<string, unknown>;
  return typeof source === "string" && typeof input === "string" ? { source, input } : null;
}

export function sameDraft(a: Draft, b: Draft): boolean {
  return a.source === b.source && a.input === b.input;
}
