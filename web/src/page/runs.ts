// Runs: each joins an inferlet worker and the engine by a channel of its own, and ends with a result, an error or a cancel.

import { Cancelled, PieError } from "../errors.js";
import { InferletPool, type Lease } from "../inferlet/pool.js";
import type { EngineClient } from "./engine.js";
import type { Inbox } from "./inbox.js";

export interface RunRequest {
  source: string;
  name: string;
  /** JSON text. */
  input: string;
  /** A sent value, as JSON text. */
  message: (value: string) => void;
  log: (level: string, text: string) => void;
  /** Opened when the run starts. */
  inbox: Inbox;
  /** False where nobody sends: then a `receive` that nothing else helps is a Deadlock. */
  receives: boolean;
  signal: AbortSignal | undefined;
}

const SETTLE_MS = 2000; // within which a worker whose run ended well says so itself and can be used again

export class Runs {
  readonly #engine: EngineClient;
  readonly #base: string;
  readonly #stepSeconds: { stepSeconds?: number };
  readonly #closing = new AbortController();
  #pool: InferletPool | null = null; // made by the first run: until then no language component is needed
  #count = 0;

  /** `stepSeconds`: see InferletPool. */
  constructor(engine: EngineClient, base: string, stepSeconds?: number) {
    this.#stepSeconds = stepSeconds === undefined ? {} : { stepSeconds };
    this.#engine = engine;
    this.#base = base;
    void engine.failed.then(() => this.close());
  }

  /** Have a worker with the language component ready. Raises LoadError when none can be brought up; the next call tries anew. */
  async prepare(): Promise<void> {
    await this.#ready();
  }

  /** JSON text of the inferlet's result. Raises InferletError, Cancelled, PieError, and what `message` or `log` throw. */
  async run(request: RunRequest): Promise<string> {
    const pool = await unless(this.#ready(), [
      [request.signal, cancelled],
      [this.#closing.signal, () => this.#gone()],
    ]);
    return this.#run(pool, request);
  }

  /** Why nothing runs any more. */
  #gone(): PieError {
    return this.#engine.failure ?? new Cancelled("the run ended with its Pie, which was disposed");
  }

  #run(pool: InferletPool, { source, name, input, message, log, inbox, receives, signal }: RunRequest): Promise<string> {
    const run = ++this.#count;
    const { port1, port2 } = new MessageChannel();
    const closing = this.#closing.signal;
    return new Promise<string>((resolve, reject) => {
      let lease: Lease | null = null;
      let over = false;
      const settle = (): void => {
        over = true;
        signal?.removeEventListener("abort", cancel);
        closing.removeEventListener("abort", close);
      };
      /** End the run from this side: nobody waits for what engine and worker still say. */
      const abort = (error: unknown): void => {
        if (over) return;
        settle();
        this.#engine.abandon(run, error instanceof Error ? error.message : String(error));
        lease?.release();
        reject(error as Error);
      };
      const cancel = (): void => abort(cancelled());
      const close = (): void => abort(this.#gone());
      /** What the caller's code throws ends its run. */
      const guarded = (tell: () => void): void => {
        try {
          if (!over) tell();
        } catch (error) {
          abort(error);
        }
      };
      signal?.addEventListener("abort", cancel, { once: true });
      closing.addEventListener("abort", close, { once: true });
      if (signal?.aborted) return cancel();
      if (closing.aborted) return close();

      this.#engine.start(run, port1, { source, name, input, receives }, {
        message: (value) => guarded(() => message(value)),
        log: (level, text) => guarded(() => log(level, text)),
        received: () => inbox.received(),
        done: (value) => {
          settle();
          if (lease !== null) setTimeout(() => lease?.release(), SETTLE_MS);
          resolve(value);
        },
        failed: (error: PieError) => {
          settle();
          if (lease !== null) setTimeout(() => lease?.release(), SETTLE_MS);
          reject(error);
        },
      });
      if (over) return;
      inbox.open((value) => this.#engine.deliver(run, value));
      lease = pool.attach(run, port2, (type, why) => this.#engine.end(run, type, why));
    });
  }

  /** End all runs and their workers. */
  close(): void {
    this.#closing.abort();
    this.#pool?.dispose();
    this.#pool = null;
  }

  async #ready(): Promise<InferletPool> {
    if (this.#closing.signal.aborted) throw new PieError("this Pie was disposed: load another");
    const pool = (this.#pool ??= new InferletPool({ base: this.#base, text: this.#engine.text, cores: navigator.hardwareConcurrency, ...this.#stepSeconds }));
    try {
      await pool.ready();
    } catch (error) {
      pool.dispose();
      if (this.#pool === pool) this.#pool = null;
      throw error;
    }
    return pool;
  }
}

function cancelled(): Cancelled {
  return new Cancelled("the run was cancelled");
}

/** What `work` gives, or a signal's error as soon as that is aborted. */
function unless<T>(work: Promise<T>, signals: readonly (readonly [AbortSignal | undefined, () => PieError])[]): Promise<T> {
  return new Promise((resolve, reject) => {
    const settled = new AbortController();
    for (const [signal, reason] of signals) {
      if (signal?.aborted) reject(reason());
      signal?.addEventListener("abort", () => reject(reason()), { signal: settled.signal });
    }
    work.then(resolve, reject).finally(() => settled.abort());
  });
}
