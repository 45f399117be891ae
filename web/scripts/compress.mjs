// `node compress.mjs FOLDER fast|best`: writes NAME.br and NAME.gz beside every file of FOLDER that they make at least 5 % smaller.

import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { extname, join } from "node:path";
import { promisify } from "node:util";
import { brotliCompress, constants, gzip } from "node:zlib";

const SUFFIXES = new Set([".css", ".html", ".js", ".json", ".mjs", ".svg", ".wasm", ".whl", ".zip"]);
const SMALLEST = 1024; // bytes; below, the header costs more than the encoding saves

const [folder, level] = process.argv.slice(2);
if (folder === undefined || (level !== "fast" && level !== "best")) {
  console.error("usage: node compress.mjs FOLDER fast|best");
  process.exit(2);
}
const encodings = {
  br: (data) =>
    promisify(brotliCompress)(data, {
      params: {
        [constants.BROTLI_PARAM_QUALITY]: level === "best" ? 11 : 5,
        [constants.BROTLI_PARAM_LGWIN]: 24, // the widest window that every browser decodes
        [constants.BROTLI_PARAM_SIZE_HINT]: data.length,
      },
    }),
  gz: (data) => promisify(gzip)(data, { level: level === "best" ? 9 : 5 }),
};

const files = readdirSync(folder, { recursive: true, withFileTypes: true })
  .filter((entry) => entry.isFile() && SUFFIXES.has(extname(entry.name)))
  .map((entry) => join(entry.parentPath ?? entry.path, entry.name))
  .map((name) => ({ name, data: readFileSync(name) }))
  .filter(({ data }) => data.length >= SMALLEST)
  .sort((a, b) => b.data.length - a.data.length); // the longest job first: the pool's threads end together
await Promise.all(
  files.flatMap(({ name, data }) =>
    Object.entries(encodings).map(async ([suffix, encode]) => {
      const encoded = await encode(data);
      if (encoded.length < 0.95 * data.length) writeFileSync(`${name}.${suffix}`, encoded);
    }),
  ),
);
