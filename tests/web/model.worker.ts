// A worker that opens models as the engine's does and says what came: for test_model_stores.py.

import { openModel } from '../../web/src/model/index.js';
import { Sha256 } from '../../web/src/model/sha256.js';
import type { Progress } from '../../web/src/messages.js';

interface Job {
  url: string;
  /** Browsers without: "opfs", "caches". */
  lacking?: string[];
}

const control = new AbortController();

addEventListener('message', ({ data }: MessageEvent<Job | 'cancel'>) => {
  if (data === 'cancel') control.abort();
  else void open(data);
});

async function open({ url, lacking = [] }: Job): Promise<void> {
  if (lacking.includes('opfs')) delete (FileSystemFileHandle.prototype as Partial<FileSystemFileHandle>).move;
  if (lacking.includes('caches')) Object.defineProperty(globalThis, 'caches', { value: undefined });
  const stages: string[] = [];
  const onProgress = (progress: Progress): void => {
    if (stages.at(-1) !== progress.stage) stages.push(progress.stage);
    postMessage({ progress });
  };
  try {
    const { source } = await openModel(url, { onProgress, signal: control.signal });
    const hash = new Sha256();
    for (let at = 0; at < source.size; at += 1 << 20) hash.update(source.read(at, Math.min(1 << 20, source.size - at)));
    postMessage({ done: { kind: source.constructor.name, sha256: hash.hex(), stages } });
    // The source stays open: another tab must be able to read beside it.
  } catch (error) {
    const { name, message } = error as Error;
    postMessage({ done: { error: name, message, stages } });
  }
}
