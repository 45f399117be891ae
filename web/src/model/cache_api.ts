// Model files in the Cache API, for browsers without a usable origin private file system. A broken download starts over.

import { StorageError } from "../errors.js";
import type { Manifest } from "./manifest.js";
import { isQuota, noRoom } from "./quota.js";
import { BlobSource, type ByteSource } from "./source.js";
import type { Store, Writer } from "./store.js";

const NAME = "pie-models";

export class CacheStore implements Store {
  readonly #cache: Cache;

  private constructor(cache: Cache) {
    this.#cache = cache;
  }

  /** The store, or null where the browser lacks it or refuses. */
  static async open(): Promise<CacheStore | null> {
    try {
      return new CacheStore(await caches.open(NAME));
    } catch {
      return null;
    }
  }

  async open(manifest: Manifest): Promise<ByteSource | null> {
    const response = await this.#cache.match(key(manifest));
    if (response === undefined) return null;
    const source = new BlobSource(await response.blob());
    if (source.size === manifest.size) return source;
    await this.evict(manifest);
    return null;
  }

  async write(manifest: Manifest): Promise<Writer> {
    return new CacheWriter(this, this.#cache, manifest);
  }

  async written(): Promise<number> {
    return 0;
  }

  async evict(manifest: Manifest): Promise<void> {
    await this.#cache.delete(key(manifest));
  }
}

/** Feeds a response that the cache stores while it is written; only a stream that ends well becomes an entry. */
class CacheWriter implements Writer {
  readonly offset = 0;
  readonly etag = null;
  readonly #store: CacheStore;
  readonly #cache: Cache;
  readonly #manifest: Manifest;
  #stream: WritableStreamDefaultWriter<Uint8Array> | null = null;
  #stored: Promise<void> = Promise.resolve();

  constructor(store: CacheStore, cache: Cache, manifest: Manifest) {
    this.#store = store;
    this.#cache = cache;
    this.#manifest = manifest;
  }

  readBack(): Uint8Array {
    return new Uint8Array(0);
  }

  keepEtag(): void {}

  async write(bytes: Uint8Array): Promise<void> {
    const stream = (this.#stream ??= this.#begin());
    try {
      await Promise.race([stream.write(bytes), this.#stored.then(() => Promise.reject(new StorageError("the browser stopped storing the model")))]);
    } catch (error) {
      throw await this.#refusal(error);
    }
  }

  async restart(): Promise<void> {
    await this.close();
  }

  async finish(): Promise<ByteSource> {
    const stream = this.#stream;
    this.#stream = null;
    try {
      await stream?.close();
      await this.#stored;
    } catch (error) {
      throw await this.#refusal(error);
    }
    const source = await this.#store.open(this.#manifest);
    if (source === null) throw new StorageError("the browser lost the model's file right after it was written");
    return source;
  }

  async close(): Promise<void> {
    const stream = this.#stream;
    this.#stream = null;
    await stream?.abort().catch(() => undefined);
    await this.#stored.catch(() => undefined);
  }

  #begin(): WritableStreamDefaultWriter<Uint8Array> {
    const { readable, writable } = new TransformStream<Uint8Array, Uint8Array>();
    this.#stored = this.#cache.put(key(this.#manifest), new Response(readable, { headers: { "content-type": "application/octet-stream" } }));
    this.#stored.catch(() => undefined); // raised by `write` and `finish`
    return writable.getWriter();
  }

  async #refusal(error: unknown): Promise<StorageError> {
    if (isQuota(error)) return noRoom(this.#manifest.size);
    return error instanceof StorageError ? error : new StorageError(`the browser's storage refused: ${String(error)}`, { cause: error });
  }
}

function key({ sha256 }: Manifest): string {
  return `/pie-models/${sha256}`; // never fetched: a name
}
