// One writer of a model file over all tabs of the site, by Web Locks; a closed tab or a dead worker gives its lock back.

import { Cancelled } from "../errors.js";

const PREFIX = "pie-model:";

/** Run `work` while holding the file's lock; `waiting` is called when somebody else holds it. Without Web Locks nothing is held. */
export async function locked<T>(sha256: string, signal: AbortSignal | undefined, waiting: () => void, work: () => Promise<T>): Promise<T> {
  const locks = globalThis.navigator?.locks as LockManager | undefined; // absent in insecure contexts, whatever the types say
  if (locks === undefined) return work();
  const name = PREFIX + sha256;
  const tried = await locks.request(name, { ifAvailable: true }, async (lock) => (lock === null ? null : { value: await work() }));
  if (tried !== null) return tried.value;
  if (signal?.aborted) throw new Cancelled("the load was cancelled");
  waiting();
  let began = false;
  try {
    return await locks.request(name, signal ? { signal } : {}, () => {
      began = true;
      return work();
    });
  } catch (error) {
    if (!began && signal?.aborted) throw new Cancelled("the load was cancelled");
    throw error;
  }
}

/** Run `work` only if nobody writes that file now. */
export async function ifUnlocked(sha256: string, work: () => Promise<void>): Promise<void> {
  const locks = globalThis.navigator?.locks as LockManager | undefined;
  if (locks === undefined) return work();
  await locks.request(PREFIX + sha256, { ifAvailable: true }, async (lock) => {
    if (lock !== null) await work();
  });
}
