// Builds the page: pie.js (the API), the two workers and /hello, under stable names, without inline scripts or generated code.

import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";

const path = (name: string): string => fileURLToPath(new URL(name, import.meta.url));

const entries: Record<string, string> = {
  pie: path("src/pie.ts"),
  "engine.worker": path("src/engine/worker.ts"),
  "inferlet.worker": path("src/inferlet/worker.ts"),
  hello: path("hello.html"),
};
// While the page is being written a part may be missing; a build for serving (PIE_WEB_COMPLETE=1) takes all of them or fails.
const present = Object.fromEntries(
  Object.entries(entries).filter(([, file]) => process.env["PIE_WEB_COMPLETE"] === "1" || existsSync(file)),
);

export default defineConfig({
  root: path("."),
  base: "/web/",
  publicDir: false,
  appType: "mpa",
  clearScreen: false,
  build: {
    target: "es2023",
    outDir: process.env["PIE_WEB_OUT"] ?? path("dist"),
    emptyOutDir: true,
    modulePreload: false,
    assetsInlineLimit: 0, // no data: URLs
    cssCodeSplit: true,
    reportCompressedSize: false,
    rolldownOptions: {
      input: present,
      preserveEntrySignatures: "strict", // pie.js is a library: its exports are its API
      output: {
        format: "es",
        keepNames: true, // errors cross between realms by the names of their classes
        entryFileNames: (chunk) => (chunk.name === "hello" ? "hello/hello.js" : "[name].js"),
        chunkFileNames: "shared.[name].js", // beside pie.js, which finds the other files from where it is
        assetFileNames: (asset) => (asset.names[0] === "hello.css" ? "hello/hello.css" : "hello/[name][extname]"),
      },
    },
  },
});
