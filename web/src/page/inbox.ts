// What the page sends to one run: kept until the run has started, refused once it is over.

export class Inbox {
  #held: string[] = [];
  #deliver: ((value: string) => void) | null = null;
  #over = false;

  /** JSON text for the inferlet's `receive`; false when nobody will hear it. */
  send(value: string): boolean {
    if (this.#over) return false;
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

  /** The run is over. */
  close(): void {
    this.#over = true;
    this.#held = [];
    this.#deliver = null;
  }
}
