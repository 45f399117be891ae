"""Bundles of the tests' TypeScript entries with the page's own sources; the npm packages are installed where a checkout lacks them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pie_server.build.web import WEB, page_tools

HERE = Path(__file__).parent
_VITE = WEB / "node_modules" / "vite" / "dist" / "node" / "index.js"


def bundle(entry: Path, folder: Path, tap: Path | None = None) -> Path:
    """`entry` as a script for the browser, in `folder`; `tap` stands in for engine/runtime.ts. Raises BuildError."""
    arguments = [_VITE, entry, folder, *([tap] if tap else [])]
    page_tools().run(f"{entry.name} could not be bundled", HERE / "bundle.mjs", *arguments, cwd=WEB)
    return folder / f"{entry.stem}.js"


@contextmanager
def node_bundle(entry: Path) -> Iterator[Path]:
    """`entry` as a script for Node.js, below the page's packages so that they resolve; removed at the end. Raises BuildError."""
    node = page_tools()
    folder = WEB / "node_modules" / ".pie-tests" / f"{entry.stem}-{os.getpid()}"
    try:
        node.run(f"{entry.name} could not be bundled", HERE / "bundle_node.mjs", _VITE, entry, folder, cwd=WEB)
        yield folder / f"{entry.stem}.mjs"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
