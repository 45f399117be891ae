// Python in this worker: the self-hosted Pyodide with the wheels of the page's lock file. Nothing comes from another origin.

import type { PyodideAPI } from "pyodide";

import { LoadError, NetworkError, UNREACHABLE, UNREACHED } from "../errors.js";

type LoadPyodide = typeof import("pyodide").loadPyodide;

/** Boot Python and install every wheel. `base` ends with "/" and holds pyodide/ and wheels/. Throws NetworkError and LoadError. */
export async function bootPython(base: string): Promise<PyodideAPI> {
  const lock = await fetchText(`${base}wheels/pyodide-lock.json`);
  const { packages } = JSON.parse(lock) as { packages: Record<string, unknown> };
  const { loadPyodide } = await importPyodide(`${base}pyodide/pyodide.mjs`);
  const names = Object.keys(packages);
  const instantiating = watchInstantiate();
  let python: PyodideAPI;
  try {
    const loading = loadPyodide({
      indexURL: `${base}pyodide/`,
      lockFileContents: lock,
      packageBaseUrl: `${base}wheels/`,
      packages: names,
      stdout: (line) => console.log(line),
      stderr: (line) => console.warn(line),
    });
    python = await Promise.race([loading, instantiating.failed]);
  } catch (error) {
    const reason = error instanceof Error ? error.message : "see the console";
    throw new LoadError(`Python did not start in this browser: ${reason}`, { cause: error });
  } finally {
    instantiating.restore();
  }
  const missing = names.filter((name) => !(name in python.loadedPackages)); // Pyodide only writes of them to the console
  if (missing.length > 0) throw new NetworkError(`parts of the engine could not be fetched from ${base}wheels/: ${missing.join(", ")}; ${UNREACHED}`);
  return python;
}

/** Pyodide waits for ever for a module that cannot be fetched or compiled: hear of that ourselves. */
function watchInstantiate(): { failed: Promise<never>; restore(): void } {
  const original = WebAssembly.instantiateStreaming as typeof WebAssembly.instantiateStreaming | undefined;
  if (original === undefined) return { failed: new Promise(() => undefined), restore: () => undefined };
  let fail: (error: unknown) => void;
  const failed = new Promise<never>((_, reject) => (fail = reject));
  failed.catch(() => undefined);
  WebAssembly.instantiateStreaming = (source, imports) => {
    const instantiating = original.call(WebAssembly, source, imports);
    instantiating.catch(fail);
    return instantiating;
  };
  return {
    failed,
    restore: () => {
      WebAssembly.instantiateStreaming = original;
    },
  };
}

async function importPyodide(url: string): Promise<{ loadPyodide: LoadPyodide }> {
  try {
    return (await import(/* @vite-ignore */ url)) as { loadPyodide: LoadPyodide };
  } catch (error) {
    throw new NetworkError(`Python could not be fetched from ${url}: ${UNREACHED}`, { cause: error });
  }
}

async function fetchText(url: string): Promise<string> {
  let response: Response;
  try {
    response = await fetch(url);
  } catch (error) {
    throw new NetworkError(`${url} could not be fetched: ${UNREACHABLE}`, { cause: error });
  }
  if (!response.ok) throw new NetworkError(`${url} could not be fetched: status ${response.status}`);
  return response.text();
}

/** Bytes of Python's heap. Pyodide has no public word for it. */
export function heapBytes(python: PyodideAPI): number {
  return (python as unknown as { _module: { HEAPU8: Uint8Array } })._module.HEAPU8.byteLength;
}
