// A verified model file: out of the store when it is there, else downloaded into it, hashed as it streams.

import { Cancelled, IntegrityError } from "../errors.js";
import type { Progress } from "../messages.js";
import { CacheStore } from "./cache_api.js";
import { download, type DownloadOptions, type Retry } from "./download.js";
import { locked } from "./lock.js";
import type { Manifest } from "./manifest.js";
import { MemoryStore } from "./memory.js";
import { OpfsStore } from "./opfs.js";
import { Meter } from "./progress.js";
import { Sha256 } from "./sha256.js";
import type { ByteSource } from "./source.js";
import type { Store, Writer } from "./store.js";

export interface FetchOptions {
  onProgress: (progress: Progress) => void;
  signal: AbortSignal | undefined;
  /** For tests. */
  network?: Pick<DownloadOptions, "delays" | "stallMs">;
}

const VERIFY_PIECE = 4 << 20;
const WAITING_MS = 300;
const LOOK_MS = 1000; // between looks at a download that does not move

/** The best store that this browser lets us have. */
export async function openStore(): Promise<Store> {
  return (await OpfsStore.open()) ?? (await CacheStore.open()) ?? new MemoryStore();
}

/** The file's bytes. The second of two tabs waits for the first, then reads what that one stored. */
export async function fetchModel(store: Store, manifest: Manifest, options: FetchOptions): Promise<ByteSource> {
  const there = await store.open(manifest);
  if (there !== null) return there;
  let waiting: ReturnType<typeof setInterval> | undefined;
  const watch = (): void => {
    const meter = new Meter("waiting", manifest.size, options.onProgress);
    let seen: number | null = null;
    const look = async (): Promise<void> => {
      const written = await store.written(manifest).catch(() => seen ?? 0);
      if (seen === null || written < seen) meter.jump(written);
      else meter.add(written - seen);
      seen = written;
    };
    void look();
    waiting = setInterval(() => void look(), WAITING_MS);
  };
  try {
    return await locked(manifest.sha256, options.signal, watch, async () => {
      clearInterval(waiting);
      const stored = await store.open(manifest);
      if (stored !== null) return stored;
      const resumed = await fill(store, manifest, options);
      // A resumed file that comes out wrong may owe it to the part from before: once more, from nothing.
      return resumed ?? (await fill(store, manifest, options)) ?? mismatch(manifest);
    });
  } finally {
    clearInterval(waiting);
  }
}

/** Download what is missing and verify. Null when a resumed file has the wrong digest; it is removed. Raises IntegrityError for a fresh one. */
async function fill(store: Store, manifest: Manifest, options: FetchOptions): Promise<ByteSource | null> {
  const writer = await store.write(manifest);
  const meter = new Meter("download", manifest.size, options.onProgress);
  let looking: ReturnType<typeof setInterval> | undefined;
  try {
    let hash = await verifyPart(writer, options);
    let at = writer.offset;
    let resumed = at > 0;
    meter.jump(at);
    if (at < manifest.size) {
      looking = setInterval(() => meter.look(), LOOK_MS);
      const { onProgress: _, network, signal } = options;
      const told = { onEtag: (etag: string | null) => writer.keepEtag(etag), onRetry: (next: Retry) => meter.retry(next) };
      for await (const piece of download(manifest.url, { ...network, ...told, size: manifest.size, offset: at, etag: writer.etag, signal })) {
        if (piece.at !== at) {
          await writer.restart();
          hash = new Sha256();
          resumed = false;
          meter.jump(0);
        }
        hash.update(piece.bytes);
        await writer.write(piece.bytes);
        at = piece.at + piece.bytes.length;
        meter.add(piece.bytes.length);
      }
    }
    meter.finish();
    const digest = hash.hex();
    if (digest === manifest.sha256) return await writer.finish();
    await writer.close();
    await store.evict(manifest);
    return resumed ? null : mismatch(manifest, digest);
  } finally {
    clearInterval(looking);
    await writer.close();
  }
}

/** The hash of the bytes that are there from before. */
async function verifyPart(writer: Writer, { signal, onProgress }: FetchOptions): Promise<Sha256> {
  const hash = new Sha256();
  if (writer.offset === 0) return hash;
  const meter = new Meter("verify", writer.offset, onProgress);
  for (let at = 0; at < writer.offset; at += VERIFY_PIECE) {
    if (signal?.aborted) throw new Cancelled("the load was cancelled");
    const piece = writer.readBack(at, Math.min(VERIFY_PIECE, writer.offset - at));
    hash.update(piece);
    meter.add(piece.length);
    await new Promise((resolve) => setTimeout(resolve, 0)); // lets a cancel in
  }
  meter.finish();
  return hash;
}

function mismatch(manifest: Manifest, digest = "another one"): never {
  throw new IntegrityError(`${manifest.url} is not the file of its manifest: its sha256 is ${digest}, not ${manifest.sha256}`);
}
