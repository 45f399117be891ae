// The engine's end of one inferlet's port. Python gets strings: no event and no array becomes a proxy.

import { portMessage, splitMessage } from "../messages.js";

/** What the inferlet worker said: an op with its payload, or one of answer and fault with its body (then `name` is ""). */
export type Receive = (kind: string, name: string, body: string) => void;

export class RunPort {
  #port: MessagePort | null;

  constructor(port: MessagePort) {
    this.#port = port;
  }

  /** Begin to receive; messages that came before wait in the port. */
  open(receive: Receive): void {
    if (!this.#port) return;
    this.#port.onmessage = ({ data }: MessageEvent<unknown>) => {
      if (typeof data === "string") hear(data, receive);
      else if (Array.isArray(data)) for (const message of data) if (typeof message === "string") hear(message, receive);
    };
    this.#port.onmessageerror = () => receive("fault", "", '{"type":"GuestFault","message":"a message could not be read"}');
  }

  /** Let the guest run a step. */
  send(kind: "start" | "resume", body: string): void {
    this.#port?.postMessage(portMessage(kind, body));
  }

  close(): void {
    if (!this.#port) return;
    this.#port.onmessage = this.#port.onmessageerror = null;
    this.#port.close();
    this.#port = null;
  }
}

function hear(message: string, receive: Receive): void {
  if (message.startsWith('["op","')) {
    const end = message.indexOf('"', 7);
    receive("op", message.slice(7, end), message.slice(end + 2, -1));
  } else {
    const [kind, body] = splitMessage(message);
    receive(kind, "", body);
  }
}
