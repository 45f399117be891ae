// Model files in memory, for browsers that store nothing: fetched anew by each load.

import { StorageError } from "../errors.js";
import type { Manifest } from "./manifest.js";
import { MemorySource, type ByteSource } from "./source.js";
import type { Store, Writer } from "./store.js";

export class MemoryStore implements Store {
  async open(): Promise<null> {
    return null;
  }

  async write({ size }: Manifest): Promise<Writer> {
    return new MemoryWriter(size);
  }

  async written(): Promise<number> {
    return 0;
  }

  async evict(): Promise<void> {}
}

class MemoryWriter implements Writer {
  readonly offset = 0;
  readonly etag = null;
  readonly #bytes: Uint8Array;
  #at = 0;

  constructor(size: number) {
    try {
      this.#bytes = new Uint8Array(size);
    } catch {
      throw new StorageError(`this browser stores no files here, and ${(size / 1e6).toFixed(0)} MB of memory for the model are not to be had`);
    }
  }

  readBack(): Uint8Array {
    return new Uint8Array(0);
  }

  keepEtag(): void {}

  async write(bytes: Uint8Array): Promise<void> {
    this.#bytes.set(bytes, this.#at);
    this.#at += bytes.length;
  }

  async restart(): Promise<void> {
    this.#at = 0;
  }

  async finish(): Promise<ByteSource> {
    return new MemorySource(this.#bytes);
  }

  async close(): Promise<void> {}
}
