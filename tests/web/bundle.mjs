// Node: bundles one TypeScript entry of the tests with the page's own sources. usage: node bundle.mjs VITE ENTRY FOLDER
import { basename, dirname } from 'node:path';
import { pathToFileURL } from 'node:url';

const [vite, entry, folder] = process.argv.slice(2);
const { build } = await import(pathToFileURL(vite).href);
await build({
  configFile: false,
  root: dirname(entry),
  logLevel: 'warn',
  publicDir: false,
  build: {
    target: 'es2023',
    outDir: folder,
    emptyOutDir: false,
    modulePreload: false,
    minify: false,
    rolldownOptions: {
      input: { [basename(entry, '.ts')]: entry },
      output: { format: 'es', entryFileNames: '[name].js', chunkFileNames: '[name].js' },
    },
  },
});
