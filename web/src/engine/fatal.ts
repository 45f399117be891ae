// Hears when the worker's Python has failed for good: from then on nothing that waits for it ever hears of anything.

import type { PyodideAPI } from "pyodide";

/** The part of Pyodide that has no public word. */
interface Api {
  on_fatal?: (error: unknown) => void;
}

/** Call `tell` with a sentence once it has. */
export function onFatal(python: PyodideAPI, tell: (words: string) => void): void {
  const { _api } = python as unknown as { _api: Api };
  _api.on_fatal = (error) => tell(`the engine's Python failed and cannot go on (${error instanceof Error ? error.message : String(error)})`);
}
