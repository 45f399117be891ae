// A model's manifest: which file it is, how large, and its sha256. Everything in it is checked before use.

import { LoadError } from "../errors.js";

export interface Manifest {
  /** The model's name, for people. */
  readonly name: string;
  /** Where the file is: absolute. */
  readonly url: string;
  readonly size: number;
  /** 64 lower-case hex digits. */
  readonly sha256: string;
}

const LARGEST = 64 * 2 ** 30;

/** The manifest in `data`, which was fetched from `from`; `file` resolves beside it. Raises LoadError that names what is wrong. */
export function parseManifest(data: unknown, from: string): Manifest {
  if (typeof data !== "object" || data === null) throw wrong(from, "it is not a JSON object");
  const { name, file, size, sha256 } = data as Record<string, unknown>;
  if (typeof name !== "string" || name === "") throw wrong(from, '"name" is not a text');
  if (typeof file !== "string" || file === "") throw wrong(from, '"file" is not a text');
  if (typeof size !== "number" || !Number.isSafeInteger(size) || size <= 0 || size > LARGEST) throw wrong(from, '"size" is not a number of bytes');
  if (typeof sha256 !== "string" || !/^[0-9a-f]{64}$/.test(sha256)) throw wrong(from, '"sha256" is not 64 lower-case hex digits');
  return { name, url: new URL(encodeURI(file), from).href, size, sha256 };
}

function wrong(from: string, what: string): LoadError {
  return new LoadError(`the model's manifest at ${from} cannot be used: ${what}`);
}
