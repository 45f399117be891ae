// ByteSource: a model file that is read synchronously, piece by piece, wherever it is kept.

import { StorageError } from "../errors.js";

/** The bytes of a complete file. Belongs to the worker that opened it. */
export interface ByteSource {
  /** Bytes in the file. */
  readonly size: number;
  /** A fresh copy of `size` bytes from `offset`. Throws RangeError outside the file, StorageError when the bytes cannot be read. */
  read(offset: number, size: number): Uint8Array<ArrayBuffer>;
  /** Give the file back. Twice is harmless; `read` must not be called afterwards. */
  close(): void;
}

/** A file in memory. */
export class MemorySource implements ByteSource {
  readonly size: number;
  #bytes: Uint8Array | null;

  constructor(bytes: Uint8Array) {
    this.#bytes = bytes;
    this.size = bytes.byteLength;
  }

  read(offset: number, size: number): Uint8Array<ArrayBuffer> {
    checkRange(this.size, offset, size);
    return open(this.#bytes).slice(offset, offset + size) as Uint8Array<ArrayBuffer>;
  }

  close(): void {
    this.#bytes = null;
  }
}

/** A file of the origin private file system behind a sync access handle (dedicated workers only). */
export class HandleSource implements ByteSource {
  readonly size: number;
  #handle: FileSystemSyncAccessHandle | null;

  constructor(handle: FileSystemSyncAccessHandle) {
    this.#handle = handle;
    this.size = handle.getSize();
  }

  read(offset: number, size: number): Uint8Array<ArrayBuffer> {
    checkRange(this.size, offset, size);
    const bytes = new Uint8Array(size);
    const handle = open(this.#handle);
    for (let done = 0; done < size; ) {
      const got = handle.read(bytes.subarray(done), { at: offset + done });
      if (got === 0) throw new StorageError(`the cached model ends at byte ${offset + done} of ${this.size}; reload the page to fetch it again`);
      done += got;
    }
    return bytes;
  }

  close(): void {
    this.#handle?.close();
    this.#handle = null;
  }
}

/** A Blob or File, read by FileReaderSync (workers only): for stores without sync access handles, or where another tab holds the handle. */
export class BlobSource implements ByteSource {
  readonly size: number;
  #blob: Blob | null;

  constructor(blob: Blob) {
    this.#blob = blob;
    this.size = blob.size;
  }

  read(offset: number, size: number): Uint8Array<ArrayBuffer> {
    checkRange(this.size, offset, size);
    const part = open(this.#blob).slice(offset, offset + size);
    try {
      return new Uint8Array(new FileReaderSync().readAsArrayBuffer(part));
    } catch (error) {
      throw new StorageError(`the cached model cannot be read any more (${String(error)}); reload the page to fetch it again`);
    }
  }

  close(): void {
    this.#blob = null;
  }
}

function open<T>(value: T | null): T {
  if (value === null) throw new StorageError("the model file was read after it was closed");
  return value;
}

function checkRange(total: number, offset: number, size: number): void {
  const whole = Number.isSafeInteger(offset) && Number.isSafeInteger(size);
  if (!whole || offset < 0 || size < 0 || offset + size > total) {
    throw new RangeError(`bytes ${offset} to ${offset + size} of a file of ${total} bytes`);
  }
}
