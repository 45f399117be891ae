// Model files in the origin private file system: <sha256> when finished, else <sha256>.part with its validator in <sha256>.json.

import { StorageError } from "../errors.js";
import { ifUnlocked } from "./lock.js";
import type { Manifest } from "./manifest.js";
import { isQuota, noRoom } from "./quota.js";
import { BlobSource, HandleSource, type ByteSource } from "./source.js";
import type { Store, Writer } from "./store.js";

// Newer than the library files of TypeScript.
declare global {
  interface FileSystemFileHandle {
    move?(name: string): Promise<void>;
    createSyncAccessHandle(options?: { mode: "read-only" | "readwrite" | "readwrite-unsafe" }): Promise<FileSystemSyncAccessHandle>;
  }
}

const FOLDER = "pie-models";
const BUSY_TRIES = 20;
const BUSY_MS = 100;

export class OpfsStore implements Store {
  readonly #folder: FileSystemDirectoryHandle;

  private constructor(folder: FileSystemDirectoryHandle) {
    this.#folder = folder;
  }

  /** The store, or null where the browser lacks a part of it or refuses (private windows). */
  static async open(): Promise<OpfsStore | null> {
    const prototype = globalThis.FileSystemFileHandle?.prototype as Partial<FileSystemFileHandle> | undefined;
    if (!prototype?.move || !prototype.createSyncAccessHandle) return null;
    try {
      const root = await navigator.storage.getDirectory();
      return new OpfsStore(await root.getDirectoryHandle(FOLDER, { create: true }));
    } catch {
      return null;
    }
  }

  async open({ sha256, size }: Manifest): Promise<ByteSource | null> {
    const entry = await this.#entry(sha256);
    const file = await entry?.getFile();
    if (entry === null || file === undefined) return null;
    if (file.size !== size) {
      await this.#remove(sha256);
      return null;
    }
    try {
      return new HandleSource(await entry.createSyncAccessHandle({ mode: "read-only" }));
    } catch {
      return new BlobSource(file); // another tab holds it, in a browser whose handles are always exclusive
    }
  }

  async write(manifest: Manifest): Promise<Writer> {
    for (;;) {
      try {
        return await this.#begin(manifest);
      } catch (error) {
        if (!isQuota(error)) throw await refusal(error, manifest.size);
        if (!(await this.freeOther(manifest))) throw await noRoom(manifest.size);
      }
    }
  }

  async #begin(manifest: Manifest): Promise<Writer> {
    const state = await this.#readState(manifest);
    const entry = await this.#folder.getFileHandle(`${manifest.sha256}.part`, { create: true });
    const handle = await patiently(entry);
    if (state === null || handle.getSize() > manifest.size) handle.truncate(0);
    return new OpfsWriter(this, manifest, entry, handle, state);
  }

  async written({ sha256 }: Manifest): Promise<number> {
    return (await (await this.#entry(`${sha256}.part`))?.getFile())?.size ?? 0;
  }

  async evict({ sha256 }: Manifest): Promise<void> {
    await this.#removeAll(sha256);
  }

  /** Remember, or with null forget, what the partial file is. */
  async keepState({ sha256, size }: Manifest, etag: string | null | undefined): Promise<void> {
    if (etag === undefined) return void (await this.#remove(`${sha256}.json`));
    const entry = await this.#folder.getFileHandle(`${sha256}.json`, { create: true });
    const handle = await patiently(entry);
    try {
      handle.truncate(0);
      handle.write(new TextEncoder().encode(JSON.stringify({ etag, size })), { at: 0 });
      handle.flush();
    } finally {
      handle.close();
    }
  }

  /** The state of the partial file: null when there is none, or none that can be trusted. */
  async #readState({ sha256, size }: Manifest): Promise<{ etag: string | null } | null> {
    const file = await (await this.#entry(`${sha256}.json`))?.getFile();
    try {
      const state = JSON.parse((await file?.text()) ?? "null") as { etag?: unknown; size?: unknown } | null;
      if (state === null || state.size !== size) return null;
      return { etag: typeof state.etag === "string" ? state.etag : null };
    } catch {
      return null;
    }
  }

  /** Remove another model, but none that a tab writes or reads. False when there is none. */
  async freeOther({ sha256 }: Manifest): Promise<boolean> {
    const others = new Set<string>();
    for await (const name of this.#folder.keys()) others.add(name.replace(/\..*$/, ""));
    others.delete(sha256);
    for (const other of others) {
      let freed = false;
      await ifUnlocked(other, async () => {
        freed = await this.#removeAll(other);
      });
      if (freed) return true;
    }
    return false;
  }

  /** False when nothing was there that could be removed. */
  async #removeAll(sha256: string): Promise<boolean> {
    const names = [sha256, `${sha256}.part`, `${sha256}.json`];
    return (await Promise.all(names.map((name) => this.#remove(name)))).includes(true);
  }

  async #entry(name: string): Promise<FileSystemFileHandle | null> {
    try {
      return await this.#folder.getFileHandle(name);
    } catch (error) {
      if (error instanceof DOMException && error.name === "NotFoundError") return null;
      throw await refusal(error, 0);
    }
  }

  /** False when it is not there, or in use by another tab, which keeps it. */
  async #remove(name: string): Promise<boolean> {
    try {
      await this.#folder.removeEntry(name);
      return true;
    } catch {
      return false;
    }
  }
}

class OpfsWriter implements Writer {
  readonly offset: number;
  readonly etag: string | null;
  readonly #store: OpfsStore;
  readonly #manifest: Manifest;
  readonly #entry: FileSystemFileHandle;
  #handle: FileSystemSyncAccessHandle | null;
  #at: number;
  #state: Promise<void> = Promise.resolve();

  constructor(store: OpfsStore, manifest: Manifest, entry: FileSystemFileHandle, handle: FileSystemSyncAccessHandle, state: { etag: string | null } | null) {
    this.#store = store;
    this.#manifest = manifest;
    this.#entry = entry;
    this.#handle = handle;
    this.offset = this.#at = handle.getSize();
    this.etag = state?.etag ?? null;
  }

  readBack(at: number, size: number): Uint8Array {
    const bytes = new Uint8Array(size);
    return bytes.subarray(0, this.#handle?.read(bytes, { at }) ?? 0);
  }

  keepEtag(etag: string | null): void {
    this.#state = this.#state.then(() => this.#store.keepState(this.#manifest, etag));
    this.#state.catch(() => undefined); // raised by `write`
  }

  async write(bytes: Uint8Array): Promise<void> {
    await this.#state;
    for (let done = 0; done < bytes.length; ) {
      const got = this.#put(bytes.subarray(done));
      done += got;
      this.#at += got;
      if (got === 0 && !(await this.#store.freeOther(this.#manifest))) throw await noRoom(this.#manifest.size - this.#at);
    }
  }

  /** Bytes written; 0 when there is no room. */
  #put(bytes: Uint8Array): number {
    if (this.#handle === null) throw new StorageError("the model's file was written after it was closed");
    try {
      const got = this.#handle.write(bytes, { at: this.#at });
      return got <= bytes.length ? got : 0; // Chromium answers 2^32 - 8 where the quota ends
    } catch (error) {
      if (isQuota(error)) return 0;
      throw new StorageError(`the browser's storage refused: ${String(error)}`, { cause: error });
    }
  }

  async restart(): Promise<void> {
    this.#handle?.truncate(0);
    this.#at = 0;
  }

  async finish(): Promise<ByteSource> {
    await this.#state;
    await this.close();
    try {
      await this.#entry.move?.(this.#manifest.sha256); // the one step that makes it a model
    } catch (error) {
      throw await refusal(error, 0);
    }
    await this.#store.keepState(this.#manifest, undefined);
    const source = await this.#store.open(this.#manifest);
    if (source === null) throw new StorageError("the browser lost the model's file right after it was written");
    return source;
  }

  async close(): Promise<void> {
    const handle = this.#handle;
    this.#handle = null;
    if (handle === null) return;
    try {
      handle.flush();
    } finally {
      handle.close();
    }
  }
}

/** An exclusive handle. A worker that was just terminated may hold its own for a moment longer. */
async function patiently(entry: FileSystemFileHandle): Promise<FileSystemSyncAccessHandle> {
  for (let tries = 0; ; tries++) {
    try {
      return await entry.createSyncAccessHandle();
    } catch (error) {
      const busy = error instanceof DOMException && error.name === "NoModificationAllowedError";
      if (!busy || tries === BUSY_TRIES) throw error;
      await new Promise((resolve) => setTimeout(resolve, BUSY_MS));
    }
  }
}

/** A storage's refusal in words; `needed`: the bytes that were to be added. */
async function refusal(error: unknown, needed: number): Promise<StorageError> {
  if (error instanceof StorageError) return error;
  if (isQuota(error)) return noRoom(needed);
  return new StorageError(`the browser's storage refused: ${error instanceof Error ? error.message : String(error)}`, { cause: error });
}
