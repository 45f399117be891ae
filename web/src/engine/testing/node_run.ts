// `node node_run.mjs '{"engine": NodeEngineOptions, "jobs": [[GreedyJob, …], …], "scenarios": true}'`: each list of jobs runs at once;
// prints one line of JSON: tokens, times, and how the scenarios ended.
// `pools`: sizes of the KV pool to open another engine with, on the same Python; what each of them fails with.
// `probe`: Python that defines `async def probe(page) -> str`, run on the live engine; it gives JSON text.

import { LoadError } from "../../errors.js";
import { onFatal } from "../fatal.js";
import { type NodeEngineOptions, NodeEngine } from "./node_engine.js";
import type { GreedyJob } from "./greedy_guest.js";
import { play, SCENARIOS } from "./scenarios.js";

interface Task {
  readonly engine: NodeEngineOptions;
  readonly jobs: readonly (readonly GreedyJob[])[];
  readonly scenarios?: boolean;
  readonly probe?: string;
  readonly pools?: readonly number[];
}

const task = JSON.parse(process.argv[2] ?? "") as Task;
const began = performance.now();
const engine = await NodeEngine.open(task.engine);
const readyMs = performance.now() - began;
const rounds = [];
for (const jobs of task.jobs) {
  const before = JSON.parse(engine.page.stats()) as { engine: { steps: number }; deviceMs: number };
  const start = performance.now();
  const tokens = await Promise.all(jobs.map((job) => engine.greedy(job)));
  const wallMs = performance.now() - start;
  const after = JSON.parse(engine.page.stats()) as typeof before;
  rounds.push({ tokens, wallMs, steps: after.engine.steps - before.engine.steps, deviceMs: after.deviceMs - before.deviceMs });
}
const scenarios: Record<string, unknown> = {};
for (const [name, scenario] of Object.entries(task.scenarios ? SCENARIOS : {})) scenarios[name] = await play(engine, scenario);
let probed: unknown = null;
if (task.probe !== undefined) {
  engine.python.runPython(task.probe);
  const probe = engine.python.globals.get("probe") as (page: unknown) => Promise<string>;
  probed = JSON.parse(await probe(engine.page));
}
const stats: unknown = JSON.parse(engine.page.stats());
const facts: unknown = JSON.parse(engine.page.facts());
const left = engine.run(new MessageChannel().port1); // ended by the close
await engine.page.close();
await engine.page.close();
const pools = [];
for (const kvPoolBytes of task.pools ?? []) {
  const failed: unknown = await NodeEngine.open({ ...task.engine, kvPoolBytes }, engine.python).then(() => null, (error: unknown) => error);
  pools.push(failed instanceof LoadError ? failed.toData() : String(failed));
}
const fatal: string[] = [];
onFatal(engine.python, (words) => fatal.push(words));
const { error } = console;
console.error = () => undefined; // Pyodide writes of it, too
try {
  (engine.python as unknown as { _api: { fatal_error(error: Error): void } })._api.fatal_error(new RangeError("Maximum call stack size exceeded"));
} catch {
  // it throws what it was given
}
console.error = error;
console.log(JSON.stringify({ fatal, readyMs, rounds, scenarios, probed, stats, facts, left: await left, pools }));
process.exit(0);
