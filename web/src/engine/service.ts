// The engine worker's service: boots Python, opens the model, and serves the main thread.

import type { PyodideAPI } from "pyodide";

import { version } from "../../package.json";
import { Cancelled, errorData, InferletError, LoadError } from "../errors.js";
import type { EngineStats, FromEngine, PieInfo, ToEngine } from "../messages.js";
import { openModel } from "../model/index.js";
import type { ByteSource } from "../model/source.js";
import { compileKernels } from "./cpu.js";
import { onFatal } from "./fatal.js";
import { Host } from "./host.js";
import { RunPort } from "./link.js";
import type { Boot, Page } from "./page.js";
import { bootPython, heapBytes } from "./runtime.js";

const KV_POOL_BYTES = 256 << 20; // 5,800 tokens of SmolLM2

type BootMessage = Extract<ToEngine, { kind: "boot" }>;
type RunMessage = Extract<ToEngine, { kind: "run" }>;

/** One engine. A message that comes before the boot has ended waits for it; order is kept. */
export class EngineService {
  readonly #post: (message: FromEngine) => void;
  readonly #abort = new AbortController();
  #python: PyodideAPI | null = null;
  #booted: Promise<Page | null> | null = null;

  constructor(post: (message: FromEngine) => void) {
    this.#post = post;
  }

  async receive(message: ToEngine): Promise<void> {
    if (message.kind === "boot") {
      this.#booted ??= this.#boot(message);
      return;
    }
    if (message.kind === "cancelLoad") {
      this.#abort.abort();
      return;
    }
    if (message.kind === "dispose") this.#abort.abort();
    const page = await this.#booted;
    if (message.kind === "run") this.#run(page ?? null, message);
    else if (message.kind === "end") page?.end(message.run, message.type, message.message);
    else if (message.kind === "deliver") page?.deliver(message.run, message.value);
    else await this.#reply(message.id, page ?? null, message.kind);
  }

  #run(page: Page | null, { run, port, source, name, input, receives }: RunMessage): void {
    try {
      if (!page) throw new InferletError("the engine is not running", { type: "EngineStopped" });
      page.run(run, new RunPort(port, receives), source, name, input);
    } catch (error) {
      port.close();
      const known = error instanceof InferletError ? error : new InferletError(`the run did not start: ${String(error)}`, { type: "HostError" });
      this.#post({ kind: "error", run, error: known.toData() });
    }
  }

  async #reply(id: number, page: Page | null, what: "info" | "stats" | "dispose"): Promise<void> {
    try {
      if (what === "dispose") {
        await page?.close();
        this.#booted = Promise.resolve(null);
        this.#post({ kind: "reply", id });
      } else if (page) {
        this.#post({ kind: "reply", id, value: what === "info" ? this.#info(page) : this.#stats(page) });
      } else {
        throw new LoadError("the engine is not running");
      }
    } catch (error) {
      this.#post({ kind: "reply", id, error: errorData(error) });
    }
  }

  #info(page: Page): PieInfo {
    return { ...(JSON.parse(page.facts()) as Omit<PieInfo, "version">), version };
  }

  #stats(page: Page): EngineStats {
    return { ...(JSON.parse(page.stats()) as Omit<EngineStats, "heapBytes">), heapBytes: this.#python ? heapBytes(this.#python) : 0 };
  }

  async #boot(message: BootMessage): Promise<Page | null> {
    try {
      const page = await this.#load(message);
      this.#post({ kind: "ready", info: this.#info(page), text: page.text() });
      return page;
    } catch (error) {
      this.#post({ kind: "failed", error: errorData(error, "LoadError") });
      return null;
    }
  }

  /** Python and the model come side by side. Throws LoadError and Cancelled. */
  async #load({ base, model, device, kvPoolBytes = KV_POOL_BYTES }: BootMessage): Promise<Page> {
    const { signal } = this.#abort;
    const runtime = (): void =>
      this.#post({ kind: "progress", progress: { stage: "runtime", done: 0, total: 0, rate: null, eta: null } });
    runtime();
    const opening = openModel(model, { signal, onProgress: (progress) => this.#post({ kind: "progress", progress }) });
    let source: ByteSource | null = null;
    try {
      const booting = bootPython(base).then((python) => {
        onFatal(python, (words) => this.#post({ kind: "lost", error: { name: "PieError", message: `${words}; load again` } }));
        return (this.#python = python);
      });
      const waiting = opening.then((opened) => {
        if (!this.#python) runtime(); // the model is there, Python is what is waited for
        return opened;
      });
      const [python, opened] = await Promise.all([booting, waiting]);
      source = opened.source;
      stopIf(signal);
      const gpu = (navigator as Partial<Navigator>).gpu ?? null;
      const kernels = (): Promise<WebAssembly.Module> => compileKernels(`${base}kernels.wasm`);
      const host = new Host({ device, kvPoolBytes, modelName: opened.manifest.name, source, gpu, kernels, post: this.#post });
      const page = await (python.pyimport("pie_web.boot") as Boot).load(host);
      if (!page) throw host.failure ?? new LoadError("the engine did not start");
      if (signal.aborted) await page.close();
      stopIf(signal);
      return page;
    } catch (error) {
      this.#abort.abort(); // what of the load still goes on
      void opening.then((opened) => opened.source.close(), () => undefined);
      throw error;
    } finally {
      source?.close(); // the weights are on the device; the file is free for other tabs
    }
  }
}

function stopIf(signal: AbortSignal): void {
  if (signal.aborted) throw new Cancelled("the load was cancelled");
}
