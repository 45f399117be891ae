// The inferlet worker's entry: connects InferletWorker to the worker's own message channel.

import type { ToInferlet } from "../messages.js";
import { InferletWorker } from "./serve.js";

const worker = new InferletWorker((message) => postMessage(message));
addEventListener("message", (event: MessageEvent<ToInferlet>) => void worker.receive(event.data));
