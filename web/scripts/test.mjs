// `npm test [-- words]`: bundles each src/**/*.test.ts (those whose path contains one of the words) and runs them with Node's runner.

import { spawnSync } from "node:child_process";
import { readdirSync, rmSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { build } from "vite";

const root = fileURLToPath(new URL("..", import.meta.url));
const out = `${root}node_modules/.pie-tests`; // inside node_modules, so that packages resolve

const words = process.argv.slice(2);
const tests = readdirSync(`${root}src`, { recursive: true, encoding: "utf8" })
  .filter((name) => name.endsWith(".test.ts"))
  .filter((name) => words.length === 0 || words.some((word) => name.includes(word)));
if (tests.length === 0) {
  console.error(`no tests match ${words.join(" ") || "src/**/*.test.ts"}`);
  process.exit(1);
}

const folder = `${out}/${process.pid}`;
await build({
  root,
  configFile: false,
  logLevel: "warn",
  build: {
    ssr: true,
    target: "node20",
    minify: false,
    sourcemap: "inline",
    emptyOutDir: true,
    outDir: folder,
    rolldownOptions: {
      input: Object.fromEntries(tests.map((name) => [name.replace(/\.ts$/, ""), `${root}src/${name}`])),
      output: { entryFileNames: "[name].mjs", chunkFileNames: "shared/[name].mjs" },
    },
  },
});
const files = tests.map((name) => `${folder}/${name.replace(/\.ts$/, ".mjs")}`);
const done = spawnSync(process.execPath, ["--enable-source-maps", "--test", ...files], { cwd: root, stdio: "inherit" });
rmSync(folder, { recursive: true, force: true });
process.exit(done.status ?? 1);
