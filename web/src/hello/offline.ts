// Registers the service worker, where the browser has them: afterwards the page works without its server.

const LONGEST_MS = 2000; // for the service worker to take the page
const KEEPING_MS = 10_000; // for the last files to be put down

let early: Promise<unknown> = Promise.resolve(); // what was loaded before there was somebody to keep it

/** Resolves when the page's files are kept from now on, or after a moment: being online is enough to go on. */
export async function keepPage(): Promise<void> {
  const workers = container();
  if (workers === undefined || workers.controller !== null) return;
  const controlled = new Promise<void>((resolve) => workers.addEventListener("controllerchange", () => resolve(), { once: true }));
  try {
    const registered = (await workers.register("/web/sw.js", { scope: "/", type: "module" })) as ServiceWorkerRegistration | undefined;
    if (!isComing(registered)) return;
    await Promise.race([controlled, new Promise((resolve) => setTimeout(resolve, LONGEST_MS))]);
  } catch {
    return; // private windows refuse
  }
  const urls = ["/hello", ...performance.getEntriesByType("resource").map((entry) => entry.name)];
  early = Promise.allSettled(urls.map((url) => fetch(url)));
}

/** Resolves when all that was fetched until now is kept; where nobody keeps it, at once. */
export async function pageKept(): Promise<void> {
  await early;
  const worker = container()?.controller ?? null;
  if (worker === null) return;
  const { port1, port2 } = new MessageChannel();
  const told = new Promise<void>((resolve) => (port1.onmessage = () => resolve()));
  worker.postMessage("kept?", [port2]);
  await Promise.race([told, new Promise((resolve) => setTimeout(resolve, KEEPING_MS))]);
  port1.close();
}

/** Absent in insecure contexts, whatever the types say. */
function container(): ServiceWorkerContainer | undefined {
  return navigator.serviceWorker as ServiceWorkerContainer | undefined;
}

/** Whether a worker is about to take this page. One that is active already and has not is passed by: a reload past all caches, or automation. */
function isComing(registered: ServiceWorkerRegistration | undefined): boolean {
  const { installing, waiting, active } = registered ?? {};
  return Boolean(installing ?? waiting) || active?.state === "activating";
}
