// The engine in Node: npm's Pyodide over the repository's own Python files, the cpu device, and a model in memory.

import { readFile } from "node:fs/promises";
import { loadPyodide, type PyodideAPI } from "pyodide";

import type { DeviceChoice, FromEngine } from "../../messages.js";
import { MemorySource } from "../../model/source.js";
import { Host } from "../host.js";
import { RunPort } from "../link.js";
import type { Boot, Page } from "../page.js";
import { type GreedyJob, serveGreedy } from "./greedy_guest.js";

export interface NodeEngineOptions {
  /** Folders with Python packages: the repository, web/python, and one with jinja2 and a pure markupsafe. */
  readonly folders: readonly string[];
  readonly model: string;
  readonly kernels: string;
  readonly device?: DeviceChoice;
  readonly gpu?: GPU | null;
  readonly kvPoolBytes?: number;
}

export class NodeEngine {
  readonly python: PyodideAPI;
  readonly page: Page;
  readonly messages: FromEngine[] = [];
  #next = 0;
  readonly #waiting = new Map<number, (message: FromEngine) => void>();

  private constructor(python: PyodideAPI, page: Page) {
    this.python = python;
    this.page = page;
  }

  /** A loaded engine; on a Python of another engine, where one is given. */
  static async open(options: NodeEngineOptions, python?: PyodideAPI): Promise<NodeEngine> {
    python ??= await bootPython(options.folders);
    let engine: NodeEngine | undefined;
    const early: FromEngine[] = [];
    const host = new Host({
      device: options.device ?? "cpu",
      kvPoolBytes: options.kvPoolBytes ?? 16 << 20,
      modelName: "tiny",
      source: new MemorySource(new Uint8Array(await readFile(options.model))),
      gpu: options.gpu ?? null,
      post: (message) => (engine ? engine.#receive(message) : early.push(message)),
      kernels: async () => WebAssembly.compile(await readFile(options.kernels)),
    });
    const page = await (python.pyimport("pie_web.boot") as Boot).load(host);
    if (!page) throw host.failure ?? new Error("the engine did not start");
    engine = new NodeEngine(python, page);
    engine.messages.push(...early);
    return engine;
  }

  /** Run the greedy guest to its tokens. */
  async greedy(job: GreedyJob): Promise<number[]> {
    const { port1, port2 } = new MessageChannel();
    serveGreedy(port2, job);
    const last = await this.run(port1);
    port2.close();
    if (last.kind !== "result") throw new Error(JSON.stringify(last));
    return JSON.parse(last.value) as number[];
  }

  /** Start a run over `port`; its result or error. `receives`: whether the test may send it values. */
  run(port: MessagePort, input = "{}", receives = true): Promise<FromEngine> {
    const run = ++this.#next;
    const ended = new Promise<FromEngine>((resolve) => this.#waiting.set(run, resolve));
    this.page.run(run, new RunPort(port, receives), "", "test", input);
    return ended;
  }

  /** The number of the run that was started last. */
  get lastRun(): number {
    return this.#next;
  }

  #receive(message: FromEngine): void {
    this.messages.push(message);
    if (message.kind === "result" || message.kind === "error") this.#waiting.get(message.run)?.(message);
  }
}


async function bootPython(folders: readonly string[]): Promise<PyodideAPI> {
  const python = await loadPyodide();
  folders.forEach((root, index) => {
    const at = `/python${index}`;
    python.FS.mkdirTree(at);
    python.FS.mount(python.FS.filesystems.NODEFS, { root }, at);
  });
  python.runPython(`import sys; sys.path[:0] = [${folders.map((_, index) => `"/python${index}"`).join(", ")}]`);
  return python;
}
