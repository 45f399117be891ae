// The caller's functions of one load or run: what one throws, or its promise rejects with, ends that load or run.

import { Cancelled } from "../errors.js";

export class Callbacks {
  /** Aborted by the caller's signal, or when a callback failed. */
  readonly signal: AbortSignal;
  readonly #caller: AbortSignal | undefined;
  readonly #failing = new AbortController();
  #failure: { readonly error: unknown } | null = null;
  readonly #running = new Set<Promise<void>>();

  constructor(caller: AbortSignal | undefined) {
    this.#caller = caller;
    this.signal = caller === undefined ? this.#failing.signal : AbortSignal.any([caller, this.#failing.signal]);
  }

  /** Let `tell` call one of the caller's functions; none is called any more once one has failed. Never raises. */
  call(tell: () => unknown): void {
    if (this.#failure !== null) return;
    try {
      const said = tell();
      if (isThenable(said)) this.#follow(said);
    } catch (error) {
      this.#fail(error);
    }
  }

  /**
   * What `work` gives, once the promises of callbacks have settled too. Raises what a callback failed with; what `work` rejects with,
   * a Cancelled by the caller's signal with its reason as the cause; and the reason of `gone`, aborted while callbacks are waited for.
   */
  async settle<T>(work: Promise<T>, gone?: AbortSignal): Promise<T> {
    try {
      const value = await work;
      if (this.#running.size > 0) await this.#quiet(gone);
      if (this.#failure === null) return value;
    } catch (error) {
      if (this.#failure === null) throw error instanceof Cancelled && this.#caller?.aborted ? cancelled(error.message, this.#caller) : error;
    }
    throw this.#failure.error;
  }

  #follow(said: PromiseLike<unknown>): void {
    const running: Promise<void> = Promise.resolve(said).then(
      () => void this.#running.delete(running),
      (error: unknown) => {
        this.#running.delete(running);
        this.#fail(error);
      },
    );
    this.#running.add(running);
  }

  #fail(error: unknown): void {
    if (this.#failure !== null) return;
    this.#failure = { error };
    this.#failing.abort();
  }

  /** Until no callback runs. Rejects when a signal is aborted. */
  async #quiet(gone: AbortSignal | undefined): Promise<void> {
    const done = new AbortController(); // takes the listeners away: signals may live for long
    try {
      await new Promise<void>((resolve, reject) => {
        const stop = (): void => reject(gone?.aborted ? (gone.reason as Error) : new Cancelled("it was cancelled while its callbacks ran"));
        for (const signal of [this.signal, gone]) {
          if (signal?.aborted) return stop();
          signal?.addEventListener("abort", stop, { signal: done.signal });
        }
        const look = (): void => {
          if (this.#running.size === 0) resolve();
          else void Promise.all(this.#running).then(look);
        };
        look();
      });
    } finally {
      done.abort();
    }
  }
}

/** The error of a signal: its reason is the cause, and told where it says more than that there was an abort. */
export function cancelled(message: string, { reason }: AbortSignal): Cancelled {
  const { name, message: why = "" } = reason instanceof Error ? reason : { name: "", message: typeof reason === "string" ? reason : "" };
  return new Cancelled(why === "" || name === "AbortError" ? message : `${message}: ${why}`, { cause: reason });
}

function isThenable(value: unknown): value is PromiseLike<unknown> {
  return typeof (value as PromiseLike<unknown> | null | undefined)?.then === "function";
}
