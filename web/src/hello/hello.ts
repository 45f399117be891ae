// The page /hello: loads the model, runs the program in the text box, shows what it says. Query: ?device=auto|webgpu|cpu&model=URL.

import example from "../../../inferlet_sdk/examples/hello.py?raw";
import { Cancelled, Pie, PieError, type DeviceChoice } from "../pie.js";
import { Drafts, sameDraft, type Draft } from "./draft.js";
import { parseInput } from "./input.js";
import { keepPage, pageKept } from "./offline.js";
import { View } from "./view.js";
import { errorText, stageText } from "./words.js";

const query = new URLSearchParams(location.search);
const view = new View();

/** For tests and the curious: the API object behind the page, once it is loaded. */
const hello: { pie: Pie | null } = { pie: null };
declare global {
  interface Window {
    pieHello: typeof hello;
  }
}
window.pieHello = hello;

let loading: AbortController | null = null;
let running: AbortController | null = null;
let runnable: Promise<void> = Promise.resolve(); // settles when a run needs nothing more from the server
let loadedFor = ""; // the choice of the last load

function deviceChoice(): DeviceChoice {
  const { value } = view.choice;
  return value === "webgpu" || value === "cpu" ? value : "auto";
}

/** Load the model for the device that is chosen; an engine that is there is given up first, and its run ends with `why`. */
async function load(why = "the model is loaded anew"): Promise<void> {
  const control = new AbortController();
  loading?.abort();
  loading = control;
  loadedFor = view.choice.value;
  view.noError();
  view.loading("loading", "Starting");
  view.useButton(false);
  view.running("idle", false);
  const model = query.get("model");
  let pie: Pie | null = null;
  try {
    await unload(why);
    pie = await Pie.load({
      device: deviceChoice(),
      ...(model === null ? {} : { model }),
      onProgress: (progress) => {
        if (loading === control) view.progress(progress);
      },
      signal: control.signal,
    });
    if (loading !== control) return void pie.dispose();
    hello.pie = pie;
    await complete(pie, control.signal);
    if (loading !== control || hello.pie !== pie) return;
    view.loading("ready", "Ready");
    view.facts(pie.info());
  } catch (error) {
    if (loading !== control || (pie !== null && hello.pie !== pie)) return; // given up, or lost, which is told there
    if (pie !== null) void unload(error instanceof Cancelled ? "the load was cancelled" : "the load failed");
    view.running("idle", false);
    if (error instanceof Cancelled) view.loading("stopped", "Not loaded: cancelled. What came already is kept.");
    else {
      view.loading("failed", "Not loaded");
      show(error);
    }
  } finally {
    if (loading === control) loading = null;
  }
}

/** The engine is there: get what programs need besides, so that from "Ready" on no server is needed. A run may be asked for already. */
async function complete(pie: Pie, signal: AbortSignal): Promise<void> {
  view.loading("loading", stageText({ stage: "component" }));
  view.facts(pie.info());
  void pie.failed.then((error) => lost(pie, error));
  runnable = pie.prepare();
  view.running("idle", true);
  const cancelled = new Promise<never>((_, reject) => signal.addEventListener("abort", () => reject(new Cancelled("the load was cancelled"))));
  await Promise.race([runnable.then(pageKept), cancelled]);
}

/** The engine died under us. */
function lost(pie: Pie, error: PieError): void {
  if (hello.pie !== pie) return; // we gave it up ourselves
  hello.pie = null;
  void pie.dispose();
  view.loading("failed", "The engine stopped");
  view.running("idle", false);
  show(error);
}

/** Give the engine up; a run ends with `why` for its words. */
async function unload(why: string): Promise<void> {
  const { pie } = hello;
  hello.pie = null;
  running?.abort(new Cancelled(why));
  await pie?.dispose();
}

async function run(): Promise<void> {
  const { pie } = hello;
  if (pie === null || running !== null) return;
  const { value: input, fault } = parseInput(view.input.value);
  view.inputFault(fault);
  if (fault !== null) return view.running("idle", true, "Not run");
  const control = new AbortController();
  running = control;
  view.begin();
  view.running("running", true, "Waiting for what programs need");
  let started = performance.now();
  const took = (): string => `${((performance.now() - started) / 1000).toFixed(2)} s`;
  const began = (): void => {
    if (running !== control || control.signal.aborted) return;
    started = performance.now();
    view.running("running", true, "Running");
  };
  runnable.then(began, () => undefined); // why it failed is what the run rejects with
  let state = "";
  let value: unknown;
  try {
    value = await pie.run(view.source.value, {
      input,
      name: "hello.py",
      receives: false, // there is nothing here to send with
      signal: control.signal,
      onMessage: (message) => (typeof message === "string" ? view.output.write(message) : view.output.line(JSON.stringify(message))),
      onLog: (level, text) => view.output.line(`${level}: ${text}`),
    });
    state = `Done in ${took()}`;
  } catch (error) {
    const { reason } = control.signal;
    if (reason instanceof Cancelled) state = `Stopped: ${reason.message}`;
    else if (error instanceof Cancelled) state = `Stopped after ${took()}`;
    else {
      state = `Failed after ${took()}`;
      show(error);
    }
  } finally {
    running = null;
    view.ended(value);
    view.running("idle", hello.pie !== null, state);
  }
}

function stop(): void {
  if (running === null) return;
  view.running("stopping", true, "Stopping");
  running.abort();
}

function show(error: unknown): void {
  view.error(errorText(error instanceof Error ? error : new Error(String(error))));
}

const drafts = new Drafts();
const EXAMPLE: Draft = { source: example, input: '{"prompt": "The capital of France is"}' };
let replaced: Draft | null = null; // by the example, until the next edit: restoring can be undone

function typed(): Draft {
  return { source: view.source.value, input: view.input.value };
}

function fill({ source, input }: Draft): void {
  view.source.value = source;
  view.input.value = input;
  view.inputFault(null);
  keep();
}

/** Keep what is in the boxes for the next visit, and offer the way back. */
function keep(): void {
  const now = typed();
  const changed = !sameDraft(now, EXAMPLE);
  if (changed) drafts.save(now);
  else drafts.forget(); // a later version of the example is shown then
  view.restoreButton(changed ? "Restore the example" : replaced && "Bring back my program");
}

function restore(): void {
  const [next, before] = replaced === null ? [EXAMPLE, typed()] : [replaced, null];
  replaced = before;
  fill(next);
}

function edited(): void {
  replaced = null;
  view.inputFault(null);
  keep();
}

fill(drafts.load() ?? EXAMPLE);
view.source.addEventListener("input", edited);
view.input.addEventListener("input", edited);
view.restore.addEventListener("click", restore);
view.choice.value = query.get("device") ?? "auto";
if (view.choice.selectedIndex < 0) view.choice.value = "auto";

view.form.addEventListener("submit", (event) => {
  event.preventDefault();
  void run();
});
view.stop.addEventListener("click", stop);
view.load.addEventListener("click", () => (loading ? loading.abort() : void load()));
view.choice.addEventListener("change", () => view.useButton(view.choice.value !== loadedFor));
view.use.addEventListener("click", () => void load("the device was changed"));
document.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    void run();
  } else if (event.key === "Escape" && running !== null) {
    event.preventDefault();
    stop();
  }
});

void keepPage().then(() => load());
