// For tests: a real HTTP server on the loopback that serves one file with ranges, and can be told to misbehave.

import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";

export interface FileServer {
  readonly url: string;
  /** What is served, and under which validator. */
  content: Uint8Array;
  etag: string;
  /** Whether it answers ranges; else it sends the whole file. */
  ranged: boolean;
  /** One entry a request: its Range header ("" without one). */
  readonly ranges: string[];
  /** Consumed one a request: break the connection after so many bytes, answer with a status, or send the head and then nothing. */
  readonly faults: (number | { status: number } | "silent" | null)[];
  close(): Promise<void>;
}

export async function serveFile(content: Uint8Array, etag = '"v1"'): Promise<FileServer> {
  const server = createServer((request, response) => answer(state, request, response));
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const state: FileServer = {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}/model.gguf`,
    content,
    etag,
    ranged: true,
    ranges: [],
    faults: [],
    close: () => {
      server.closeAllConnections();
      return new Promise((resolve) => server.close(() => resolve()));
    },
  };
  return state;
}

function answer(state: FileServer, request: IncomingMessage, response: ServerResponse): void {
  const range = request.headers.range ?? "";
  const fault = state.faults.shift() ?? null;
  state.ranges.push(range);
  if (fault !== null && typeof fault === "object") {
    response.writeHead(fault.status).end();
    return;
  }
  const size = state.content.length;
  const validator = request.headers["if-range"];
  const partial = state.ranged && range !== "" && (validator === undefined || validator === state.etag);
  const start = partial ? Number(/^bytes=(\d+)-$/.exec(range)?.[1]) : 0;
  const headers: Record<string, string> = { etag: state.etag, "content-length": String(size - start) };
  if (partial) headers["content-range"] = `bytes ${start}-${size - 1}/${size}`;
  response.writeHead(partial ? 206 : 200, headers);
  const body = state.content.subarray(start);
  if (fault === "silent") {
    response.flushHeaders();
  } else if (fault === null) {
    response.end(body);
  } else {
    response.write(body.subarray(0, fault), () => setTimeout(() => response.destroy(), 20));
  }
}
