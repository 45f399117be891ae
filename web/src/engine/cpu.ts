// The cpu device's WebAssembly SIMD module in this worker: linear memory and synchronous calls (pie_web/cpu_adapter.py).

import { DeviceUnavailable, NetworkError, UNREACHABLE } from "../errors.js";

const PAGE_BYTES = 1 << 16;

type Export = (...args: readonly number[]) => number;

/** Python's memory, from Pyodide's own module; the view is another one each time that memory has grown. */
export interface PythonHeap {
  readonly HEAPU8: Uint8Array;
}

/** What a list of work says; numbers follow. READ and WRITE: address, bytes, address in Python's memory. CALL: export, number of arguments, these. */
const CALL = 0;
const WRITE = 1;
const READ = 2;

/** Bytes that the module does not have; a RangeError is also what an exhausted stack throws. */
export class OutsideMemory extends RangeError {
  override readonly name = "OutsideMemory";
}

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
  readonly #names: readonly string[];
  #bytes: Uint8Array<ArrayBuffer>;
  #heap: PythonHeap | null = null;
  #at = 0;

  constructor(module: WebAssembly.Module) {
    this.#exports = new WebAssembly.Instance(module).exports;
    this.#memory = this.#exports["memory"] as WebAssembly.Memory;
    this.#names = Object.keys(this.#exports);
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

  /** The number by which lists of work know an export; -1 where there is none. */
  indexOf(name: string): number {
    return this.#names.indexOf(name);
  }

  /** The export that `work` called last. */
  get lastExport(): string {
    return this.#names[this.#at] ?? "";
  }

  /** Where `work` finds lists and bytes. */
  useHeap(heap: PythonHeap): void {
    this.#heap = heap;
  }

  /**
   * Work through a list of `count` u32 at `list` in Python's memory, in order: one call from Python for a whole step. Ends early with
   * the first result that is not 0. Throws what the engine throws for a trap, and OutsideMemory.
   */
  work(list: number, count: number): number {
    const bytes = this.#heap!.HEAPU8;
    const words = new Uint32Array(bytes.buffer, list, count);
    let at = 0;
    while (at < count) {
      const kind = words[at]!;
      const first = words[at + 1]!;
      const second = words[at + 2]!;
      if (kind === CALL) {
        at += 3 + second;
        this.#at = first;
        const code = this.call(this.#names[first]!, ...words.subarray(at - second, at));
        if (code !== 0) return code;
      } else {
        const there = words[at + 3]!;
        if (kind === WRITE) this.window(first, second).set(bytes.subarray(there, there + second));
        else if (kind === READ) bytes.set(this.window(first, second), there);
        at += 4;
      }
    }
    return 0;
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

  /** A view that is valid until memory grows. Throws OutsideMemory. */
  window(address: number, size: number): Uint8Array<ArrayBuffer> {
    if (address + size > this.#bytes.length) {
      throw new OutsideMemory(`${size} bytes at ${address} leave the module's memory of ${this.#bytes.length} bytes`);
    }
    return this.#bytes.subarray(address, address + size);
  }

  #look(): Uint8Array<ArrayBuffer> {
    return new Uint8Array(this.#memory.buffer as ArrayBuffer);
  }
}
