// The page's elements, and how states are shown in them.

import type { PieInfo, Progress } from "../messages.js";
import { keepingFocus } from "./focus.js";
import { Output } from "./output.js";
import { amountText, deviceText, resultNote, stageText, type ErrorText } from "./words.js";

export type LoadState = "loading" | "ready" | "failed" | "stopped";
export type RunState = "idle" | "running" | "stopping";

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
  readonly use = element<HTMLButtonElement>("use");
  readonly restore = element<HTMLButtonElement>("restore");
  readonly output = new Output(element("output"), element("output-cut"));
  readonly #status = document.querySelector<HTMLElement>(".status")!;
  readonly #facts = document.querySelector<HTMLElement>(".facts")!;
  readonly #stage = element("stage");
  readonly #amount = element("amount");
  readonly #bar = element<HTMLProgressElement>("bar");
  readonly #outputBox = element("output");
  readonly #result = element("result");
  readonly #resultNote = element("result-note");
  readonly #runState = element("run-state");
  readonly #error = element("error");
  readonly #inputError = element("input-error");
  readonly #line = element<HTMLButtonElement>("error-line");
  #counted: Progress | null = null;
  #waiting: ReturnType<typeof setInterval> | undefined;

  constructor() {
    this.#whenEmpty("nothing yet");
    this.#line.addEventListener("click", () => this.#showLine(Number(this.#line.dataset["line"])));
  }

  /** `text` says what became of the load. Of the controls in this line one is there in every state, and keeps the focus. */
  loading(state: LoadState, text: string): void {
    clearInterval(this.#waiting);
    this.#counted = null;
    setText(this.#stage, text);
    setText(this.#amount, "");
    this.#bar.removeAttribute("value");
    keepingFocus(
      () => {
        this.#status.dataset["state"] = state;
        this.#facts.hidden = state !== "ready";
        this.load.hidden = state === "ready";
        this.load.textContent = state === "loading" ? "Cancel" : state === "stopped" ? "Load the model" : "Try again";
      },
      this.choice,
      this.load,
    );
  }

  /** Parts of a load go on side by side: one that counts bytes is shown before one that does not. */
  progress(progress: Progress): void {
    const counts = progress.total > 0;
    if (!counts && this.#counted !== null) return;
    this.#counted = counts && progress.done < progress.total ? progress : null;
    clearInterval(this.#waiting);
    if (progress.stage === "waiting") {
      const since = performance.now();
      this.#waiting = setInterval(() => setText(this.#stage, stageText(progress, (performance.now() - since) / 1000)), 500);
    }
    setText(this.#stage, stageText(progress)); // a live region: told only when the words change
    setText(this.#amount, amountText(progress));
    if (counts) this.#bar.value = progress.done / progress.total;
    else this.#bar.removeAttribute("value");
  }

  /** The engine is there; what programs need besides may still be loading. */
  facts({ model, device }: PieInfo): void {
    setText(element("model"), `${model.name}, ${model.context.toLocaleString("en")} tokens of context`);
    setText(element("device"), deviceText(device));
    this.#facts.hidden = false;
  }

  /** The button beside the choice of a device: it acts, not the choice, so that arrow keys can pass by. */
  useButton(shown: boolean): void {
    keepingFocus(() => (this.use.hidden = !shown), this.choice, this.load);
  }

  /** Which buttons work: `idle` needs a model to run anything. Without `text`, what was said of the last run stays. */
  running(state: RunState, ready: boolean, text?: string): void {
    if (text !== undefined) setText(this.#runState, text);
    const stopped = document.activeElement === this.stop;
    keepingFocus(
      () => {
        this.run.disabled = state !== "idle" || !ready;
        this.stop.disabled = state === "idle"; // while it stops, pressing once more does no harm
      },
      ...(stopped ? [this.run, this.load, this.source] : [this.stop, this.load, this.source]),
    );
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
    keepingFocus(() => (this.restore.hidden = text === null), this.source);
    if (text !== null) setText(this.restore, text);
  }

  /** A run begins: what the last one left goes, and the output comes into view. */
  begin(): void {
    this.output.clear();
    this.#showResult(undefined);
    this.#whenEmpty("");
    this.noError();
    this.#outputBox.scrollIntoView({ block: "nearest" });
  }

  /** The run has ended; `value` is undefined when it has no result. */
  ended(value: unknown): void {
    this.output.flush();
    this.#showResult(value);
    this.#whenEmpty("none");
  }

  #showResult(value: unknown): void {
    setText(this.#result, value === undefined ? "" : JSON.stringify(value, null, 2));
    const note = resultNote(value);
    this.#resultNote.hidden = note === null;
    setText(this.#resultNote, note ?? "");
  }

  #whenEmpty(text: string): void {
    this.#outputBox.dataset["empty"] = this.#result.dataset["empty"] = text;
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
    keepingFocus(() => (this.#error.hidden = true), this.stop, this.source);
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
