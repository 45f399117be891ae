// The model cache's face to the engine worker: a manifest's URL in, the verified file's bytes out.

import type { Progress } from "../messages.js";
import type { Manifest } from "./manifest.js";
import type { ByteSource } from "./source.js";

export type { ByteSource } from "./source.js";
export type { Manifest } from "./manifest.js";

export interface OpenOptions {
  /** Called at most ten times a second and once at the end of a stage: stages "waiting" (for another tab), "download" and "verify". */
  onProgress?: (progress: Progress) => void;
  signal?: AbortSignal;
}

export interface OpenModel {
  source: ByteSource;
  manifest: Manifest;
}

/**
 * The file that the manifest names: from the cache when it is there, else downloaded, verified and cached.
 * Raises NetworkError, IntegrityError, StorageError, and Cancelled when `signal` ends it. Call it in a dedicated worker.
 */
export async function openModel(manifestUrl: string, options: OpenOptions = {}): Promise<OpenModel> {
  void options;
  throw new Error(`not written yet: ${manifestUrl}`);
}

/** Remove the cached file, so that the next `openModel` fetches it again: for a file that turns out to be broken. Close its source first. */
export async function evictModel(manifest: Manifest): Promise<void> {
  throw new Error(`not written yet: ${manifest.sha256}`);
}
