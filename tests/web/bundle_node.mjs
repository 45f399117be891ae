// Node: bundles one TypeScript entry of the page's sources to run in Node. usage: node bundle_node.mjs VITE ENTRY FOLDER
// FOLDER lies below the page's node_modules, so that packages resolve.
import { basename } from 'node:path';
import { pathToFileURL } from 'node:url';

const [vite, entry, folder] = process.argv.slice(2);
const { build } = await import(pathToFileURL(vite).href);
await build({
  configFile: false,
  root: new URL('../../../../', pathToFileURL(vite)).pathname, // the page's folder: its packages stay outside the bundle
  logLevel: 'warn',
  build: {
    ssr: true,
    target: 'node20',
    minify: false,
    outDir: folder,
    emptyOutDir: true,
    rolldownOptions: { input: { [basename(entry, '.ts')]: entry }, output: { entryFileNames: '[name].mjs', chunkFileNames: '[name].mjs' } },
  },
});
