// Turns, timers and long work of Python's event loop (pie_web/turns.py): one task a turn, one browser timer a timer, no proxy for either.

const LONGEST_MS = 2 ** 31 - 1; // a browser's longest timer

export class Ticker {
  readonly #channel = new MessageChannel();
  readonly #work = new MessageChannel(); // browsers let the shortest timer wait for a millisecond, a message for none
  readonly #timers = new Map<number, ReturnType<typeof setTimeout>>();
  #fired: (number: number) => void = () => undefined;

  /** `turn` runs what is ready, `work` what was announced by `alone`; `fired` hears of timers by their numbers. */
  open(turn: () => void, fired: (number: number) => void, work: () => void): void {
    this.#fired = fired;
    this.#channel.port1.onmessage = () => turn();
    this.#work.port1.onmessage = () => work();
  }

  /** Ask for a turn. */
  soon(): void {
    this.#channel.port2.postMessage(0);
  }

  /** Ask for a task that may take long: behind the messages that wait already. */
  alone(): void {
    this.#work.port2.postMessage(0);
  }

  /** Timer `number` fires in `ms` milliseconds. Messages that wait are served before one of 0. */
  after(number: number, ms: number): void {
    this.#timers.set(
      number,
      setTimeout(() => {
        this.#timers.delete(number);
        this.#fired(number);
      }, Math.min(ms, LONGEST_MS)),
    );
  }

  cancel(number: number): void {
    clearTimeout(this.#timers.get(number));
    this.#timers.delete(number);
  }

  /** No more turns, no more timers. */
  close(): void {
    for (const timer of this.#timers.values()) clearTimeout(timer);
    this.#timers.clear();
    this.#channel.port1.close();
    this.#work.port1.close();
  }
}
