// A model's manifest: which file it is, how large, and its sha256. Everything in it is checked before use.

import { Cancelled, LoadError, NetworkError, UNREACHABLE } from "../errors.js";

export interface Manifest {
  /** The model's name, for people. */
  readonly name: string;
  /** Where the file is: absolute. */
  readonly url: string;
  readonly size: number;
  /** 64 lower-case hex digits. */
  readonly sha256: string;
}

const LARGEST = 64 * 2 ** 30;
const TIMEOUT_MS = 15_000;

/** The manifest in `data`, which was fetched from `from`; `file` resolves beside it. Raises LoadError that names what is wrong. */
export function parseManifest(data: unknown, from: string): Manifest {
  if (typeof data !== "object" || data === null) throw wrong(from, "it is not a JSON object");
  const { name, file, size, sha256 } = data as Record<string, unknown>;
  if (typeof name !== "string" || name === "") throw wrong(from, '"name" is not a text');
  if (typeof file !== "string" || file === "") throw wrong(from, '"file" is not a text');
  if (typeof size !== "number" || !Number.isSafeInteger(size) || size <= 0 || size > LARGEST) throw wrong(from, '"size" is not a number of bytes');
  if (typeof sha256 !== "string" || !/^[0-9a-f]{64}$/.test(sha256)) throw wrong(from, '"sha256" is not 64 lower-case hex digits');
  return { name, url: new URL(file.split("/").map(encodeURIComponent).join("/"), from).href, size, sha256 };
}

function wrong(from: string, what: string): LoadError {
  return new LoadError(`the model's manifest at ${from} cannot be used: ${what}`);
}

/** The manifest at `url`; the one of the last visit when the server cannot be reached. Raises NetworkError, LoadError and Cancelled. */
export async function fetchManifest(url: string, signal: AbortSignal | undefined): Promise<Manifest> {
  const memory = await remembered();
  const within = AbortSignal.timeout(TIMEOUT_MS);
  let response: Response | undefined;
  let reason = "";
  try {
    response = await fetch(url, { cache: "no-cache", signal: signal ? AbortSignal.any([signal, within]) : within });
    if (!response.ok) reason = `the server answered ${response.status} ${response.statusText}`.trimEnd();
  } catch (error) {
    if (signal?.aborted) throw new Cancelled("the load was cancelled");
    reason = within.aborted ? `no answer within ${TIMEOUT_MS / 1000} seconds` : `${UNREACHABLE} (${(error as Error).message})`;
  }
  if (!response?.ok) {
    const unreachable = response === undefined || response.status >= 500;
    response = unreachable ? await memory?.match(url) : undefined;
    if (response === undefined) throw new NetworkError(`the model's manifest at ${url} could not be fetched: ${reason}`);
  } else {
    await memory?.put(url, response.clone()).catch(() => undefined); // only the next visit without a network misses it
  }
  let data: unknown;
  try {
    data = await response.json();
  } catch {
    throw wrong(url, "it is not JSON");
  }
  return parseManifest(data, url);
}

async function remembered(): Promise<Cache | undefined> {
  try {
    return await globalThis.caches?.open("pie-manifests");
  } catch {
    return undefined;
  }
}
