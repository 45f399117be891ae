// What an inferlet worker does with the main thread's messages; `worker.ts` and the tests connect it to a realm.

import { errorData, NetworkError, UNREACHED } from "../errors.js";
import type { FromInferlet, ToInferlet } from "../messages.js";
import { type Guest, ModuleStore, openGuest, type Transpiled } from "./guest.js";
import { MEMORY_BYTES } from "./limits.js";
import { type Port, Session } from "./session.js";
import { textService, type TextTables, textTables } from "./text.js";

type Init = Extract<ToInferlet, { kind: "init" }>;
type Attach = Extract<ToInferlet, { kind: "attach" }>;

interface Booted {
  readonly component: Transpiled;
  readonly modules: ModuleStore;
  readonly text: TextTables;
}

export class InferletWorker {
  readonly #post: (message: FromInferlet) => void;
  #booted: Promise<Booted> | null = null;
  #instance: Promise<Guest> | null = null; // serves the next run
  #session: Session | null = null;

  constructor(post: (message: FromInferlet) => void) {
    this.#post = post;
  }

  /** Never rejects: what goes wrong is posted. */
  async receive(message: ToInferlet): Promise<void> {
    try {
      if (message.kind === "ping") this.#pong(message);
      else if (message.kind === "init") await this.#init(message);
      else await this.#attach(message);
    } catch (error) {
      this.#post({ kind: "failed", error: errorData(error, "LoadError") });
    }
  }

  #pong({ n, share }: Extract<ToInferlet, { kind: "ping" }>): void {
    if (this.#session !== null) this.#session.share = share;
    this.#post({ kind: "pong", n });
  }

  async #init(message: Init): Promise<void> {
    this.#booted = boot(message);
    this.#instance = this.#open(this.#booted);
    const [{ modules, text }] = await Promise.all([this.#booted, this.#instance]);
    this.#post(message.shared === undefined ? { kind: "ready", shared: { modules: await modules.all(), text } } : { kind: "ready" });
  }

  async #open(booted: Promise<Booted>): Promise<Guest> {
    const { component, modules } = await booted;
    return openGuest(component, modules, (op, payload) => this.#session?.host.call(op, payload) ?? "");
  }

  async #attach({ run, port, last }: Attach): Promise<void> {
    if (this.#booted === null || this.#instance === null) throw new Error("attach came before init, or during a run");
    const [{ text }, guest] = await Promise.all([this.#booted, this.#instance]);
    this.#instance = null;
    this.#session = new Session(port as unknown as Port, guest, textService(text), (clean) => this.#ended(run, clean, last));
  }

  #ended(run: number, clean: boolean, last: boolean): void {
    this.#session = null;
    this.#post({ kind: "ended", run, clean });
    if (clean && !last && this.#booted !== null) void this.#refresh(this.#booted);
  }

  /** A fresh instance for the next run: the memory of this one is seen by nobody again. */
  async #refresh(booted: Promise<Booted>): Promise<void> {
    try {
      this.#instance = this.#open(booted);
      await this.#instance;
      this.#post({ kind: "ready" });
    } catch (error) {
      this.#post({ kind: "failed", error: errorData(error, "LoadError") });
    }
  }
}

async function boot({ base, text, shared }: Init): Promise<Booted> {
  const folder = new URL("component/", base).href;
  const loading = loadComponent(`${folder}component.js`);
  const modules = new ModuleStore(folder, MEMORY_BYTES, shared?.modules);
  return { component: await loading, modules, text: shared?.text ?? textTables(text) };
}

async function loadComponent(url: string): Promise<Transpiled> {
  try {
    return (await import(/* @vite-ignore */ url)) as Transpiled;
  } catch (error) {
    throw new NetworkError(`the language component could not be fetched from ${url}: ${UNREACHED}`, { cause: error });
  }
}
