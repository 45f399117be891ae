// The engine worker's entry: messages in, messages out.

import type { FromEngine, ToEngine } from "../messages.js";
import { EngineService } from "./service.js";

const worker = self as unknown as DedicatedWorkerGlobalScope; // the program's library files describe windows too
const service = new EngineService((message: FromEngine) => worker.postMessage(message));

worker.onmessage = ({ data }: MessageEvent<ToEngine>) => void service.receive(data);
