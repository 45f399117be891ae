// A worker of the tests: the page's own Python, device shim and replayer, driven by Python that the test sends. Python
// starts with the first job and serves the later ones, too.

import { compileKernels } from "../../web/src/engine/cpu.js";
import { Host } from "../../web/src/engine/host.js";
import { bootPython } from "../../web/src/engine/runtime.js";
import type { DeviceChoice } from "../../web/src/messages.js";

interface Job {
  readonly base: string;
  readonly device: DeviceChoice;
  /** Python that defines `async def run(host, *inputs) -> str`. */
  readonly source: string;
  readonly inputs: readonly string[];
}

type Run = (host: Host, ...inputs: readonly string[]) => Promise<string>;

let starting: Promise<Run> | null = null;
const worker = self as unknown as DedicatedWorkerGlobalScope;

worker.onmessage = ({ data }: MessageEvent<Job>) => void answer(data);

async function answer({ base, device, source, inputs }: Job): Promise<void> {
  try {
    const run = await (starting ??= start(base, source));
    const gpu = (navigator as Partial<Navigator>).gpu ?? null;
    const empty = { size: 0, read: () => new Uint8Array(0), close: () => undefined };
    const kernels = (): Promise<WebAssembly.Module> => compileKernels(`${base}kernels.wasm`);
    const host = new Host({ device, kvPoolBytes: 1 << 20, modelName: "none", source: empty, gpu, kernels, post: () => undefined });
    worker.postMessage({ answer: await run(host, ...inputs) });
  } catch (error) {
    worker.postMessage({ error: error instanceof Error ? `${error.name}: ${error.message}` : String(error) });
  }
}

async function start(base: string, source: string): Promise<Run> {
  const python = await bootPython(base);
  const globals = python.toPy({ __name__: "test" });
  python.runPython(source, { globals });
  return globals.get("run") as Run;
}
