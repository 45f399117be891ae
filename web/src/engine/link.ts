// The engine's end of one inferlet's port. Python gets strings: no event and no array becomes a proxy.

import { portMessage, splitMessage } from "../messages.js";

/** What the inferlet worker said: an op with its payload, or one of answer and fault with its body (then `name` is ""). */
export type Receive = (kind: string, name: string, body: string) => void;

/** The same for a step that is one op and its answer. */
export type Stepped = (name: string, payload: string, answer: string) => void;

export class RunPort {
  #port: MessagePort | null;
  /** Whether the page may send the inferlet values. */
  readonly receives: boolean;

  constructor(port: MessagePort, receives = true) {
    this.#port = port;
    this.receives = receives;
  }

  /** Begin to receive; messages that came before wait in the port. */
  open(receive: Receive, stepped: Stepped): void {
    if (!this.#port) return;
    this.#port.onmessage = ({ data }: MessageEvent<unknown>) => {
      if (isStep(data)) {
        const [op, answer] = data;
        const end = op.indexOf('"', OP.length);
        stepped(op.slice(OP.length, end), op.slice(end + 2, -1), answer.slice(ANSWER.length, -1));
      } else if (typeof data === "string") hear(data, receive);
      else if (Array.isArray(data)) for (const message of data) if (typeof message === "string") hear(message, receive);
    };
    this.#port.onmessageerror = () => receive("fault", "", '{"type":"GuestFault","message":"a message could not be read"}');
  }

  /** Let the guest run a step, or tell its host ("limits"). */
  send(kind: "limits" | "start" | "resume" | "refused", body: string): void {
    this.#port?.postMessage(portMessage(kind, body));
  }

  close(): void {
    if (!this.#port) return;
    this.#port.onmessage = this.#port.onmessageerror = null;
    this.#port.close();
    this.#port = null;
  }
}

const OP = '["op","';
const ANSWER = '["answer",';

/** An op and its step's answer, in one message. */
function isStep(data: unknown): data is readonly [string, string] {
  if (!Array.isArray(data) || data.length !== 2) return false;
  const [op, answer] = data as [unknown, unknown];
  return typeof op === "string" && op.startsWith(OP) && typeof answer === "string" && answer.startsWith(ANSWER);
}

function hear(message: string, receive: Receive): void {
  if (message.startsWith(OP)) {
    const end = message.indexOf('"', OP.length);
    receive("op", message.slice(OP.length, end), message.slice(end + 2, -1));
  } else {
    const [kind, body] = splitMessage(message);
    receive(kind, "", body);
  }
}
