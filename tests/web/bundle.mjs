// Node: bundles one TypeScript entry of the tests with the page's own sources. usage: node bundle.mjs VITE ENTRY FOLDER [TAP]
// TAP stands in for engine/runtime.ts where engine/service.ts imports it.
import { basename, dirname } from 'node:path';
import { pathToFileURL } from 'node:url';

const [vite, entry, folder, tap] = process.argv.slice(2);
const { build } = await import(pathToFileURL(vite).href);
const tapped = {
  name: 'tap',
  enforce: 'pre',
  resolveId: (source, importer) => (tap && source === './runtime.js' && importer?.endsWith('/engine/service.ts') ? tap : null),
};
await build({
  configFile: false,
  root: dirname(entry),
  logLevel: 'warn',
  publicDir: false,
  plugins: [tapped],
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
