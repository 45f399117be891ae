// Service worker: keeps what /hello is made of, so that the page works without its server. Whenever that answers, its answer counts.

const worker = self as unknown as ServiceWorkerGlobalScope;
const KEPT = "pie-page-v1";
const PAGE = "/hello";
const LEADING_THERE = ["/", "/hello/"]; // addresses that the server redirects to the page

const writing = new Set<Promise<void>>();

worker.addEventListener("install", () => void worker.skipWaiting());
worker.addEventListener("activate", (event) => event.waitUntil(begin()));
worker.addEventListener("fetch", (event) => {
  const { pathname, origin, search } = new URL(event.request.url);
  if (origin !== worker.location.origin || event.request.method !== "GET") return;
  if (pathname === PAGE || pathname.startsWith("/web/")) event.respondWith(answer(event, pathname));
  else if (LEADING_THERE.includes(pathname) && event.request.mode === "navigate") event.respondWith(lead(event.request, search));
});
/** Asked "kept?": answered when all that came until now is written. */
worker.addEventListener("message", (event) => {
  const [port] = event.ports;
  if (event.data === "kept?" && port !== undefined) event.waitUntil(Promise.allSettled(writing).then(() => port.postMessage("kept")));
});

async function begin(): Promise<void> {
  for (const name of await caches.keys()) if (name.startsWith("pie-page-") && name !== KEPT) await caches.delete(name);
  await worker.clients.claim();
}

/** The server's answer, which may be another page; without one, the way to the page where that is kept. */
async function lead(request: Request, search: string): Promise<Response> {
  try {
    return await fetch(request);
  } catch (error) {
    const cache = await caches.open(KEPT);
    if ((await cache.match(PAGE, { ignoreVary: true })) === undefined) throw error;
    return Response.redirect(PAGE + search, 302);
  }
}

/** The server's answer, else the one that was kept. Files are kept under their path: a query changes none of them. */
async function answer(event: FetchEvent, path: string): Promise<Response> {
  const cache = await caches.open(KEPT);
  const kept = await cache.match(path, { ignoreVary: true });
  let response: Response;
  try {
    response = await fetch(event.request);
  } catch (error) {
    if (kept !== undefined) return kept;
    throw error;
  }
  if (response.status >= 500 && kept !== undefined) return kept;
  const etag = response.headers.get("etag");
  if (response.status === 200 && (etag === null || etag !== kept?.headers.get("etag"))) event.waitUntil(keep(cache, path, response.clone()));
  return response;
}

/** A full disk only costs the page without a server. */
async function keep(cache: Cache, path: string, response: Response): Promise<void> {
  const written = cache.put(path, response).catch(() => undefined);
  writing.add(written);
  await written;
  writing.delete(written);
}
