// Room in the browser's storage, and words for the lack of it.

import { StorageError } from "../errors.js";

/** Bytes that still fit, or null when the browser does not say. */
export async function room(): Promise<{ free: number; quota: number } | null> {
  const { usage, quota } = (await navigator.storage?.estimate?.()) ?? {};
  return usage === undefined || quota === undefined ? null : { free: Math.max(0, quota - usage), quota };
}

/** The error for `needed` more bytes that do not fit. */
export async function noRoom(needed: number): Promise<StorageError> {
  const now = await room();
  const have = now === null ? "" : `; ${mb(now.free)} of the ${mb(now.quota)} that it grants this site are free`;
  return new StorageError(`the browser has no room for ${mb(needed)} more of the model${have}: free some disk space or clear other sites' data`);
}

export function isQuota(error: unknown): boolean {
  return error instanceof DOMException && error.name === "QuotaExceededError";
}

function mb(bytes: number): string {
  return `${(bytes / 1e6).toFixed(bytes < 1e8 ? 1 : 0)} MB`;
}
