// Words for what the page shows: progress, the device, errors.

import { InferletError, type PieError } from "../errors.js";
import type { DeviceFacts, Progress } from "../messages.js";

const STAGES: Readonly<Record<string, string>> = {
  runtime: "Starting the Python runtime",
  waiting: "Waiting for another tab that downloads the model",
  download: "Downloading the model",
  verify: "Checking the part that is already here",
  device: "Opening the device",
  selftest: "Testing the device's kernels",
  weights: "Loading the model into the device",
  component: "Loading Python for programs",
};

const BRIEF_WAIT_S = 3; // the worker of a page that was just reloaded lets its file go within so long

/** `waited`: seconds for which this stage goes on. */
export function stageText({ stage, retrying }: Pick<Progress, "stage" | "retrying">, waited = 0): string {
  if (stage === "waiting" && waited < BRIEF_WAIT_S) return "Opening the model's file";
  const text = STAGES[stage] ?? `Loading: ${stage}`;
  return retrying === undefined ? text : `${text}: waiting for the server`;
}

/** "45.2 of 98.4 MB, 23.1 MB/s, 3 s left", or "45.2 of 98.4 MB, next try in 4 s"; what is not counted is left out. */
export function amountText({ done, total, rate, eta, retrying }: Progress): string {
  const parts = total > 0 ? [`${(done / 1e6).toFixed(1)} of ${(total / 1e6).toFixed(1)} MB`] : [];
  if (retrying !== undefined) {
    parts.push(retrying.in > 0 ? `next try in ${durationText(retrying.in)}` : "trying again");
    return parts.join(", ");
  }
  if (total <= 0) return "";
  if (rate !== null && rate > 0) parts.push(`${(rate / 1e6).toFixed(1)} MB/s`);
  if (eta !== null && eta > 0) parts.push(`${durationText(eta)} left`);
  return parts.join(", ");
}

export function durationText(seconds: number): string {
  if (seconds < 90) return `${Math.max(1, Math.ceil(seconds))} s`;
  if (seconds < 5400) return `${Math.ceil(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** "CPU: WebAssembly SIMD. There is no WebGPU adapter." */
export function deviceText({ kind, name, description, software, why }: DeviceFacts): string {
  const what = [name, description].filter((part, index, all) => part !== "" && all.indexOf(part) === index && part !== kind).join(", ");
  const where = kind === "webgpu" ? (software ? "WebGPU in software" : "WebGPU") : "CPU";
  return `${where}${what ? `: ${what}` : ""}. ${sentence(why)}`;
}

/** What to know about a result that is shown; null: nothing. JavaScript's whole numbers end at 2^53, an inferlet's do not. */
export function resultNote(value: unknown): string | null {
  return holdsLarge(value) ? `Numbers beyond ${Number.MAX_SAFE_INTEGER} may be rounded here: return them as texts to see every digit.` : null;
}

function holdsLarge(value: unknown): boolean {
  if (typeof value === "number") return Math.abs(value) > Number.MAX_SAFE_INTEGER;
  return typeof value === "object" && value !== null && Object.values(value).some(holdsLarge);
}

export interface ErrorText {
  title: string;
  message: string;
  line: number | null;
  traceback: string;
}

/** An error of the API in words. A program's own error is titled by its type, the others by what could not be done. */
export function errorText(error: PieError | Error): ErrorText {
  if (error instanceof InferletError) {
    // The message of an InferletError may repeat type and place, which are shown on their own.
    return { title: error.type, message: error.message, line: error.line, traceback: error.traceback };
  }
  return { title: TITLES[error.name] ?? error.name, message: sentence(error.message), line: null, traceback: "" };
}

const TITLES: Readonly<Record<string, string>> = {
  LoadError: "Loading failed",
  NetworkError: "The network failed",
  IntegrityError: "The model's file is not the right one",
  StorageError: "The browser's storage failed",
  DeviceUnavailable: "The device is not available",
  DeviceLost: "The device was lost",
  SelfTestFailed: "The device computes wrong numbers",
  UsageError: "This cannot be run",
  PieError: "The engine failed",
};

function sentence(text: string): string {
  if (text === "") return "";
  const start = /^[a-z]+[ ,]/.test(text) ? text[0]!.toUpperCase() + text.slice(1) : text; // not a URL
  return /[.!?]$/.test(start) ? start : `${start}.`;
}
