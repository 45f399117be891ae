// `node greedy_run.mjs '{"engine": NodeEngineOptions, "jobs": [[GreedyJob, …], …]}'`: each list of jobs runs at once; prints tokens and times.

import { type NodeEngineOptions, NodeEngine } from "./node_engine.js";
import type { GreedyJob } from "./greedy_guest.js";

interface Task {
  readonly engine: NodeEngineOptions;
  readonly jobs: readonly (readonly GreedyJob[])[];
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
const stats: unknown = JSON.parse(engine.page.stats());
const facts: unknown = JSON.parse(engine.page.facts());
await engine.page.close();
console.log(JSON.stringify({ readyMs, rounds, stats, facts }));
process.exit(0);
