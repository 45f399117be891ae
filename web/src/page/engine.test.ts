// The main thread's end of the engine worker: what ends the engine ends everything that waits for it, each by an error of its kind.

import assert from "node:assert/strict";
import { test } from "node:test";
import type { PieError } from "../errors.js";
import type { FromEngine, PieInfo, ToEngine } from "../messages.js";
import { EngineClient } from "./engine.js";

/** A worker of a script. */
class ScriptedWorker {
  static last: ScriptedWorker;
  onmessage: ((event: { data: FromEngine }) => void) | null = null;
  readonly got: ToEngine[] = [];

  constructor() {
    ScriptedWorker.last = this;
  }

  postMessage(message: ToEngine): void {
    this.got.push(message);
  }

  terminate(): void {
    this.onmessage = null;
  }

  say(data: FromEngine): void {
    this.onmessage?.({ data });
  }
}
Object.assign(globalThis, { Worker: ScriptedWorker });

const boot = (): Promise<EngineClient> => EngineClient.boot({ base: "http://127.0.0.1/web/", model: "http://127.0.0.1/m", device: "auto" });
const READY: FromEngine = { kind: "ready", info: {} as PieInfo, text: "" };

for (const [name, during] of [
  ["DeviceLost", "DeviceUnavailable"],
  ["PieError", "LoadError"],
] as const) {
  test(`${name}: during the load it is a ${during}, later it ends all runs and questions`, async () => {
    const lost: FromEngine = { kind: "lost", error: { name, message: "it is gone; load again" } };
    const loading = assert.rejects(boot(), { name: during, message: "it is gone; load again" });
    ScriptedWorker.last.say(lost);
    await loading;

    const booting = boot();
    ScriptedWorker.last.say(READY);
    const engine = await booting;
    const ended: PieError[] = [];
    const [nothing, failed] = [(): void => undefined, (error: PieError): void => void ended.push(error)];
    const listener = { message: nothing, log: nothing, received: nothing, done: nothing, failed };
    const program = { source: "", name: "a.py", input: "{}", receives: true };
    engine.start(1, {} as MessagePort, program, listener);
    const asked = assert.rejects(engine.ask("stats"), { name });
    ScriptedWorker.last.say(lost);
    await asked;
    assert.equal(await engine.failed, ended[0]);
    engine.start(2, {} as MessagePort, program, listener);
    assert.deepEqual(ended.map((error) => error.name), [name, name], "what comes later fails with it at once");
  });
}

test("what a run is told reaches it until it ends", async () => {
  const booting = boot();
  ScriptedWorker.last.say(READY);
  const engine = await booting;
  const told: unknown[] = [];
  const tell = (...what: unknown[]): void => void told.push(...what);
  engine.start(7, {} as MessagePort, { source: "s", name: "a.py", input: "{}", receives: false }, {
    message: tell, log: tell, received: () => tell("received"), done: tell, failed: tell,
  });
  assert.equal((ScriptedWorker.last.got.at(-1) as { receives: boolean }).receives, false);
  for (const message of [
    { kind: "message", run: 7, value: "1" },
    { kind: "received", run: 7 },
    { kind: "log", run: 7, level: "info", text: "x" },
    { kind: "message", run: 8, value: "of another" },
    { kind: "result", run: 7, value: "2" },
    { kind: "message", run: 7, value: "late" },
    { kind: "received", run: 7 },
  ] as FromEngine[]) {
    ScriptedWorker.last.say(message);
  }
  assert.deepEqual(told, ["1", "received", "info", "x", "2"]);
});
