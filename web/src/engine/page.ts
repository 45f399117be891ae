// What TypeScript may call on the engine's Python.

import type { PyProxy } from "pyodide/ffi";

import type { Host } from "./host.js";
import type { RunPort } from "./link.js";

/** `pie_web.page.Page`: the loaded engine. */
export interface Page extends PyProxy {
  /** JSON text of {"device": DeviceFacts, "model": ModelFacts}. */
  facts(): string;
  /** The TextSpec. */
  text(): string;
  /** JSON text of EngineStats, without the heap. */
  stats(): string;
  run(run: number, port: RunPort, source: string, name: string, input: string): void;
  end(run: number, type: string, message: string): void;
  deliver(run: number, value: string): void;
  close(): Promise<void>;
}

/** The module `pie_web.boot`. */
export interface Boot extends PyProxy {
  /** Null when it failed; then `Host.fail` has said why. */
  load(host: Host): Promise<Page | null>;
}
