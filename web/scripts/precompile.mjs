// `node precompile.mjs PYODIDE LIB.zip`: compiles, in place, the modules of Python's library that the engine loads, which halves the time that
// Python takes to start. The other modules stay source, which is smaller; what has no use in a worker is left out, which pays for the
// bytecode. Pyodide itself compiles: bytecode fits one version only.

import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

// What pie_core, pie_web and jinja2 import, beside what Pyodide loads by itself. A module that is missing here is only slower to load.
const MODULES = `__future__ abc ast asyncio base64 bisect codecs collections contextlib contextvars copy dataclasses enum fnmatch functools
  hashlib heapq importlib.metadata importlib.util inspect io itertools json keyword logging math numbers operator os pathlib pprint random re
  reprlib selectors string struct tempfile textwrap threading traceback types typing urllib.parse urllib.request uuid weakref zipfile`;

// Terminals, debuggers, XML, processes and network protocols, for which a worker has no sockets.
const LEFT_OUT = `_pydatetime _pyio _pyrepl antigravity cProfile colorsys doctest ftplib imaplib mailbox modulefinder multiprocessing
  netrc optparse pdb pickletools poplib profile pstats pty pyclbr pydoc rlcompleter smtplib socketserver sqlite3 tabnanny this trace tty wave webbrowser wsgiref
  xml xmlrpc zipapp`;
// Character sets from before Unicode, but those of zip files and of Latin 1.
const CHARSETS = "encodings/(big5|cp(?!437)|euc_|gb|hp_|hz|iso2022|iso8859|johab|koi8|kz|mac_|mbcs|oem|palmos|ptcp|shift_jis|tis_)";

const [pyodide, library] = process.argv.slice(2);
if (pyodide === undefined || library === undefined) {
  console.error("usage: node precompile.mjs PYODIDE LIB.zip");
  process.exit(2);
}
const { loadPyodide } = await import(pathToFileURL(`${pyodide}/pyodide.mjs`).href);
const python = await loadPyodide({ indexURL: `${pyodide}/` });
python.FS.writeFile("/in.zip", readFileSync(library));
python.globals.set("modules", MODULES);
python.globals.set("left_out", LEFT_OUT);
python.globals.set("charsets", CHARSETS);
python.runPython(`
import importlib, importlib.util, re, sys, zipfile
from importlib._bootstrap_external import _code_to_hash_pyc

left_out = set(left_out.split())
for name in modules.split():
    importlib.import_module(name)
library = next(path for path in sys.path if path.endswith(".zip")) + "/"
loaded = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
with zipfile.ZipFile("/in.zip") as source, zipfile.ZipFile("/out.zip", "w") as target:
    for name in source.namelist():
        if name.split("/")[0].removesuffix(".py") in left_out or re.match(charsets, name):
            continue
        data = source.read(name)
        if name.endswith(".py") and library + name in loaded:
            code = compile(data, library + name, "exec", dont_inherit=True)
            data, name = _code_to_hash_pyc(code, importlib.util.source_hash(data), False), name + "c"  # unchecked: no source beside it
        target.writestr(zipfile.ZipInfo(name), data)
`);
writeFileSync(library, python.FS.readFile("/out.zip"));
