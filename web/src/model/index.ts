// The model cache's face to the engine worker: a manifest's URL in, the verified file's bytes out.

import { Cancelled } from "../errors.js";
import type { Progress } from "../messages.js";
import { fetchModel, openStore } from "./cache.js";
import { fetchManifest, type Manifest } from "./manifest.js";
import type { ByteSource } from "./source.js";

export type { ByteSource } from "./source.js";
export type { Manifest } from "./manifest.js";

export interface OpenOptions {
  /** Called at most ten times a second and at the end of a stage: "waiting" (for another tab), "verify" (what is there), "download". */
  onProgress?: (progress: Progress) => void;
  signal?: AbortSignal;
}

export interface OpenModel {
  source: ByteSource;
  manifest: Manifest;
}

/**
 * The file that the manifest names: from the cache when it is there (then also offline), else downloaded, verified and cached.
 * Raises NetworkError, IntegrityError, StorageError, and Cancelled when `signal` ends it. Call it in a dedicated worker.
 */
export async function openModel(manifestUrl: string, { onProgress, signal }: OpenOptions = {}): Promise<OpenModel> {
  const manifest = await fetchManifest(manifestUrl, signal);
  const source = await fetchModel(await openStore(), manifest, { onProgress: onProgress ?? (() => undefined), signal });
  if (signal?.aborted) {
    source.close();
    throw new Cancelled("the load was cancelled");
  }
  return { source, manifest };
}

/** Remove the cached file, so that the next `openModel` fetches it again: for a file that turns out to be broken. Close its source first. */
export async function evictModel(manifest: Manifest): Promise<void> {
  await (await openStore()).evict(manifest);
}
