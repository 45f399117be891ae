// What a place for model files offers. Files are named by their sha256, so a name never means two contents.

import type { Manifest } from "./manifest.js";
import type { ByteSource } from "./source.js";

export interface Store {
  /** The verified file, or null when it is not there. */
  open(manifest: Manifest): Promise<ByteSource | null>;
  /** Begin, or go on with, writing the file. One writer at a time (see lock.ts). Raises StorageError. */
  write(manifest: Manifest): Promise<Writer>;
  /** Bytes of the file that some writer has written so far; 0 when unknown. */
  written(manifest: Manifest): Promise<number>;
  /** Remove the file and what was written of it. */
  evict(manifest: Manifest): Promise<void>;
}

export interface Writer {
  /** Bytes there when the writer was made. */
  readonly offset: number;
  /** The validator these bytes came with. */
  readonly etag: string | null;
  /** `size` of these bytes from `at`, to be verified before more is added. */
  readBack(at: number, size: number): Uint8Array;
  /** Remember the validator of what is written next. */
  keepEtag(etag: string | null): void;
  /** Append. Raises StorageError when there is no room. */
  write(bytes: Uint8Array): Promise<void>;
  /** Forget everything written. */
  restart(): Promise<void>;
  /** The bytes are verified: make them the file. */
  finish(): Promise<ByteSource>;
  /** Stop. What was written stays for a later writer where the store can do that. Harmless after `finish`. */
  close(): Promise<void>;
}
