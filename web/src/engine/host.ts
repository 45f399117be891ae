// What the engine's Python may call: the model's bytes, devices, a timer, and the way to the main thread.

import { errorFrom, type InferletErrorFields, InferletError, LoadError, type PieError } from "../errors.js";
import type { DeviceChoice, FromEngine } from "../messages.js";
import { Meter } from "../model/progress.js";
import type { ByteSource } from "../model/source.js";
import { CpuKernels } from "./cpu.js";
import { Replay } from "./replay.js";
import { Ticker } from "./ticker.js";

export interface HostOptions {
  readonly device: DeviceChoice;
  readonly kvPoolBytes: number;
  readonly modelName: string;
  readonly source: ByteSource;
  /** `navigator.gpu`, null where there is none. */
  readonly gpu: GPU | null;
  /** The cpu device's module, compiled; called when the cpu is chosen. Throws LoadError. */
  readonly kernels: () => Promise<WebAssembly.Module>;
  readonly post: (message: FromEngine) => void;
}

/** Held by Python for as long as the engine lives. Numbers and text cross as they are, objects as proxies. */
export class Host {
  readonly device: DeviceChoice;
  readonly kvPoolBytes: number;
  readonly modelName: string;
  readonly source: ByteSource;
  readonly gpu: GPU | null;
  readonly ticker = new Ticker();
  /** Why the load failed, once it has. */
  failure: PieError | null = null;
  readonly #kernels: () => Promise<WebAssembly.Module>;
  readonly #post: (message: FromEngine) => void;
  #meter: { stage: string; done: number; meter: Meter } | null = null;

  constructor({ device, kvPoolBytes, modelName, source, gpu, kernels, post }: HostOptions) {
    this.#kernels = kernels;
    this.device = device;
    this.kvPoolBytes = kvPoolBytes;
    this.modelName = modelName;
    this.source = source;
    this.gpu = gpu;
    this.#post = post;
  }

  /** A fresh instance of the cpu module; null when there is none, and `failure` says why. */
  async openCpu(): Promise<CpuKernels | null> {
    try {
      return new CpuKernels(await this.#kernels());
    } catch (error) {
      this.failure = error instanceof LoadError ? error : new LoadError(`the cpu kernels did not start: ${String(error)}`);
      return null;
    }
  }

  makeReplay(pipelines: readonly GPUComputePipeline[], groups: readonly GPUBindGroup[], steps: Int32Array): Replay {
    return new Replay(pipelines, groups, steps);
  }

  /** A stage of the load; bytes where they are counted, else 0 of 0. */
  progress(stage: string, done: number, total: number): void {
    if (total === 0) {
      this.#meter = null;
      this.#post({ kind: "progress", progress: { stage, done: 0, total: 0, rate: null, eta: null } });
      return;
    }
    if (this.#meter?.stage !== stage) {
      this.#meter = { stage, done: 0, meter: new Meter(stage, total, (progress) => this.#post({ kind: "progress", progress })) };
    }
    const at = this.#meter;
    at.meter.add(done - at.done);
    at.done = done;
    if (done >= total) at.meter.finish();
  }

  /** Why the load failed: a class of errors.ts and a sentence. */
  fail(name: string, message: string): void {
    this.failure ??= errorFrom({ name, message });
  }

  /** What an inferlet sent, as JSON text. */
  message(run: number, value: string): void {
    this.#post({ kind: "message", run, value });
  }

  /** A value for the inferlet's `receive` waits no longer. */
  received(run: number): void {
    this.#post({ kind: "received", run });
  }

  log(run: number, level: string, text: string): void {
    this.#post({ kind: "log", run, level, text });
  }

  result(run: number, value: string): void {
    this.#post({ kind: "result", run, value });
  }

  /** A run ended without a result. `fields`: JSON text of InferletErrorFields. */
  error(run: number, message: string, fields: string): void {
    const error = new InferletError(message, JSON.parse(fields) as InferletErrorFields);
    this.#post({ kind: "error", run, error: error.toData() });
  }

  /** The device is gone, and every run with it. */
  lost(message: string): void {
    this.#post({ kind: "lost", error: { name: "DeviceLost", message } });
  }
}
