// The page's elements, and how states are shown in them.

import type { PieInfo, Progress } from "../messages.js";
import { amountText, deviceText, stageText, type ErrorText } from "./words.js";

export type LoadState = "loading" | "ready" | "failed" | "stopped";
export type RunState = "idle" | "running" | "stopping";

const OUTPUT_CHARS = 200_000; // what the page keeps of an inferlet's output

function element<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`hello.html has no element #${id}`);
  return found as T;
}

export class View {
  readonly form = element<HTMLFormElement>("form");
  readonly source = element<HTMLTextAreaElement>("source");
  readonly input = element<HTMLTextAreaElement>("input");
  readonly run = element<HTMLButtonElement>("run");
  readonly stop = element<HTMLButtonElement>("stop");
  readonly load = element<HTMLButtonElement>("load");
  readonly choice = element<HTMLSelectElement>("choice");
  readonly restore = element<HTMLButtonElement>("restore");
  readonly #status = document.querySelector<HTMLElement>(".status")!;
  readonly #facts = document.querySelector<HTMLElement>(".facts")!;
  readonly #stage = element("stage");
  readonly #amount = element("amount");
  readonly #bar = element<HTMLProgressElement>("bar");
  readonly #output = element("output");
  readonly #result = element("result");
  readonly #runState = element("run-state");
  readonly #error = element("error");
  readonly #inputError = element("input-error");
  readonly #line = element<HTMLButtonElement>("error-line");
  #counted: Progress | null = null;
  #unwritten = "";

  constructor() {
    this.#whenEmpty("nothing yet");
    this.#line.addEventListener("click", () => this.#showLine(Number(this.#line.dataset["line"])));
  }

  /** `text` says what became of the load. */
  loading(state: LoadState, text: string): void {
    this.#status.dataset["state"] = state;
    this.#counted = null;
    setText(this.#stage, text);
    setText(this.#amount, "");
    this.#bar.removeAttribute("value");
    this.#facts.hidden = true;
    this.load.hidden = state === "ready";
    this.load.textContent = state === "loading" ? "Cancel" : state === "stopped" ? "Load the model" : "Try again";
  }

  /** Parts of a load go on side by side: one that counts bytes is shown before one that does not. */
  progress(progress: Progress): void {
    const counts = progress.total > 0;
    if (!counts && this.#counted !== null) return;
    this.#counted = counts && progress.done < progress.total ? progress : null;
    setText(this.#stage, stageText(progress)); // a live region: told only when the words change
    setText(this.#amount, amountText(progress));
    if (counts) this.#bar.value = progress.done / progress.total;
    else this.#bar.removeAttribute("value");
  }

  ready({ model, device }: PieInfo): void {
    this.loading("ready", "Ready");
    setText(element("model"), `${model.name}, ${model.context.toLocaleString("en")} tokens of context`);
    setText(element("device"), deviceText(device));
    this.#facts.hidden = false;
  }

  /** Which buttons work: `idle` needs a model to run anything. Without `text`, what was said of the last run stays. */
  running(state: RunState, ready: boolean, text?: string): void {
    const focused = document.activeElement;
    this.run.disabled = state !== "idle" || !ready;
    this.stop.disabled = state !== "running";
    if (text !== undefined) setText(this.#runState, text);
    // A button that is switched off drops the focus: keep it in the pair.
    if (focused === this.run && this.run.disabled && !this.stop.disabled) this.stop.focus();
    if (focused === this.stop && this.stop.disabled && !this.run.disabled) this.run.focus();
  }

  /** What is wrong with the input, at its field; null takes it back. */
  inputFault(fault: string | null): void {
    setText(this.#inputError, fault ?? "");
    if (fault === null) return this.input.removeAttribute("aria-invalid");
    this.input.setAttribute("aria-invalid", "true");
    this.input.focus();
  }

  /** The button beside the program; null: there is nothing to restore. */
  restoreButton(text: string | null): void {
    this.restore.hidden = text === null;
    if (text !== null) setText(this.restore, text);
  }

  /** A run begins: its output comes into view. */
  begin(): void {
    this.#output.scrollIntoView({ block: "nearest" });
  }

  clear(): void {
    this.#output.replaceChildren();
    this.#unwritten = "";
    this.#result.textContent = "";
    this.#whenEmpty("");
    this.#error.hidden = true;
  }

  /** Add to the output; written once a frame, however much comes. */
  write(text: string): void {
    if (this.#unwritten === "") requestAnimationFrame(() => this.flush());
    this.#unwritten = (this.#unwritten + text).slice(-OUTPUT_CHARS);
  }

  flush(): void {
    const text = this.#unwritten;
    this.#unwritten = "";
    if (text === "") return;
    const output = this.#output;
    const atEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
    output.append(text);
    let kept = output.textContent?.length ?? 0;
    while (kept > OUTPUT_CHARS && output.firstChild) {
      kept -= output.firstChild.textContent?.length ?? 0;
      output.firstChild.remove();
    }
    if (atEnd) output.scrollTop = output.scrollHeight;
  }

  /** The run has ended; `value` is undefined when it has no result. */
  ended(value: unknown): void {
    this.flush();
    if (value !== undefined) this.#result.textContent = JSON.stringify(value, null, 2);
    this.#whenEmpty("none");
  }

  #whenEmpty(text: string): void {
    this.#output.dataset["empty"] = this.#result.dataset["empty"] = text;
  }

  error({ title, message, line, traceback }: ErrorText): void {
    setText(element("error-type"), title);
    setText(element("error-message"), message);
    setText(element("error-traceback"), traceback);
    element("error-more").hidden = traceback === "";
    this.#line.hidden = line === null;
    this.#line.dataset["line"] = String(line);
    this.#line.textContent = `Go to line ${line}`;
    this.#error.hidden = false;
    this.#error.scrollIntoView({ block: "nearest" });
  }

  noError(): void {
    this.#error.hidden = true;
  }

  #showLine(line: number): void {
    const lines = this.source.value.split("\n");
    const start = lines.slice(0, line - 1).reduce((sum, text) => sum + text.length + 1, 0);
    this.source.focus();
    this.source.setSelectionRange(start, start + (lines[line - 1] ?? "").length);
    this.source.scrollTop = ((line - 5) / lines.length) * this.source.scrollHeight;
  }
}

function setText(target: HTMLElement, text: string): void {
  if (target.textContent !== text) target.textContent = text;
}
