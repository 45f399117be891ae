// Replays a recorded list of dispatches into a command encoder, without a call from Python for each of them.

const STEP = 5; // numbers a dispatch: pipeline, bind group, workgroups in x, y and z

/** A plan: `steps` holds indices into `pipelines` and `groups`, and grids. */
export class Replay {
  readonly #pipelines: readonly GPUComputePipeline[];
  readonly #groups: readonly GPUBindGroup[];
  readonly #steps: Int32Array;

  constructor(pipelines: readonly GPUComputePipeline[], groups: readonly GPUBindGroup[], steps: Int32Array) {
    if (steps.length === 0 || steps.length % STEP !== 0) throw new RangeError(`a plan of ${steps.length} numbers is no list of dispatches`);
    this.#pipelines = pipelines;
    this.#groups = groups;
    this.#steps = steps;
  }

  /** Record every dispatch, in order, as one compute pass. */
  run(encoder: GPUCommandEncoder): void {
    const steps = this.#steps;
    const pass = encoder.beginComputePass();
    let last = -1;
    for (let at = 0; at < steps.length; at += STEP) {
      const pipeline = steps[at]!;
      if (pipeline !== last) pass.setPipeline(this.#pipelines[pipeline]!);
      last = pipeline;
      pass.setBindGroup(0, this.#groups[steps[at + 1]!]!);
      pass.dispatchWorkgroups(steps[at + 2]!, steps[at + 3]!, steps[at + 4]!);
    }
    pass.end();
  }
}
