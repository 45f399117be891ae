"""Builds the files of the page: scripts, Pyodide, wheels, the language component and the cpu module, in one folder to be served at /web."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path

import kernels_wgsl
import pie_core
from pie_server.build.artifacts import build_lock
from pie_server.build.cpu_module import BuildError, cache_root, cpu_module, module_path, module_sources
from pie_server.build.node import PACKAGE, Node, NodeMissing, find_node, install_node, installed
from pie_server.build.python_component import Progress, component_path, python_component
from pie_server.build.web_folders import prune_unheld
from pie_server.build.wheels import Wheel, installed_wheel, stored_zip, tree_wheel, write_wheels

LEVELS = ("fast", "best")  # of compression: seconds, for this machine's own browsers; or a minute, for the wire
_FORMAT = 1  # part of every key: raise it when what this file does to its inputs changes
_KEEP = 6
_PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm")
_STDLIB = "python_stdlib.zip"
_CORE = Path(pie_core.__file__).resolve().parent
_ROOT = _CORE.parent
WEB = _ROOT / "web"


@dataclass(frozen=True)
class Part:
    """Some of the page's files. `inputs` is all that they depend on; `build` writes them into a folder."""

    name: str
    inputs: Mapping[str, bytes]
    build: Callable[[Path, Node], None]

    @property
    def key(self) -> str:
        """Hex digits that stand for the inputs."""
        digest = hashlib.sha256(f"{_FORMAT} {self.name}\n".encode())
        for name, data in sorted(self.inputs.items()):
            digest.update(f"{name} {len(data)}\n".encode() + data)
        return digest.hexdigest()[:32]

    def path(self, folder: Path, level: str) -> Path:
        """Where the built part is or will be."""
        return folder / f"web-{self.name}-{level}-{self.key}"


def web_assets(cache: Path | None = None, progress: Progress | None = None, level: str = "fast") -> Path:
    """The folder of the page's files for the present sources, built first where the cache (default `cache_root()`) lacks it.

    The first build takes about half a minute and needs npm's registry; later ones rebuild what changed. `level` is how hard files
    are compressed; what was compressed harder before is taken as it is. `progress` gets one line a stage. Raises BuildError.
    """
    say = progress or (lambda line: None)
    folder = (cache or cache_root()) / "build"
    try:
        parts = _parts(cache)
        target = _target(parts, folder, level)
        if not target.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            with build_lock(folder / "web.lock"):
                built = [_build_part(part, folder, level, say) for part in parts]
                target = _target(parts, folder, level)
                if not target.is_dir():
                    _publish(folder, target, lambda stage: _link_trees(built, stage))
                    prune_unheld(folder, "web-all-*", _KEEP)
                    say(f"built the page ({_size(target) / 1e6:.1f} MB)")
    except OSError as error:
        raise BuildError(f"cannot write the page's files under {folder}: {error.strerror}; set PIE_CACHE to a writable folder") from error
    _touch(target)
    return target


def built_assets(cache: Path | None = None) -> Path | None:
    """The folder of the page's files for the present sources, or None where it was not built. Builds nothing. Raises BuildError.

    Of several, the one of which most is compressed hard: while another is being made, some parts of it are there and not its folder.
    """
    folder = (cache or cache_root()) / "build"
    ways = product(*([(level == "best", part.path(folder, level)) for level in LEVELS] for part in _parts(cache)))
    targets = (
        _whole([path for _, path in way], folder) for way in sorted(ways, reverse=True, key=lambda way: sum(best for best, _ in way))
    )
    return next(filter(Path.is_dir, targets), None)


def page_tools() -> Node:
    """Node.js with the page's npm packages in `WEB`/node_modules, installed first where they are missing: a page that was found in the
    cache needs none. Raises BuildError."""
    node = find_node()
    if not installed(WEB):
        folder = cache_root() / "build"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with build_lock(folder / "npm.lock"):
                node.install(WEB)
        except OSError as error:
            raise BuildError(f"cannot lock {folder}: {error.strerror}; set PIE_CACHE to a writable folder") from error
    return node


def _target(parts: list[Part], folder: Path, level: str) -> Path:
    """The folder of all parts, each at `level` or better."""
    return _whole([_best_path(part, folder, level) for part in parts], folder)


def _whole(paths: list[Path], folder: Path) -> Path:
    """The folder that holds these parts."""
    names = "\n".join(path.name for path in paths)
    return folder / f"web-all-{hashlib.sha256(names.encode()).hexdigest()[:32]}"


def _best_path(part: Part, folder: Path, level: str) -> Path:
    best = part.path(folder, "best")
    return best if best.is_dir() else part.path(folder, level)


def _build_part(part: Part, folder: Path, level: str, say: Progress) -> Path:
    target = _best_path(part, folder, level)
    if not target.is_dir():
        say(f"building the page: {part.name}")
        node = page_tools()

        def build(stage: Path) -> None:
            part.build(stage, node)
            node.run(f"compressing the page's {part.name} failed", WEB / "scripts" / "compress.mjs", stage, level, cwd=WEB, env=_THREADS)

        _publish(folder, target, build)
        prune_unheld(folder, f"web-{part.name}-{level}-*", _KEEP)
    _touch(target)
    return target


_THREADS = {"UV_THREADPOOL_SIZE": str(os.cpu_count() or 1)}


def _touch(folder: Path) -> None:
    """Mark as used: the least recently used folders are removed first."""
    with contextlib.suppress(OSError):  # a cache that is complete may be read-only
        os.utime(folder)


def _publish(folder: Path, target: Path, build: Callable[[Path], object]) -> None:
    """Let `build` fill a folder that then appears at `target`, complete or not at all."""
    with tempfile.TemporaryDirectory(prefix="pie-web-", dir=folder) as scratch:
        stage = Path(scratch) / "stage"
        stage.mkdir()
        build(stage)
        os.rename(stage, target)


def _link_trees(sources: list[Path], target: Path) -> None:
    for source in sources:
        shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.suffix not in (".br", ".gz"))


# The parts.


def _parts(cache: Path | None) -> list[Part]:
    if not (WEB / "package.json").is_file():
        raise BuildError(f"the sources of the page are not beside this installation (no {WEB}); use a checkout of the project")
    packages = {name: (WEB / name).read_bytes() for name in ("package.json", "package-lock.json", "scripts/compress.mjs")}
    scripts = dict(_script_sources())
    wheels = _wheels()
    stored = {f"{wheel.name}/{name}": data for wheel in wheels for name, data in wheel.files.items()}
    packing = {name: (Path(__file__).parent / name).read_bytes() for name in ("wheels.py", "shrink.py")}  # what is made of the sources
    component = component_path(cache)
    module = module_path(module_sources(), cache)
    return [
        Part("pyodide", {**packages, "precompile.mjs": (WEB / "scripts" / "precompile.mjs").read_bytes()}, _build_pyodide),
        Part("wheels", {**packages, **packing, **stored}, lambda stage, node: _build_wheels(wheels, stage)),
        Part("component", {**packages, component.name: b""}, lambda stage, node: _build_component(python_component(cache), stage, node)),
        Part("kernels", {**packages, module.name: b""}, lambda stage, node: _copy(cpu_module(cache), stage / "kernels.wasm")),
        Part("scripts", {**packages, **scripts}, lambda stage, node: _build_scripts(scripts, stage, node)),
    ]


def _script_sources() -> Iterator[tuple[str, bytes]]:
    """(path in the tree, bytes) of what the bundler reads."""
    names = [WEB / name for name in ("package.json", "tsconfig.json", "vite.config.ts")]
    names += [path for path in (WEB / "src").rglob("*") if path.is_file() and not path.name.endswith(".test.ts")]
    names += WEB.glob("*.html")
    names += (_ROOT / "inferlet_sdk" / "examples").glob("*.py")  # shown by the page
    for path in sorted(names):
        yield path.relative_to(_ROOT).as_posix(), path.read_bytes()


def _build_scripts(sources: Mapping[str, bytes], stage: Path, node: Node) -> None:
    """Bundle a copy of the sources, so that what is built is what the key says."""
    with tempfile.TemporaryDirectory(prefix="pie-web-src-", dir=stage.parent) as scratch:
        copy = Path(scratch)
        for name, data in sources.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(data)
        web = copy / WEB.name
        (web / "node_modules").symlink_to(WEB / "node_modules", target_is_directory=True)
        vite = WEB / "node_modules" / "vite" / "bin" / "vite.js"
        env = {"PIE_WEB_OUT": str(stage)}
        node.run("the page's scripts could not be bundled", vite, "build", "--logLevel", "warn", cwd=web, env=env)


def _build_pyodide(stage: Path, node: Node) -> None:
    """Pyodide's runtime. Its standard library is stored again without deflate, which the transfer encoding then does better, and
    partly compiled."""
    source, target = WEB / "node_modules" / "pyodide", stage / "pyodide"
    target.mkdir()
    for name in _PYODIDE:
        _copy(source / name, target / name)
    with zipfile.ZipFile(source / _STDLIB) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    (target / _STDLIB).write_bytes(stored_zip(files))
    node.run("Python's library could not be compiled for the page", WEB / "scripts" / "precompile.mjs", source, target / _STDLIB, cwd=WEB)


def _wheels() -> list[Wheel]:
    pie = version("pie-webgpu")
    return [
        installed_wheel("markupsafe"),
        installed_wheel("jinja2", ("markupsafe",)),
        tree_wheel("kernels-wgsl", pie, Path(kernels_wgsl.__file__).resolve().parent, (".py", ".wgsl", ".jinja")),
        tree_wheel("pie-core", pie, _CORE, (".py",), ("jinja2", "kernels-wgsl")),
        tree_wheel("pie-web", pie, WEB / "python" / "pie_web", (".py",), ("pie-core",)),
    ]


def _build_wheels(wheels: list[Wheel], stage: Path) -> None:
    (stage / "wheels").mkdir()
    write_wheels(wheels, WEB / "node_modules" / "pyodide" / "pyodide-lock.json", stage / "wheels")


def _build_component(component: Path, stage: Path, node: Node) -> None:
    jco = WEB / "node_modules" / "@bytecodealliance" / "jco" / "dist" / "jco.js"
    flags = ("--name", "component", "-I", "async", "--no-typescript", "--no-nodejs-compat", "--minify", "--quiet")
    with tempfile.TemporaryDirectory(prefix="pie-web-jco-", dir=stage.parent) as scratch:
        node.run("the Python component could not be transpiled", jco, "transpile", component, "-o", scratch, *flags, cwd=WEB)
        (stage / "component").mkdir()
        for path in Path(scratch).iterdir():
            if path.suffix in (".js", ".wasm"):
                shutil.move(path, stage / "component" / path.name)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def check_types() -> None:
    """Check the types of the page's sources. Raises BuildError."""
    node = page_tools()
    node.run("the page's types do not fit", WEB / "node_modules" / "typescript" / "bin" / "tsc", "--noEmit", "--pretty", "false", cwd=WEB)


def main(arguments: list[str] | None = None) -> int:
    """Build the page and print its folder; 2 with one sentence on stderr when that failed."""
    parser = argparse.ArgumentParser(prog="python -m pie_server.build.web", description="Build the files of the page.")
    parser.add_argument("--best", action="store_true", help="compress as hard as possible: minutes, for the wire")
    parser.add_argument("--check", action="store_true", help="check the types of the scripts instead")
    parser.add_argument("--install-node", action="store_true", help=f"where there is no Node.js, let pip install {PACKAGE}")
    parser.add_argument("--optional", action="store_true", help="a page that cannot be built is no failure")
    asked = parser.parse_args(arguments)

    def work() -> None:
        if asked.check:
            check_types()
        else:
            print(web_assets(progress=_say, level="best" if asked.best else "fast"))

    try:
        try:
            work()
        except NodeMissing:
            if not asked.install_node:
                raise
            _say(f"installing {PACKAGE}")
            install_node()
            work()
    except BuildError as error:
        _say(f"pie: the page /hello is left out: {error}" if asked.optional else f"pie: {error}")
        return 0 if asked.optional else 2
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
