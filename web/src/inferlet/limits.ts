// What one inferlet may use in the page; the numbers of the server's sandbox and of pie_core.host.budget.

export interface Limits {
  /** Passes submitted and not settled. */
  readonly outstanding: number;
  /** Futures in flight. */
  readonly futures: number;
  /** Working sets, pipelines and channels alive. */
  readonly handles: number;
  readonly programs: number;
  /** u32 words of all channel rings. */
  readonly cellWords: number;
  /** Ops posted in one step, and their characters. */
  readonly stepOps: number;
  readonly stepChars: number;
  /** Characters sent to the caller in one step and in all. */
  readonly stepSent: number;
  readonly sent: number;
  /** Characters logged in all. */
  readonly logged: number;
  /** Longest answer of a step, and longest payload of a host call. */
  readonly text: number;
  /** Seconds of all steps together. */
  readonly totalSeconds: number;
}

export const LIMITS: Limits = {
  outstanding: 64,
  futures: 4096,
  handles: 4096,
  programs: 256,
  cellWords: 1 << 22,
  stepOps: 8192,
  stepChars: 32 << 20,
  stepSent: 8 << 20,
  sent: 256 << 20,
  logged: 1 << 20,
  text: 16 << 20,
  totalSeconds: 120,
};

/** Memory of one instance. */
export const MEMORY_BYTES = 256 << 20;
