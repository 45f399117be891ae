// The inferlet workers of a page: made ready ahead of time, one a run, watched, and thrown away when anything went wrong in them.

import { Cancelled, errorFrom, type PieError } from "../errors.js";
import type { FromInferlet, SharedParts, TextSpec, ToInferlet } from "../messages.js";

/** The part of a Worker that the pool uses. */
export interface WorkerLike {
  onmessage: ((event: MessageEvent<FromInferlet>) => void) | null;
  onerror: ((event: ErrorEvent) => void) | null;
  postMessage(message: ToInferlet, transfer?: Transferable[]): void;
  terminate(): void;
}

export interface PoolOptions {
  /** The folder that holds inferlet.worker.js and component/; ends with "/". */
  readonly base: string;
  /** What the text ops answer from. */
  readonly text: TextSpec;
  /** Idle workers that stay when runs end. One is always made ready ahead. */
  readonly idle?: number;
  /** Workers in all; further runs wait. Each takes some 40 MB. */
  readonly most?: number;
  /** Runs of one worker. Browsers keep the memory of instances that ended, some 17 MB each, until it pleases them; that of a worker goes with it. */
  readonly runs?: number;
  /** How long a step may take, of the inferlet's own time as far as the page can tell: see `share`. */
  readonly stepSeconds?: number;
  /** Cores of the machine. Where they are not given, nobody is taken to wait for another. */
  readonly cores?: number;
  readonly makeWorker?: (base: string) => WorkerLike;
}

/** Why a run lost its worker: told once, unless the run was released before. */
export type OnDead = (type: string, message: string) => void;

type State = "starting" | "idle" | "running" | "refreshing" | "dead";

interface Entry {
  readonly worker: WorkerLike;
  state: State;
  job: Job | null;
  /** Those that it may still be given. */
  runs: number;
  /** Milliseconds of its own since the ping that is not answered yet was sent; null: none is out. */
  used: number | null;
  /** The time during which the page was stopped was left out, once. */
  pardoned: boolean;
}

interface Job {
  readonly run: number;
  readonly port: MessagePort;
  readonly onDead: OnDead;
  entry: Entry | null;
  ended: boolean;
}

/** One run's hold on a worker. */
export interface Lease {
  /** The run is over: a worker that has not ended by itself is terminated. May be called twice. */
  release(): void;
}

const MOST_INTERVAL = 500; // ms between looks at the running workers

export class InferletPool {
  readonly #base: string;
  readonly #text: TextSpec;
  readonly #idle: number;
  readonly #most: number;
  readonly #runs: number;
  readonly #stepMs: number;
  readonly #cores: number;
  readonly #makeWorker: (base: string) => WorkerLike;
  readonly #entries = new Set<Entry>();
  readonly #queue: Job[] = [];
  #shared: SharedParts | null = null;
  #timer: ReturnType<typeof setInterval> | null = null;
  #looked = 0;
  #pings = 0;
  #disposed = false;
  #failure: PieError | null = null;
  readonly #waiters = new Set<() => void>();

  /** Starts the first worker at once. */
  constructor(options: PoolOptions) {
    this.#base = options.base;
    this.#text = options.text;
    this.#idle = options.idle ?? 3;
    this.#most = options.most ?? 32;
    this.#runs = options.runs ?? 2;
    this.#stepMs = (options.stepSeconds ?? 10) * 1000;
    this.#cores = options.cores ?? Infinity;
    this.#makeWorker = options.makeWorker ?? startWorker;
    this.#refill();
  }

  /** Resolves when a worker is ready, rejects when none can be brought up. Another call tries again. */
  async ready(): Promise<void> {
    this.#retry();
    while (this.#shared === null) {
      if (this.#disposed) throw new Cancelled("the pool of inferlet workers was disposed");
      if (this.#failure !== null) throw this.#failure;
      await new Promise<void>((resolve) => this.#waiters.add(resolve));
    }
  }

  /** Give a run a worker, which serves it over `port` (transferred). */
  attach(run: number, port: MessagePort, onDead: OnDead): Lease {
    const job: Job = { run, port, onDead, entry: null, ended: false };
    if (this.#disposed) throw new Cancelled("the pool of inferlet workers was disposed");
    this.#queue.push(job);
    this.#retry();
    this.#assign();
    return { release: () => this.#release(job) };
  }

  /** Terminate every worker. No `onDead` is called any more. */
  dispose(): void {
    this.#disposed = true;
    this.#queue.length = 0;
    for (const entry of this.#entries) this.#end(entry);
    this.#entries.clear();
    if (this.#timer !== null) clearInterval(this.#timer);
    this.#timer = null;
    this.#wake();
  }

  // --- workers

  /** What failed before may work now: the network is back. */
  #retry(): void {
    if (this.#failure === null) return;
    this.#failure = null;
    this.#refill();
  }

  #start(): Entry {
    const worker = this.#makeWorker(this.#base);
    const entry: Entry = { worker, state: "starting", job: null, runs: this.#runs, used: null, pardoned: false };
    this.#entries.add(entry);
    worker.onmessage = ({ data }) => this.#receive(entry, data);
    worker.onerror = (event) => this.#die(entry, "WorkerFailed", `the inferlet's worker failed: ${event.message || "it could not be loaded"}`);
    const init = { kind: "init", base: this.#base } as const;
    worker.postMessage(this.#shared === null ? { ...init, text: this.#text } : { ...init, text: "", shared: this.#shared });
    return entry;
  }

  /** Keep one ready beyond what is asked for. The others wait for what the first worker makes for all. */
  #refill(): void {
    if (this.#disposed || this.#failure !== null) return;
    const states = [...this.#entries].map((entry) => entry.state);
    const ahead = states.filter((state) => state !== "running").length;
    const wanted = this.#shared === null ? 1 : 1 + this.#queue.length;
    for (let missing = Math.min(wanted - ahead, this.#most - states.length); missing > 0; missing--) this.#start();
  }

  #receive(entry: Entry, message: FromInferlet): void {
    if (entry.state === "dead") return;
    switch (message.kind) {
      case "ready":
        if (message.shared !== undefined) this.#shared ??= message.shared;
        entry.state = "idle";
        this.#failure = null;
        this.#wake();
        this.#assign();
        this.#trim();
        break;
      case "pong":
        entry.used = null;
        break;
      case "ended":
        if (entry.job !== null) entry.job.ended = true;
        entry.job = null;
        entry.state = "refreshing";
        if (!message.clean || entry.runs === 0) this.#drop(entry);
        break;
      case "failed": {
        const error = errorFrom(message.error);
        if (this.#shared === null) this.#failure = error;
        this.#die(entry, "WorkerFailed", `the inferlet's worker could not start: ${error.message}`);
        break;
      }
    }
  }

  #assign(why?: string): void {
    for (const entry of this.#entries) {
      if (entry.state !== "idle") continue;
      const job = this.#queue.shift();
      if (job === undefined) break;
      entry.state = "running";
      entry.job = job;
      entry.used = null;
      job.entry = entry;
      const last = --entry.runs === 0;
      entry.worker.postMessage({ kind: "attach", run: job.run, port: job.port, last }, [job.port]);
      this.#watch();
    }
    this.#refill();
    if (this.#failure !== null && this.#entries.size === 0) this.#abandon(why ?? this.#failure.message);
  }

  #release(job: Job): void {
    const waiting = this.#queue.indexOf(job);
    if (waiting >= 0) this.#queue.splice(waiting, 1);
    const { entry } = job;
    if (entry !== null && entry.job === job && !job.ended) this.#drop(entry);
    job.ended = true;
  }

  /** More idle workers than that hold memory for nothing. */
  #trim(): void {
    const idle = [...this.#entries].filter((entry) => entry.state === "idle");
    for (const entry of idle.slice(this.#idle)) this.#drop(entry);
  }

  #drop(entry: Entry): void {
    this.#end(entry);
    this.#entries.delete(entry);
    this.#assign();
  }

  #end(entry: Entry): void {
    entry.state = "dead";
    entry.job = null;
    entry.worker.onmessage = null;
    entry.worker.onerror = null;
    entry.worker.terminate();
  }

  #die(entry: Entry, type: string, message: string): void {
    if (entry.state === "dead") return;
    const { job } = entry;
    const starting = entry.state === "starting";
    this.#end(entry);
    this.#entries.delete(entry);
    if (job !== null && !job.ended) {
      job.ended = true;
      job.onDead(type, message);
    }
    if (starting) this.#failure ??= errorFrom({ name: "LoadError", message }); // the next would fail as well, at once
    this.#assign(message);
    this.#wake();
  }

  /** No worker can be brought up, and none is left that could take them: the runs that wait for one end. */
  #abandon(message: string): void {
    for (const job of this.#queue.splice(0)) {
      job.ended = true;
      job.onDead("WorkerFailed", message);
    }
  }

  #wake(): void {
    for (const waiter of this.#waiters) waiter();
    this.#waiters.clear();
  }

  // --- watchdog

  #watch(): void {
    if (this.#timer !== null) return;
    this.#looked = performance.now();
    this.#timer = setInterval(() => this.#look(), Math.min(MOST_INTERVAL, this.#stepMs / 4));
  }

  /** What a worker that computes has of a core, beside the others that do and the engine. Browsers tell nobody a thread's own time. */
  #share(busy: number): number {
    return Math.min(1, this.#cores / (busy + 1));
  }

  /** A worker answers a ping between steps; its share of the time since a ping went out is at most what its step has used. */
  #look(): void {
    const now = performance.now();
    const passed = now - this.#looked;
    const asleep = passed > 4 * MOST_INTERVAL; // the page itself was stopped, and with it perhaps the workers
    this.#looked = now;
    const entries = [...this.#entries].filter(({ state }) => state === "running");
    const share = this.#share(entries.filter(({ used }) => used !== null).length);
    for (const entry of entries) {
      if (entry.used === null) {
        entry.used = 0;
        entry.pardoned = false;
        entry.worker.postMessage({ kind: "ping", n: ++this.#pings, share });
        continue;
      }
      if (asleep && !entry.pardoned) entry.pardoned = true;
      else entry.used += passed * share;
      if (entry.used <= this.#stepMs) continue;
      const seconds = (entry.used / 1000).toFixed(1);
      this.#die(entry, "CpuBudgetExceeded", `the inferlet ran for ${seconds} s without awaiting; the limit is ${this.#stepMs / 1000} s`);
    }
    const running = entries.length;
    if (running === 0 && this.#timer !== null) {
      clearInterval(this.#timer);
      this.#timer = null;
    }
  }
}

function startWorker(base: string): WorkerLike {
  return new Worker(new URL("inferlet.worker.js", base), { type: "module", name: "inferlet" });
}
