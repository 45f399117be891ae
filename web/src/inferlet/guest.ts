// The Python language component: its core modules compiled once for all workers, and instances of it.

import { LoadError, NetworkError, UNREACHABLE } from "../errors.js";
import { limitMemory } from "./memory.js";
import { importsOf, WasiDenied } from "./wasi.js";

/** The exports of pie:abi/guest. */
export interface Guest {
  start(request: string): string;
  resume(events: string): string;
}

export type HostCall = (op: string, payload: string) => string;
export type Modules = Readonly<Record<string, WebAssembly.Module>>;

/** What jco writes with `-I async`, as far as it is used here. */
export interface Transpiled {
  instantiate(
    getCoreModule: (name: string) => WebAssembly.Module | Promise<WebAssembly.Module>,
    imports: Readonly<Record<string, unknown>>,
  ): Promise<{ guest: Guest }>;
}

/** A fault that ended an instance, as the engine hears of it. */
export interface Fault {
  readonly type: string;
  readonly message: string;
}

/**
 * Compiles core modules on demand, each once. `base` is the folder of the component's files. The module that owns the memory
 * (jco names it `X.core.wasm`) gets the limit; the others compile while they stream, which also lets browsers cache their code.
 */
export class ModuleStore {
  readonly #base: string;
  readonly #memoryBytes: number;
  readonly #compiling = new Map<string, Promise<WebAssembly.Module>>();

  constructor(base: string, memoryBytes: number, compiled: Modules = {}) {
    this.#base = base;
    this.#memoryBytes = memoryBytes;
    for (const [name, module] of Object.entries(compiled)) this.#compiling.set(name, Promise.resolve(module));
  }

  get(name: string): Promise<WebAssembly.Module> {
    let module = this.#compiling.get(name);
    if (module === undefined) {
      module = this.#compile(name);
      module.catch(() => undefined); // the component awaits one after the other; the first that fails is reported
      this.#compiling.set(name, module);
    }
    return module;
  }

  /** Everything that was asked for, to be handed to other workers. */
  async all(): Promise<Modules> {
    return Object.fromEntries(await Promise.all([...this.#compiling].map(async ([name, module]) => [name, await module] as const)));
  }

  async #compile(name: string): Promise<WebAssembly.Module> {
    const response = await fetch(new URL(name, this.#base)).catch((error: unknown) => {
      throw new NetworkError(`${name} of the language component could not be fetched: ${UNREACHABLE}`, { cause: error });
    });
    if (!response.ok) throw new NetworkError(`${name} of the language component could not be fetched: ${response.status} ${response.statusText}`);
    if (name.endsWith(".core.wasm")) {
      const bytes = limitMemory(new Uint8Array(await response.arrayBuffer()), this.#memoryBytes);
      return WebAssembly.compile(bytes as BufferSource);
    }
    const module = await WebAssembly.compileStreaming(response);
    if (WebAssembly.Module.exports(module).some((item) => item.kind === "memory")) {
      throw new LoadError(`${name} of the language component has a memory of its own, which nothing limits`);
    }
    return module;
  }
}

/** A fresh instance whose host calls go to `call`, its memory touched once ahead of time. */
export async function openGuest(component: Transpiled, modules: Pick<ModuleStore, "get">, call: HostCall): Promise<Guest> {
  const { guest } = await component.instantiate((name) => modules.get(name), importsOf({ "pie:abi/host": { call } }));
  guest.resume("");
  return guest;
}

/** The runtime frees an object that is none any more: what CPython makes of a text whose growth in place (s += s) was refused. */
const FREES_NOTHING = /^(?:\w*Error: [^\n]*\n)?\s*(?:at )?\S*\b_Py_Dealloc\b/;

/** Why a step of a guest threw, in the server's types and words (server/sandbox.py). */
export function faultOf(error: unknown, memoryBytes: number): Fault {
  if (error instanceof WasiDenied) return { type: "GuestTrap", message: error.message };
  const { message, stack } = error instanceof Error ? { message: error.message, stack: error.stack ?? "" } : { message: String(error), stack: "" };
  if (/call stack|too much recursion/i.test(message)) {
    const causes = "deep data in json, repr or a comparison, or deep calls through C";
    return { type: "StackLimitExceeded", message: `the inferlet nested too deeply and exhausted its stack: ${causes}` };
  }
  const beyond = `most likely beyond its ${memoryBytes >> 20} MiB of memory`;
  if (/fatal_error|Py_FatalError|PyErr_Display|PyErr_Print/.test(stack)) {
    return { type: "MemoryLimitExceeded", message: `the inferlet's Python runtime failed outside the program, ${beyond}` };
  }
  if (/null/.test(message) && FREES_NOTHING.test(stack)) {
    return { type: "MemoryLimitExceeded", message: `the inferlet's Python runtime failed while an object grew, ${beyond}` };
  }
  return { type: "GuestTrap", message: `the inferlet crashed: ${message}` };
}
