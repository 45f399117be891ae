// The page of tests/web/test_inferlet_worker.py: real inferlet workers, and an engine of a script at the other end of their ports.

import { InferletPool, type PoolOptions, type WorkerLike } from "../../web/src/inferlet/pool.js";

interface Ended {
  answer?: { s: string; r?: unknown; e?: unknown };
  fault?: { type: string; message: string };
  dead?: { type: string; message: string };
  cancelled?: boolean;
  ops: Record<string, number>;
  sent: unknown[];
  firstMs: number; // until the first answer
  ms: number;
}
interface Job {
  source: string;
  input?: unknown;
  cancelAfter?: number;
}

const MODEL = { name: "scripted", vocab: 49152, hidden: 8, context: 64, eos: [2] };
let pool: InferletPool | null = null;
let openedWith = ""; // the arguments, where the pool became ready
let made = 0;
let ready = 0; // instances that workers have made
let runs = 0;

/** A fresh pool. `text` is a TextSpec's URL. Resolves when a worker is ready. */
async function open(text: string, options: Partial<PoolOptions>): Promise<void> {
  pool?.dispose();
  openedWith = "";
  made = ready = 0;
  const base = new URL("/web/", location.href).href;
  const makeWorker = (folder: string): WorkerLike => {
    made++;
    const worker = new Worker(new URL("inferlet.worker.js", folder), { type: "module" });
    worker.addEventListener("message", ({ data }: MessageEvent<{ kind: string }>) => {
      if (data.kind === "ready") ready++;
    });
    return worker;
  };
  pool = new InferletPool({ base, text: await (await fetch(text)).text(), makeWorker, ...options });
  await pool.ready();
  openedWith = JSON.stringify([text, options]);
}

/** The pool that is there, used as it may be, where it was opened with the same arguments; else a fresh one. */
async function share(text: string, options: Partial<PoolOptions>): Promise<void> {
  if (openedWith !== JSON.stringify([text, options])) await open(text, options);
}

function run({ source, input = {}, cancelAfter }: Job): Promise<Ended> {
  const { port1, port2 } = new MessageChannel();
  const began = performance.now();
  const ended: Ended = { ops: {}, sent: [], firstMs: 0, ms: 0 };
  return new Promise((resolve) => {
    let events: [number, boolean, unknown][] = [];
    let awaited: number[] | null = null;
    let letters = 0;
    const finish = (how: Partial<Ended>): void => {
      setTimeout(() => lease.release(), how.answer === undefined ? 0 : 2000); // as the page: one that ended well says so itself
      resolve({ ...ended, ...how, ms: performance.now() - began });
    };
    const settle = (...settled: [number, boolean, unknown][]): void => {
      events.push(...settled);
      const ids = awaited;
      if (ids === null || !events.some(([id]) => ids.includes(id))) return;
      awaited = null;
      port1.postMessage(`["resume",${JSON.stringify(events)}]`);
      events = [];
    };
    const carryOut = (name: string, fields: Record<string, unknown>): void => {
      ended.ops[name] = (ended.ops[name] ?? 0) + 1;
      const future = fields["f"] as number;
      if (name === "submit") settle(...(fields["outs"] as number[]).map((id) => [id, true, 65 + (letters++ % 26)] as [number, boolean, unknown]));
      else if (name === "sleep") setTimeout(() => settle([future, true, null]), fields["ms"] as number);
      else if (name === "ws.length") settle([future, true, 7]);
      else if (name === "send") ended.sent.push(fields["value"]);
    };
    port1.onmessage = ({ data }: MessageEvent<string | string[]>) => [data].flat().forEach(hear);
    const hear = (text: string): void => {
      const [kind, ...rest] = JSON.parse(text) as [string, ...unknown[]];
      if (kind === "op") carryOut(rest[0] as string, rest[1] as Record<string, unknown>);
      else if (kind === "fault") finish({ fault: rest[0] as Ended["fault"] & object });
      else {
        ended.firstMs ||= performance.now() - began;
        const answer = rest[0] as { s: string; w?: number[] };
        if (answer.s !== "pending") finish({ answer });
        else {
          awaited = answer.w ?? [];
          settle();
        }
      }
    };
    if (pool === null) throw new Error("open comes first");
    const lease = pool.attach(++runs, port2, (type, message) => finish({ dead: { type, message } }));
    if (cancelAfter !== undefined) setTimeout(() => finish({ cancelled: true }), cancelAfter);
    port1.postMessage(`["start",${JSON.stringify({ source, name: "program.py", input, model: MODEL, chat: { prefix: [] } })}]`);
  });
}

Object.assign(globalThis, { open, share, run, workersMade: () => made, instancesMade: () => ready, disposePool: () => pool?.dispose(), opened: true });
