// How far a transfer is: bytes, a smoothed rate, and the seconds that are left; or that nothing comes, and when the next try is.

import type { Progress } from "../messages.js";

const REPORT_MS = 100;
const SMOOTHING_MS = 3000; // the time over which the rate forgets
const QUIET_MS = 2000; // without a byte for so long, nobody knows the rate

/** Counts the bytes of one stage and reports them at most every 100 ms. */
export class Meter {
  #done = 0;
  #rate: number | null = null;
  #sampled: { at: number; done: number };
  #moved: number; // when a byte came last
  #quiet = false;
  #next: { attempt: number; at: number } | null = null; // the try that is waited for, or under way
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
    this.#moved = now();
  }

  /** Bytes there from the start (the part of a download that is resumed) and bytes taken back: they say nothing about the rate. */
  jump(done: number): void {
    this.#done = done;
    this.#goOn(this.#now());
    this.#tell(this.#now());
  }

  add(bytes: number): void {
    this.#done += bytes;
    const now = this.#now();
    if (bytes > 0) {
      if (this.#quiet) this.#goOn(now);
      this.#moved = now;
    }
    if (now - this.#reported >= REPORT_MS) this.#tell(now);
  }

  /** Another try begins `in` so many seconds. */
  retry({ attempt, in: seconds }: { attempt: number; in: number }): void {
    const now = this.#now();
    this.#next = { attempt, at: now + seconds * 1000 };
    this.#fallQuiet();
    this.#tell(now);
  }

  /** To be called now and then while bytes are waited for: reports what their absence means. */
  look(): void {
    const now = this.#now();
    if (this.#next === null && (this.#quiet || now - this.#moved < QUIET_MS)) return;
    this.#fallQuiet();
    this.#tell(now);
  }

  /** Report the end of the stage. */
  finish(): void {
    this.#tell(this.#now());
  }

  #fallQuiet(): void {
    this.#quiet = true;
    this.#rate = null;
  }

  /** The time until now says nothing about the rate. */
  #goOn(now: number): void {
    this.#sampled = { at: now, done: this.#done };
    this.#moved = now;
    this.#quiet = false;
    this.#next = null;
  }

  #tell(now: number): void {
    const span = now - this.#sampled.at;
    if (span >= REPORT_MS && !this.#quiet) {
      const rate = ((this.#done - this.#sampled.done) / span) * 1000;
      const keep = Math.exp(-span / SMOOTHING_MS);
      this.#rate = this.#rate === null ? rate : keep * this.#rate + (1 - keep) * rate;
      this.#sampled = { at: now, done: this.#done };
    }
    this.#reported = now;
    const left = this.#total - this.#done;
    const eta = left <= 0 ? 0 : this.#rate ? left / this.#rate : null;
    const next = this.#next;
    const retrying = next === null ? {} : { retrying: { attempt: next.attempt, in: Math.max(0, Math.ceil((next.at - now) / 1000)) } };
    this.#report({ stage: this.#stage, done: this.#done, total: this.#total, rate: this.#rate, eta, ...retrying });
  }
}
