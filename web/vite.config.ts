// Builds the page: pie.js (the API), the two workers and /hello, under stable names, without inline scripts or generated code.

import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";

const path = (name: string): string => fileURLToPath(new URL(name, import.meta.url));

const entries = {
  pie: path("src/pie.ts"),
  "engine.worker": path("src/engine/worker.ts"),
  "inferlet.worker": path("src/inferlet/worker.ts"),
  hello: path("hello.html"),
  sw: path("src/hello/sw.ts"),
};

export default defineConfig({
  root: path("."),
  base: "/web/",
  publicDir: false,
  appType: "mpa",
  clearScreen: false,
  build: {
    target: "es2023",
    outDir: process.env["PIE_WEB_OUT"] ?? path("dist"), // server/build/web.py adds Python, wheels and the component
    emptyOutDir: true,
    modulePreload: false,
    assetsInlineLimit: 0, // no data: URLs
    cssCodeSplit: true,
    reportCompressedSize: false,
    rolldownOptions: {
      input: entries,
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
