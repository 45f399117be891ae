// What a guest says in a step. Short steps say it in one message, so that the engine hears of an op and of the step's end at once;
// of a step that takes longer, every op leaves when it is said: a pass runs while its author's code goes on.

const SHORT_MS = 2; // from a step's first op to its end

export class Outbox {
  readonly #send: (messages: string | string[]) => void;
  readonly #now: () => number;
  #held: string[] = [];
  #first = 0; // when this step's first op was said
  #short = false; // as the last step was

  /** `now` is a clock in milliseconds. */
  constructor(send: (messages: string | string[]) => void, now = (): number => performance.now()) {
    this.#send = send;
    this.#now = now;
  }

  /** An op. */
  say(message: string): void {
    const now = this.#now();
    this.#first ||= now;
    if (now - this.#first > SHORT_MS) this.#short = false;
    this.#held.push(message);
    if (!this.#short) this.#flush();
  }

  /** The end of the step. */
  end(message: string): void {
    this.#short = this.#first === 0 || this.#now() - this.#first <= SHORT_MS;
    this.#first = 0;
    this.#held.push(message);
    this.#flush();
  }

  #flush(): void {
    const held = this.#held;
    this.#held = [];
    this.#send(held.length === 1 ? held[0]! : held);
  }
}
