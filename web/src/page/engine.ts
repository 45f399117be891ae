// The main thread's end of the engine worker: boots it, routes what it says, and turns its death into errors. Computes nothing.

import { Cancelled, DeviceUnavailable, errorFrom, LoadError, PieError, UNREACHED, type ErrorData } from "../errors.js";
import type { DeviceChoice, FromEngine, PieInfo, Progress, TextSpec, ToEngine } from "../messages.js";

export interface BootOptions {
  base: string;
  model: string;
  device: DeviceChoice;
  kvPoolBytes?: number | undefined;
  onProgress?: ((progress: Progress) => void) | undefined;
  signal?: AbortSignal | undefined;
}

/** What a run is told; `done` and `failed` end it. */
export interface RunListener {
  message(value: string): void;
  log(level: string, text: string): void;
  /** One of the values delivered waits no longer. */
  received(): void;
  done(value: string): void;
  failed(error: PieError): void;
}

type StartRun = Extract<ToEngine, { kind: "run" }>;

interface Pending {
  resolve(value: unknown): void;
  reject(error: PieError): void;
}

const GRACE_MS = 1500; // for a worker to put its files down before it is terminated

export class EngineClient {
  /** Set once the engine is gone; nothing runs from then on. */
  failure: PieError | null = null;
  info!: PieInfo;
  text!: TextSpec;
  /** Resolves with `failure` once it is set. */
  readonly failed: Promise<PieError>;
  #tellFailed!: (error: PieError) => void;
  readonly #worker: Worker;
  readonly #runs = new Map<number, RunListener>();
  readonly #asked = new Map<number, Pending>();
  #ids = 0;
  #booting: ((message: FromEngine) => void) | null = null;
  #failBoot: ((error: PieError) => void) | null = null;

  private constructor(base: string) {
    this.failed = new Promise((resolve) => (this.#tellFailed = resolve));
    this.#worker = new Worker(new URL("engine.worker.js", base), { type: "module", name: "pie engine" });
    this.#worker.onmessage = ({ data }: MessageEvent<FromEngine>) => this.#take(data);
    this.#worker.onmessageerror = () => this.#fail(new PieError("the engine worker sent something that cannot be read"));
    this.#worker.onerror = (event) => {
      event.preventDefault();
      // A script that does not load gives an event without words.
      const what = event.message ? `failed: ${event.message}` : `could not be started, since a script did not load: ${UNREACHED}`;
      this.#fail(this.#failBoot ? new LoadError(`the engine worker ${what}`) : new PieError(`the engine worker ${what}`));
    };
  }

  /** A ready engine. Raises LoadError and its kinds; Cancelled as soon as `signal` says so. */
  static async boot({ base, model, device, kvPoolBytes, onProgress, signal }: BootOptions): Promise<EngineClient> {
    if (signal?.aborted) throw new Cancelled("the load was cancelled");
    const engine = new EngineClient(base);
    const stop = (): void => engine.#cancelBoot();
    signal?.addEventListener("abort", stop, { once: true });
    try {
      await new Promise<void>((resolve, reject) => {
        engine.#failBoot = reject;
        engine.#booting = (message) => {
          if (message.kind === "progress") onProgress?.(message.progress);
          if (message.kind === "failed") reject(errorFrom(message.error));
          if (message.kind !== "ready") return;
          engine.info = message.info;
          engine.text = message.text;
          resolve();
        };
        engine.#send({ kind: "boot", base, model, device, ...(kvPoolBytes === undefined ? {} : { kvPoolBytes }) });
      });
    } catch (error) {
      if (!(error instanceof Cancelled)) engine.terminate(); // a cancelled one is terminated by #cancelBoot
      throw error;
    } finally {
      signal?.removeEventListener("abort", stop);
      engine.#failBoot = null;
    }
    engine.#booting = null;
    return engine;
  }

  /** Start a run whose inferlet holds the other end of `port`. `receives`: whether `deliver` may be called. `listener` hears of it until it ends. */
  start(run: number, port: MessagePort, program: Omit<StartRun, "kind" | "run" | "port">, listener: RunListener): void {
    if (this.failure) return listener.failed(this.failure);
    this.#runs.set(run, listener);
    this.#send({ kind: "run", run, port, ...program }, [port]);
  }

  /** JSON text for the inferlet's `receive`. */
  deliver(run: number, value: string): void {
    if (this.#runs.has(run)) this.#send({ kind: "deliver", run, value });
  }

  /** End a run from outside: an InferletError of this type follows. */
  end(run: number, type: string, message: string): void {
    if (this.#runs.has(run)) this.#send({ kind: "end", run, type, message });
  }

  /** End a run whose outcome nobody waits for any more. */
  abandon(run: number, message: string): void {
    this.end(run, "Cancelled", message);
    this.#runs.delete(run);
  }

  ask(kind: "info" | "stats" | "dispose"): Promise<unknown> {
    if (this.failure) return Promise.reject(this.failure);
    const id = ++this.#ids;
    return new Promise((resolve, reject) => {
      this.#asked.set(id, { resolve, reject });
      this.#send({ kind, id });
    });
  }

  /** Free the device, then end the worker: at the latest after a grace, since a step may keep it from answering. */
  async close(): Promise<void> {
    if (!this.failure) await Promise.race([this.ask("dispose").catch(() => undefined), new Promise((resolve) => setTimeout(resolve, GRACE_MS))]);
    this.terminate();
  }

  terminate(): void {
    this.#worker.onmessage = this.#worker.onerror = this.#worker.onmessageerror = null;
    this.#worker.terminate();
    this.#fail(new Cancelled("the engine was disposed"));
  }

  #send(message: ToEngine, transfer: Transferable[] = []): void {
    this.#worker.postMessage(message, transfer);
  }

  /** Tell the caller at once; the worker gets a moment to put down the part of the model that it has. */
  #cancelBoot(): void {
    const late = setTimeout(() => this.terminate(), GRACE_MS);
    this.#booting = (message) => {
      if (message.kind === "progress") return;
      clearTimeout(late);
      this.terminate();
    };
    this.#send({ kind: "cancelLoad" });
    this.#failBoot?.(new Cancelled("the load was cancelled"));
  }

  #take(message: FromEngine): void {
    switch (message.kind) {
      case "progress":
      case "ready":
      case "failed":
        return this.#booting?.(message);
      case "lost":
        return this.#fail(this.#lost(message.error));
      case "received":
        return this.#runs.get(message.run)?.received();
      case "message":
        return this.#runs.get(message.run)?.message(message.value);
      case "log":
        return this.#runs.get(message.run)?.log(message.level, message.text);
      case "result":
        return this.#finished(message.run)?.done(message.value);
      case "error":
        return this.#finished(message.run)?.failed(errorFrom(message.error));
      case "reply":
        return this.#answered(message.id, message.value, message.error);
    }
  }

  /** What ended the engine; during the load it is a LoadError. */
  #lost(error: ErrorData): PieError {
    if (this.#failBoot === null) return errorFrom(error);
    return error.name === "DeviceLost" ? new DeviceUnavailable(error.message) : new LoadError(error.message);
  }

  #finished(run: number): RunListener | undefined {
    const listener = this.#runs.get(run);
    this.#runs.delete(run);
    return listener;
  }

  #answered(id: number, value: unknown, error: ErrorData | undefined): void {
    const pending = this.#asked.get(id);
    this.#asked.delete(id);
    if (error) pending?.reject(errorFrom(error));
    else pending?.resolve(value);
  }

  /** Everything that waits ends with `error`. The first failure stands. */
  #fail(error: PieError): void {
    if (this.failure) return;
    this.failure = error;
    this.#tellFailed(error);
    this.#failBoot?.(error);
    for (const run of [...this.#runs.keys()]) this.#finished(run)?.failed(error);
    for (const pending of this.#asked.values()) pending.reject(error);
    this.#asked.clear();
  }
}
