// Service worker: keeps what /hello is made of, so that the page works without its server. Whenever that answers, its answer counts.

const worker = self as unknown as ServiceWorkerGlobalScope;
const KEPT = "pie-page-v1";

worker.addEventListener("install", () => void worker.skipWaiting());
worker.addEventListener("activate", (event) => event.waitUntil(begin()));
worker.addEventListener("fetch", (event) => {
  const { pathname, origin } = new URL(event.request.url);
  const ours = origin === worker.location.origin && (pathname === "/hello" || pathname.startsWith("/web/"));
  if (ours && event.request.method === "GET") event.respondWith(answer(event, pathname));
});

async function begin(): Promise<void> {
  for (const name of await caches.keys()) if (name.startsWith("pie-page-") && name !== KEPT) await caches.delete(name);
  await worker.clients.claim();
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
  if (response.status === 200 && (etag === null || etag !== kept?.headers.get("etag"))) {
    // A full disk only costs the page without a server.
    event.waitUntil(cache.put(path, response.clone()).catch(() => undefined));
  }
  return response;
}
