// How far a transfer is: bytes, a smoothed rate, and the seconds that are left.

import type { Progress } from "../messages.js";

const REPORT_MS = 100;
const SMOOTHING_MS = 3000; // the time over which the rate forgets

/** Counts the bytes of one stage and reports them at most every 100 ms. */
export class Meter {
  #done = 0;
  #rate: number | null = null;
  #sampled: { at: number; done: number };
  #reported = -Infinity;
  readonly #stage: string;
  readonly #total: number;
  readonly #report: (progress: Progress) => void;
  readonly #now: () => number;

  constructor(stage: string, total: number, report: (progress: Progress) => void, now: () => number = () => performance.now()) {
    this.#stage = stage;
    this.#total = total;
    this.#report = report;
    this.#now = now;
    this.#sampled = { at: now(), done: 0 };
  }

  /** Bytes there from the start (the part of a download that is resumed) and bytes taken back: they say nothing about the rate. */
  jump(done: number): void {
    this.#done = done;
    this.#sampled = { at: this.#now(), done };
    this.#tell(this.#now());
  }

  add(bytes: number): void {
    this.#done += bytes;
    const now = this.#now();
    if (now - this.#reported >= REPORT_MS) this.#tell(now);
  }

  /** Report the end of the stage. */
  finish(): void {
    this.#tell(this.#now());
  }

  #tell(now: number): void {
    const span = now - this.#sampled.at;
    if (span >= REPORT_MS) {
      const rate = ((this.#done - this.#sampled.done) / span) * 1000;
      const keep = Math.exp(-span / SMOOTHING_MS);
      this.#rate = this.#rate === null ? rate : keep * this.#rate + (1 - keep) * rate;
      this.#sampled = { at: now, done: this.#done };
    }
    this.#reported = now;
    const left = this.#total - this.#done;
    const eta = left <= 0 ? 0 : this.#rate ? left / this.#rate : null;
    this.#report({ stage: this.#stage, done: this.#done, total: this.#total, rate: this.#rate, eta });
  }
}
