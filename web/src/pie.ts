// The page's API: `const pie = await Pie.load(); const result = await pie.run(source, {input})`.

import { Callbacks, cancelled } from "./api/callbacks.js";
import { ADDRESS, ANY, bytesBetween, CALLBACK, checkArgument, checkOptions, FLAG, oneOf, secondsUpTo, SIGNAL, shown, TEXT, type Rule } from "./api/options.js";
import { Cancelled, PieError, UsageError } from "./errors.js";
import type { DeviceChoice, EngineStats, PieInfo, Progress } from "./messages.js";
import { EngineClient } from "./page/engine.js";
import { Inbox } from "./page/inbox.js";
import { jsonText } from "./page/json.js";
import { Runs } from "./page/runs.js";

export { Cancelled, DeviceLost, DeviceUnavailable, InferletError, IntegrityError, LoadError, NetworkError, PieError, SelfTestFailed, StorageError, UsageError } from "./errors.js";
export type { DeviceChoice, DeviceFacts, EngineStats, ModelFacts, PieInfo, Progress } from "./messages.js";

const OWN_MODEL = "../models/default/manifest.json"; // from where pie.js is

const MIB = 1 << 20;
const LONGEST_STEP = 86_400; // seconds: a timer of the browser holds less than 25 days

export interface LoadOptions {
  /** The URL of the model's manifest; without it the server's own model. */
  model?: string | URL;
  /** "auto": a WebGPU adapter that is not software, else the CPU. By name: that one, or DeviceUnavailable. */
  device?: DeviceChoice;
  /** Where pie.js and the files beside it are; without it, where this module came from. */
  base?: string | URL;
  /** Bytes for the KV cache, 1 MiB to 64 GiB: all runs share it, and one sequence has no more tokens than it holds. 256 MiB where it is not given. */
  kvPoolBytes?: number;
  /** Seconds that an inferlet may run without awaiting, at most a day; then it ends with CpuBudgetExceeded. 10 where it is not given. */
  stepSeconds?: number;
  /** Load the language component too, which the first run needs: afterwards a run asks the network for nothing. */
  prepare?: boolean;
  /** How far the load is. If it throws, or its promise rejects, the load ends with that error. */
  onProgress?: (progress: Progress) => unknown;
  /** Ends the load with Cancelled, whose `cause` is the signal's reason. */
  signal?: AbortSignal;
}

export interface RunOptions {
  /** Any JSON value, given to the inferlet's `main`. */
  input?: unknown;
  /** How the program is called in tracebacks. */
  name?: string;
  /** False where nothing will be sent to the run: then the inferlet's `receive()` raises Deadlock instead of waiting for ever. */
  receives?: boolean;
  /** Each value that the inferlet sends, in order, before the result. If it throws, or its promise rejects, the run ends with that error. */
  onMessage?: (value: unknown) => unknown;
  /** Each line that the inferlet prints or logs. What it throws or rejects with ends the run as well. */
  onLog?: (level: string, text: string) => unknown;
  /** Ends the run with Cancelled, whose `cause` is the signal's reason. */
  signal?: AbortSignal;
}

const LOAD_RULES: Readonly<Record<keyof LoadOptions, Rule>> = {
  model: ADDRESS,
  device: oneOf(["auto", "webgpu", "cpu"]),
  base: ADDRESS,
  kvPoolBytes: bytesBetween(MIB, 65_536 * MIB),
  stepSeconds: secondsUpTo(LONGEST_STEP),
  prepare: FLAG,
  onProgress: CALLBACK,
  signal: SIGNAL,
};
const RUN_RULES: Readonly<Record<keyof RunOptions, Rule>> = {
  input: ANY,
  name: TEXT,
  receives: FLAG,
  onMessage: CALLBACK,
  onLog: CALLBACK,
  signal: SIGNAL,
};

/** A promise of what the inferlet's `main` returns, and the way to its `receive`. */
export interface Run extends Promise<unknown> {
  /**
   * A JSON value for the inferlet's `receive`, in order, as soon as the run is asked for. False when the run is over and nobody hears
   * it. Raises UsageError for what is not JSON, and PieError where 1,024 values wait already: nothing was sent then, and the run goes on.
   */
  send(value: unknown): boolean;
}

/** A loaded model on a device of this page. Nothing is shared between two of them but the cached files. */
export class Pie {
  /** Resolves with the error that ended the engine (a lost device, a crashed worker, `dispose`); never rejects. */
  readonly failed: Promise<PieError>;
  readonly #engine: EngineClient;
  readonly #runs: Runs;
  readonly #gone = new AbortController(); // its reason is what `failed` gives
  #disposed: Promise<void> | null = null;

  private constructor(engine: EngineClient, base: string, stepSeconds: number | undefined) {
    this.#engine = engine;
    this.#runs = new Runs(engine, base, stepSeconds);
    this.failed = engine.failed;
    void engine.failed.then((error) => this.#gone.abort(error));
  }

  /** Start the engine and load the model. Raises UsageError, LoadError and its kinds, Cancelled as soon as `signal` says so, and what `onProgress` throws. */
  static async load(options: LoadOptions = {}): Promise<Pie> {
    checkOptions("Pie.load", options, LOAD_RULES);
    const { signal } = options;
    if (signal?.aborted) throw cancelled("the load was cancelled", signal);
    const callbacks = new Callbacks(signal);
    const opening = Pie.#open(options, callbacks);
    try {
      return await callbacks.settle(opening);
    } catch (error) {
      void opening.then((pie) => pie.dispose(), () => undefined); // loaded, but a callback failed
      throw error;
    }
  }

  static async #open({ model, device = "auto", base, kvPoolBytes, stepSeconds, prepare = false, onProgress }: LoadOptions, callbacks: Callbacks): Promise<Pie> {
    const folder = base === undefined ? absolute("base", ".", import.meta.url) : absolute("base", String(base).replace(/\/?$/, "/"), document.baseURI);
    const manifest = model === undefined ? absolute("model", OWN_MODEL, folder) : absolute("model", String(model), document.baseURI);
    const tell = (progress: Progress): void => callbacks.call(() => onProgress?.(progress));
    const { signal } = callbacks;
    const pie = new Pie(await EngineClient.boot({ base: folder, model: manifest, device, kvPoolBytes, onProgress: tell, signal }), folder, stepSeconds);
    if (!prepare) return pie;
    tell({ stage: "component", done: 0, total: 0, rate: null, eta: null });
    const stop = (): void => void pie.dispose();
    signal.addEventListener("abort", stop);
    try {
      if (signal.aborted) throw new Cancelled("the load was cancelled");
      await pie.#runs.prepare();
      return pie;
    } catch (error) {
      stop();
      throw signal.aborted ? new Cancelled("the load was cancelled") : error;
    } finally {
      signal.removeEventListener("abort", stop);
    }
  }

  /** What really runs, and why. */
  info(): PieInfo {
    return this.#engine.info;
  }

  /** Counters of the engine. Rejects when it has ended. */
  async stats(): Promise<EngineStats> {
    return (await this.#engine.ask("stats")) as EngineStats;
  }

  /** Load the language component ahead of the first run, which does it otherwise. Raises LoadError when it does not come; the next call tries anew. */
  async prepare(...nothing: never[]): Promise<void> {
    if (nothing.length > 0) throw new UsageError(`pie.prepare: it was given ${shown(nothing[0])}; it takes no arguments`);
    this.#check();
    await this.#runs.prepare();
  }

  /**
   * Run an inferlet, as many at once as you like, and get what its `main` returns; meanwhile `send` feeds its `receive`. It ends when
   * the promises of `onMessage` and `onLog` have settled, too: do not await the run in them.
   * Raises UsageError for what it is given, InferletError when the program fails, Cancelled by `signal` or `dispose`, PieError when the
   * engine is gone, and what `onMessage` or `onLog` throw.
   */
  run(source: string, options: RunOptions = {}): Run {
    const inbox = new Inbox();
    return Object.assign(this.#start(source, options, inbox), { send: (value: unknown) => inbox.send(jsonText("run.send", "the value", value)) });
  }

  async #start(source: string, options: RunOptions, inbox: Inbox): Promise<unknown> {
    try {
      return await this.#run(source, options, inbox);
    } finally {
      inbox.close();
    }
  }

  async #run(source: string, options: RunOptions, inbox: Inbox): Promise<unknown> {
    checkArgument("pie.run", "the program's source", source, TEXT);
    checkOptions("pie.run", options, RUN_RULES);
    const { input = {}, name = "inferlet.py", receives = true, onMessage, onLog, signal } = options;
    if (!receives) inbox.refuse();
    const request = jsonText("pie.run", "input", input);
    this.#check();
    if (signal?.aborted) throw cancelled("the run was cancelled", signal);
    const callbacks = new Callbacks(signal);
    const running = this.#runs.run({
      source,
      name,
      input: request,
      message: (text) => callbacks.call(() => onMessage?.(JSON.parse(text))),
      log: (level, text) => callbacks.call(() => onLog?.(level, text)),
      inbox,
      receives,
      signal: callbacks.signal,
    });
    return JSON.parse(await callbacks.settle(running, this.#gone.signal)) as unknown;
  }

  /** End everything and give device and workers back. Runs reject with Cancelled. Twice is harmless. */
  dispose(): Promise<void> {
    this.#disposed ??= this.#close();
    return this.#disposed;
  }

  async #close(): Promise<void> {
    this.#runs.close();
    await this.#engine.close();
  }

  #check(): void {
    if (this.#disposed) throw new PieError("this Pie was disposed: load another");
    if (this.#engine.failure) throw this.#engine.failure;
  }
}

function absolute(name: string, url: string, from: string): string {
  try {
    return new URL(url, from).href;
  } catch {
    throw new UsageError(`Pie.load: ${name} is ${shown(url)}; it must be a URL, which may be relative to the page`);
  }
}
