// Registers the service worker, where the browser has them: afterwards the page works without its server.

const LONGEST_MS = 2000;

/** Resolves when the page's files are kept from now on, or after a moment: being online is enough to go on. */
export async function keepPage(): Promise<void> {
  const workers = navigator.serviceWorker as ServiceWorkerContainer | undefined; // absent in insecure contexts, whatever the types say
  if (workers === undefined || workers.controller !== null) return;
  const controlled = new Promise<void>((resolve) => workers.addEventListener("controllerchange", () => resolve(), { once: true }));
  try {
    const registered = (await workers.register("/web/sw.js", { scope: "/", type: "module" })) as ServiceWorkerRegistration | undefined;
    if (!isComing(registered)) return;
    await Promise.race([controlled, new Promise((resolve) => setTimeout(resolve, LONGEST_MS))]);
  } catch {
    return; // private windows refuse
  }
  // What was loaded before there was somebody to keep it.
  const early = performance.getEntriesByType("resource").map((entry) => entry.name);
  for (const url of ["/hello", ...early]) void fetch(url).catch(() => undefined);
}

/** Whether a worker is about to take this page. One that is active already and has not is passed by: a reload past all caches, or automation. */
function isComing(registered: ServiceWorkerRegistration | undefined): boolean {
  const { installing, waiting, active } = registered ?? {};
  return Boolean(installing ?? waiting) || active?.state === "activating";
}
