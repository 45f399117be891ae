// What the page sends to one run: kept until the run has started, refused once it is over or lets too much wait.

import { PieError, UsageError } from "../errors.js";

/** Values that may wait to be received, as pie_core/host/budget.py has it. */
export const MOST_WAITING = 1024;

export class Inbox {
  #held: string[] = [];
  #deliver: ((value: string) => void) | null = null;
  #waiting = 0; // sent, and not received by the inferlet
  #refused = false;
  #over = false;

  /** JSON text for the inferlet's `receive`; false when nobody will hear it. Raises PieError where too many wait, and UsageError after `refuse`. */
  send(value: string): boolean {
    if (this.#refused) throw new UsageError("run.send: the run was started with receives: false; leave that out");
    if (this.#over) return false;
    if (this.#waiting >= MOST_WAITING) {
      const most = MOST_WAITING.toLocaleString("en");
      throw new PieError(`run.send: ${most} values wait to be received, which is the cap; send more once the program has received some`);
    }
    this.#waiting++;
    if (this.#deliver === null) this.#held.push(value);
    else this.#deliver(value);
    return true;
  }

  /** The run has started: what was kept comes first. */
  open(deliver: (value: string) => void): void {
    if (this.#over) return;
    this.#deliver = deliver;
    for (const value of this.#held.splice(0)) deliver(value);
  }

  /** The inferlet has received one. */
  received(): void {
    this.#waiting--;
  }

  /** Nothing may be sent: the inferlet was told so. */
  refuse(): void {
    this.#refused = true;
  }

  /** The run is over. */
  close(): void {
    this.#over = true;
    this.#held = [];
    this.#deliver = null;
  }
}
