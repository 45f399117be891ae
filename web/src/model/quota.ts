// Words, with numbers, for a storage that is full. (The browser's own estimate may flatter, so it forbids nothing.)

import { StorageError } from "../errors.js";

/** The error for `needed` more bytes that do not fit. */
export async function noRoom(needed: number): Promise<StorageError> {
  const { usage, quota } = (await navigator.storage?.estimate?.().catch(() => undefined)) ?? {};
  const parts = [`the browser has no room for ${mb(needed)} more of the model`];
  if (usage !== undefined) parts.push(`this site keeps ${mb(usage)} already`);
  if (usage !== undefined && quota !== undefined && quota - usage < needed) parts.push(`it may keep ${mb(quota)}`);
  return new StorageError(`${parts.join("; ")}: free some disk space, or clear what sites have stored`);
}

export function isQuota(error: unknown): boolean {
  return error instanceof DOMException && error.name === "QuotaExceededError";
}

function mb(bytes: number): string {
  return `${(bytes / 1e6).toFixed(bytes < 1e8 ? 1 : 0)} MB`;
}
