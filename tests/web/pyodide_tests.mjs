// Node: starts Pyodide, shows it the repository and a folder of pure Python packages, runs pyodide_runner.py, writes its JSON report.
// usage: node pyodide_tests.mjs PYODIDE_DIR REPOSITORY PACKAGES JOB REPORT  (JOB: JSON list of the arguments of its `run`)
import { writeFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const [folder, repository, packages, job, target] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`).href);
const python = await loadPyodide({ indexURL: folder, stdout: (line) => console.error(line), stderr: (line) => console.error(line) });
for (const [place, path] of [['/repo', repository], ['/packages', packages]]) {
  python.FS.mkdir(place);
  python.FS.mount(python.FS.filesystems.NODEFS, { root: path }, place);
}
python.globals.set('job', job);
let report;
try {
  report = python.runPython(`
import json, os, sys
sys.dont_write_bytecode = True
sys.path[:0] = ["/packages", "/repo/tests/web"]
os.chdir("/tmp")
from pyodide_runner import run
run(*json.loads(job))
`);
} catch (error) {
  console.error(error.message); // not the stack: it quotes all of Pyodide's minified code
  process.exit(1);
}
writeFileSync(target, report);
process.exit(0);
