// One large file over HTTP: in order, with resume by range, retries of what can pass by itself, and a sentence for what cannot.

import { Cancelled, IntegrityError, NetworkError, UNREACHABLE } from "../errors.js";

export interface DownloadOptions {
  /** Bytes that the file must have. */
  size: number;
  /** Bytes that are there already. */
  offset?: number;
  /** The validator of the bytes that are there: a server whose file has changed then sends all of it. */
  etag?: string | null;
  /** Told before each wait for another try. */
  onRetry?: (retry: Retry) => void;
  /** Told the validator of each response. */
  onEtag?: (etag: string | null) => void;
  signal?: AbortSignal | undefined;
  /**
   * Waits before the retries, in milliseconds; one that brings new bytes starts them anew. Not at a server that answers a range with the
   * whole file: its bytes are not new, so the retries that there are must do.
   */
  delays?: readonly number[];
  /** A connection that brings nothing for so long counts as broken. */
  stallMs?: number;
}

/** A try that begins `in` so many seconds; `attempt` counts those since the last new byte, the first is 1. */
export interface Retry {
  attempt: number;
  in: number;
}

/** Bytes and where in the file they belong: after the piece before, or 0 when the server makes us start over. */
export interface Piece {
  at: number;
  bytes: Uint8Array;
}

const DELAYS = [500, 1000, 2000, 4000, 8000];
const STALL_MS = 30_000;

/** What may pass by itself: a broken connection, a server that is overloaded or restarts. */
class Transient extends Error {}

/** The pieces of the file at `url`. Raises NetworkError, IntegrityError when the file is of another size, Cancelled when `signal` ends it. */
export async function* download(url: string, options: DownloadOptions): AsyncGenerator<Piece, void, void> {
  const { size, signal, onEtag, onRetry, delays = DELAYS, stallMs = STALL_MS } = options;
  let at = options.offset ?? 0;
  let most = at; // of the file, that was ever here
  let etag = options.etag ?? null;
  let startsOver = false; // whether the server makes us: it does not answer ranges
  for (let failures = 0; ; ) {
    const attempt = new Attempt(signal, stallMs);
    const asked = at;
    let came = false;
    try {
      const response = await attempt.wait(fetch(url, request(at, etag, attempt.signal)));
      at = startOf(response, at, size, url);
      if (asked > 0) startsOver = at < asked;
      etag = strong(response.headers.get("etag"));
      onEtag?.(etag);
      if (response.body === null) throw new Transient("the response has no body");
      const reader = response.body.getReader();
      for (;;) {
        const { done, value } = await attempt.wait(reader.read());
        if (done) break;
        if (at + value.length > size) throw new IntegrityError(`${url} is longer than the ${size} bytes of its manifest`);
        yield { at, bytes: value };
        at += value.length;
        came ||= value.length > 0;
        if (at > most && !startsOver) failures = 0;
        most = Math.max(most, at);
      }
      if (at === size) return;
      throw new Transient(`the answer ended at byte ${at} of ${size}`);
    } catch (error) {
      if (signal?.aborted) throw new Cancelled("the download was cancelled");
      // fetch and the body's reader raise TypeError for every failure of the network
      if (!(error instanceof Transient || error instanceof TypeError || attempt.stalled)) throw error;
      const wait = delays[failures++];
      if (wait === undefined) {
        const end = attempt.stalled ? `nothing came any more at byte ${at} of ${size}` : came ? `the answer ended at byte ${at} of ${size}` : reason(error);
        const over = startsOver ? `; the server does not answer ranges, so that each try has to start over, and ${failures} ended early` : "";
        throw new NetworkError(`${url} could not be fetched: ${end}${over}`);
      }
      onRetry?.({ attempt: failures, in: wait / 1000 });
      await pause(wait, signal);
    } finally {
      attempt.end();
    }
  }
}

function reason(error: unknown): string {
  const { message } = error as Error;
  return error instanceof TypeError ? `${UNREACHABLE} (${message})` : message;
}

/** One request: ends with the caller's signal, or when nothing arrives for too long. */
class Attempt {
  stalled = false;
  readonly signal: AbortSignal;
  readonly #own = new AbortController();
  readonly #stallMs: number;

  constructor(outer: AbortSignal | undefined, stallMs: number) {
    this.signal = outer ? AbortSignal.any([outer, this.#own.signal]) : this.#own.signal;
    this.#stallMs = stallMs;
  }

  async wait<T>(what: Promise<T>): Promise<T> {
    const timer = setTimeout(() => {
      this.stalled = true;
      this.#own.abort();
    }, this.#stallMs);
    try {
      return await what;
    } finally {
      clearTimeout(timer);
    }
  }

  /** Let the connection go; nothing is read from it any more. */
  end(): void {
    this.#own.abort();
  }
}

function request(at: number, etag: string | null, signal: AbortSignal): RequestInit {
  const headers: Record<string, string> = {};
  if (at > 0) {
    headers["Range"] = `bytes=${at}-`;
    if (etag !== null) headers["If-Range"] = etag;
  }
  return { headers, signal, cache: "no-store" }; // the model cache keeps it: the HTTP cache need not, too
}

/** The offset at which the body of `response` starts, when `asked` was asked for. Raises what the status means. */
function startOf(response: Response, asked: number, size: number, url: string): number {
  const { status } = response;
  if (status === 206) {
    const range = /^bytes (\d+)-\d+\/(\d+|\*)$/.exec(response.headers.get("content-range") ?? "");
    if (range === null || Number(range[1]) !== asked) throw new NetworkError(`${url} was asked for from byte ${asked} and answered with another range`);
    if (range[2] !== "*") checkSize(Number(range[2]), size, url);
    return asked;
  }
  if (status === 200) {
    const length = response.headers.get("content-length");
    if (length !== null && !response.headers.has("content-encoding")) checkSize(Number(length), size, url);
    return 0;
  }
  if (status >= 500) throw new Transient(`the server answered ${status}`);
  throw new NetworkError(`${url} could not be fetched: the server answered ${status} ${response.statusText}`.trimEnd());
}

function checkSize(got: number, size: number, url: string): void {
  if (got !== size) throw new IntegrityError(`${url} has ${got} bytes, its manifest says ${size}`);
}

/** If-Range takes strong validators only. */
function strong(etag: string | null): string | null {
  return etag !== null && etag.startsWith('"') ? etag : null;
}

function pause(ms: number, signal: AbortSignal | undefined): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = (): void => {
      clearTimeout(timer);
      reject(new Cancelled("the download was cancelled"));
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, ms);
    signal?.addEventListener("abort", stop, { once: true });
  });
}
