// Stands in for engine/runtime.ts in benches: the same, and the worker's Python can be reached from outside as `python`.

import { bootPython as boot } from "../../web/src/engine/runtime.js";

export { heapBytes } from "../../web/src/engine/runtime.js";

export async function bootPython(...args: Parameters<typeof boot>): ReturnType<typeof boot> {
  const python = await boot(...args);
  (globalThis as unknown as { python: unknown }).python = python;
  return python;
}
