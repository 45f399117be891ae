// In a page: boots engine workers and runs the greedy guest against them, without inferlet workers; for tests and benches of the engine alone.

import type { DeviceChoice, EngineStats, FromEngine, PieInfo, Progress, ToEngine } from "../../messages.js";
import { type GreedyJob, serveGreedy } from "./greedy_guest.js";

type Listener = (message: FromEngine) => boolean;

export class BenchEngine {
  readonly worker: Worker;
  readonly progress: Progress[] = [];
  readonly said: FromEngine[] = [];
  #listeners: Listener[] = [];
  #ids = 0;

  constructor(url: string) {
    this.worker = new Worker(url, { type: "module" });
    this.worker.onmessage = ({ data }: MessageEvent<FromEngine>) => {
      if (data.kind === "progress") this.progress.push(data.progress);
      else this.said.push(data);
      this.#listeners = this.#listeners.filter((listener) => !listener(data));
    };
  }

  send(message: ToEngine, transfer: Transferable[] = []): void {
    this.worker.postMessage(message, transfer);
  }

  /** The first message that `wanted` accepts. */
  next(wanted: (message: FromEngine) => boolean): Promise<FromEngine> {
    return new Promise((resolve) => {
      this.#listeners.push((message) => {
        if (!wanted(message)) return false;
        resolve(message);
        return true;
      });
    });
  }

  async boot(base: string, model: string, device: DeviceChoice, kvPoolBytes = 64 << 20): Promise<{ ms: number; info: PieInfo }> {
    const began = performance.now();
    const end = this.next(({ kind }) => kind === "ready" || kind === "failed");
    this.send({ kind: "boot", base, model, device, kvPoolBytes });
    const message = await end;
    if (message.kind !== "ready") throw new Error(JSON.stringify(message));
    return { ms: performance.now() - began, info: message.info };
  }

  async stats(): Promise<EngineStats> {
    const id = ++this.#ids;
    const reply = this.next((message) => message.kind === "reply" && message.id === id);
    this.send({ kind: "stats", id });
    const message = await reply;
    if (message.kind !== "reply" || message.error) throw new Error(JSON.stringify(message));
    return message.value as EngineStats;
  }

  async greedy(job: GreedyJob): Promise<number[]> {
    const { port1, port2 } = new MessageChannel();
    serveGreedy(port2, job);
    const run = ++this.#ids;
    const end = this.next((message) => (message.kind === "result" || message.kind === "error") && message.run === run);
    this.send({ kind: "run", run, port: port1, source: "", name: "bench", input: "{}" }, [port1]);
    const message = await end;
    port2.close();
    if (message.kind !== "result") throw new Error(JSON.stringify(message));
    return JSON.parse(message.value) as number[];
  }

  /** Run all jobs at once; tokens, and where the time went. */
  async round(jobs: readonly GreedyJob[]): Promise<{ tokens: number[][]; wallMs: number; steps: number; deviceMs: number }> {
    const before = await this.stats();
    const began = performance.now();
    const tokens = await Promise.all(jobs.map((job) => this.greedy(job)));
    const wallMs = performance.now() - began;
    const after = await this.stats();
    const steps = (after.engine["steps"] ?? 0) - (before.engine["steps"] ?? 0);
    return { tokens, wallMs, steps, deviceMs: after.deviceMs - before.deviceMs };
  }
}

Object.assign(globalThis, { BenchEngine });
