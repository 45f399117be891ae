// The cpu device's WebAssembly SIMD module in this worker: linear memory and synchronous calls (pie_web/cpu_adapter.py).

import { DeviceUnavailable, NetworkError, UNREACHABLE } from "../errors.js";

const PAGE_BYTES = 1 << 16;

type Export = (...args: readonly number[]) => number;

/** Fetch and compile the module. Throws NetworkError, and DeviceUnavailable where the browser cannot run it. */
export async function compileKernels(url: string): Promise<WebAssembly.Module> {
  let response: Response;
  try {
    response = await fetch(url);
  } catch (error) {
    throw new NetworkError(`the cpu kernels could not be fetched from ${url}: ${UNREACHABLE}`, { cause: error });
  }
  if (!response.ok) throw new NetworkError(`the cpu kernels could not be fetched from ${url}: status ${response.status}`);
  try {
    return await WebAssembly.compile(await response.arrayBuffer());
  } catch (error) {
    throw new DeviceUnavailable("this browser cannot run the cpu kernels; they need WebAssembly with SIMD", { cause: error });
  }
}

/** A running module. Everything happens at the call. */
export class CpuKernels {
  readonly heapBase: number;
  /** Milliseconds spent inside `call`. */
  busyMs = 0;
  readonly #memory: WebAssembly.Memory;
  readonly #exports: Readonly<Record<string, WebAssembly.ExportValue>>;
  #bytes: Uint8Array<ArrayBuffer>;

  constructor(module: WebAssembly.Module) {
    this.#exports = new WebAssembly.Instance(module).exports;
    this.#memory = this.#exports["memory"] as WebAssembly.Memory;
    this.#bytes = this.#look();
    this.heapBase = this.call("heap_base");
  }

  /** Bytes of linear memory. */
  get size(): number {
    return this.#bytes.length;
  }

  /** Run an export on u32 arguments. Throws what the engine throws for a trap. */
  call(name: string, ...args: readonly number[]): number {
    const run = this.#exports[name] as Export;
    const started = performance.now();
    try {
      return run(...args) >>> 0;
    } finally {
      this.busyMs += performance.now() - started;
    }
  }

  /** Have at least `end` bytes; false when the browser refuses. */
  grow(end: number): boolean {
    const missing = end - this.#bytes.length;
    if (missing > 0) {
      try {
        this.#memory.grow(Math.ceil(missing / PAGE_BYTES));
      } catch {
        return false;
      }
      this.#bytes = this.#look();
    }
    return true;
  }

  write(address: number, data: Uint8Array): void {
    this.#bytes.set(data, address);
  }

  /** A view that is valid until memory grows. Throws RangeError outside memory. */
  window(address: number, size: number): Uint8Array<ArrayBuffer> {
    if (address + size > this.#bytes.length) {
      throw new RangeError(`${size} bytes at ${address} leave the module's memory of ${this.#bytes.length} bytes`);
    }
    return this.#bytes.subarray(address, address + size);
  }

  #look(): Uint8Array<ArrayBuffer> {
    return new Uint8Array(this.#memory.buffer as ArrayBuffer);
  }
}
