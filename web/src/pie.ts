// The page's API: `const pie = await Pie.load(); const result = await pie.run(source, {input})`.

import { Cancelled, LoadError, PieError } from "./errors.js";
import type { DeviceChoice, EngineStats, PieInfo, Progress } from "./messages.js";
import { EngineClient } from "./page/engine.js";
import { Inbox } from "./page/inbox.js";
import { Runs } from "./page/runs.js";

export { Cancelled, DeviceUnavailable, InferletError, IntegrityError, LoadError, NetworkError, PieError, SelfTestFailed, StorageError } from "./errors.js";
export type { DeviceChoice, DeviceFacts, EngineStats, ModelFacts, PieInfo, Progress } from "./messages.js";

const OWN_MODEL = "../models/default/manifest.json"; // from where pie.js is

export interface LoadOptions {
  /** The URL of the model's manifest; without it the server's own model. */
  model?: string;
  /** "auto": a WebGPU adapter that is not software, else the CPU. By name: that one, or DeviceUnavailable. */
  device?: DeviceChoice;
  /** Where pie.js and the files beside it are; without it, where this module came from. */
  base?: string;
  /** Bytes for the KV cache. */
  kvPoolBytes?: number;
  /** Seconds that an inferlet may run without awaiting; then it ends with CpuBudgetExceeded. 10 where it is not given. */
  stepSeconds?: number;
  onProgress?: (progress: Progress) => void;
  signal?: AbortSignal;
}

export interface RunOptions {
  /** Any JSON value, given to the inferlet's `main`. */
  input?: unknown;
  /** How the program is called in tracebacks. */
  name?: string;
  /** Each value that the inferlet sends, in order, before the result. If it throws, the run ends with that error. */
  onMessage?: (value: unknown) => void;
  onLog?: (level: string, text: string) => void;
  signal?: AbortSignal;
}

/** A promise of what the inferlet's `main` returns, and the way to its `receive`. */
export interface Run extends Promise<unknown> {
  /**
   * A JSON value for the inferlet's `receive`, in order, as soon as the run is asked for. False when the run is over and nobody hears
   * it. Raises PieError for what is not JSON. An inferlet that lets more than 1,024 values wait ends with BudgetExceeded.
   */
  send(value: unknown): boolean;
}

/** A loaded model on a device of this page. Nothing is shared between two of them but the cached files. */
export class Pie {
  /** Resolves with the error that ended the engine (a lost device, a crashed worker, `dispose`); never rejects. */
  readonly failed: Promise<PieError>;
  readonly #engine: EngineClient;
  readonly #runs: Runs;
  #disposed: Promise<void> | null = null;

  private constructor(engine: EngineClient, base: string, stepSeconds: number | undefined) {
    this.#engine = engine;
    this.#runs = new Runs(engine, base, stepSeconds);
    this.failed = engine.failed;
  }

  /** Start the engine and load the model. Raises LoadError and its kinds; Cancelled as soon as `signal` says so. */
  static async load({ model, device = "auto", base, kvPoolBytes, stepSeconds, onProgress, signal }: LoadOptions = {}): Promise<Pie> {
    if (!["auto", "webgpu", "cpu"].includes(device)) throw new LoadError(`there is no device "${String(device)}": auto, webgpu or cpu`);
    if (stepSeconds !== undefined && !(stepSeconds > 0)) throw new LoadError(`stepSeconds is ${String(stepSeconds)}; it must be above 0`);
    const folder = base === undefined ? absolute(".", import.meta.url) : absolute(base.replace(/\/?$/, "/"), document.baseURI);
    const manifest = model === undefined ? absolute(OWN_MODEL, folder) : absolute(model, document.baseURI);
    return new Pie(await EngineClient.boot({ base: folder, model: manifest, device, kvPoolBytes, onProgress, signal }), folder, stepSeconds);
  }

  /** What really runs, and why. */
  info(): PieInfo {
    return this.#engine.info;
  }

  /** Counters of the engine. Rejects when it has ended. */
  async stats(): Promise<EngineStats> {
    return (await this.#engine.ask("stats")) as EngineStats;
  }

  /** Load the language component ahead of the first run, which does it otherwise. */
  async prepare(): Promise<void> {
    this.#check();
    await this.#runs.prepare();
  }

  /**
   * Run an inferlet, as many at once as you like, and get what its `main` returns; meanwhile `send` feeds its `receive`.
   * Raises InferletError when the program fails, Cancelled by `signal` or `dispose`, PieError when the engine is gone.
   */
  run(source: string, options: RunOptions = {}): Run {
    const inbox = new Inbox();
    return Object.assign(this.#start(source, options, inbox), { send: (value: unknown) => inbox.send(json(value, "a value for the program")) });
  }

  async #start(source: string, options: RunOptions, inbox: Inbox): Promise<unknown> {
    try {
      return await this.#run(source, options, inbox);
    } finally {
      inbox.close();
    }
  }

  async #run(source: string, { input = {}, name = "inferlet.py", onMessage, onLog, signal }: RunOptions, inbox: Inbox): Promise<unknown> {
    this.#check();
    if (typeof source !== "string") throw new PieError("the program's source must be a text");
    const request = json(input, "the program's input");
    if (signal?.aborted) throw new Cancelled("the run was cancelled");
    const value = await this.#runs.run({
      source,
      name,
      input: request,
      message: (text) => onMessage?.(JSON.parse(text)),
      log: (level, text) => onLog?.(level, text),
      inbox,
      signal,
    });
    return JSON.parse(value);
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

function json(value: unknown, what: string): string {
  let text: string | undefined;
  try {
    text = JSON.stringify(value) as string | undefined;
  } catch (error) {
    throw new PieError(`${what} must be a JSON value: ${error instanceof Error ? error.message : String(error)}`, { cause: error });
  }
  if (text === undefined) throw new PieError(`${what} must be a JSON value`);
  return text;
}

function absolute(url: string, from: string): string {
  try {
    return new URL(url, from).href;
  } catch {
    throw new LoadError(`"${url}" is not a URL`);
  }
}
