"""Builds the Python language component: CPython with the inferlet SDK and eta inside, from the sources in this tree."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import inferlet_sdk
import pie_core
from pie_server.build.artifacts import build_lock, prune, seal, sound
from pie_server.build.cpu_module import BuildError, cache_root

TOOL = "componentize-py"
WORLD = "inferlet"
_TIMEOUT_S = 600.0
_SDK = Path(inferlet_sdk.__file__).resolve().parent
_CORE = Path(pie_core.__file__).resolve().parent

Progress = Callable[[str], None]


def component_path(cache: Path | None = None) -> Path:
    """Where the component for the present sources is or will be. Raises BuildError."""
    return (cache or cache_root()) / "build" / f"python-{_key(_tool()[1])[:32]}.wasm"


def python_component(cache: Path | None = None, progress: Progress | None = None) -> Path:
    """The path of the component for the present sources, built first where the cache (default `cache_root()`) lacks it.

    A build takes 5 to 15 s and needs no network; `progress` gets one line a stage. Raises BuildError.
    """
    tool, version = _tool()
    target = component_path(cache)
    if not sound(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with build_lock(target.with_suffix(".lock")):
                if not sound(target):  # another process may have built it meanwhile
                    _build(target, tool, version, progress)
                    for pattern in ("python-*.wasm", "python-*.lock"):
                        prune(target.parent, pattern)
        except OSError as error:
            raise BuildError(
                f"cannot write the Python component under {target.parent}: {error.strerror}; set PIE_CACHE to a writable folder"
            ) from error
    return target


def _build(target: Path, tool: Path, version: str, progress: Progress | None) -> None:
    if progress is not None:
        progress(f"building the Python component with {TOOL} {version}")
    with tempfile.TemporaryDirectory(prefix="pie-python-", dir=target.parent) as scratch:
        stage = Path(scratch) / "stage"
        for name, source in _sources():
            place = stage / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if source is None:
                place.write_text("")
            else:
                shutil.copyfile(source, place)
        out = Path(scratch) / "out.wasm"
        _componentize(tool, stage, out)
        seal(out)
        os.replace(out, target)
    if progress is not None:
        progress(f"built the Python component ({target.stat().st_size / 1e6:.1f} MB)")


def _tool() -> tuple[Path, str]:
    try:
        version = importlib.metadata.version(TOOL)
    except importlib.metadata.PackageNotFoundError:
        raise BuildError(f"{TOOL} is not installed in this Python; install the [server] extra.") from None
    name = TOOL + (".exe" if sys.platform == "win32" else "")
    for folder in (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent):
        if (folder / name).is_file():
            return folder / name, version
    found = shutil.which(TOOL)
    if found is None:
        raise BuildError(f"{TOOL} {version} is installed but its command is not beside {sys.executable}; reinstall the [server] extra.")
    return Path(found), version


def _sources() -> Iterator[tuple[str, Path | None]]:
    """(path in the guest, source file or None for an empty file): the SDK, eta, and the parts of text that need only the stdlib."""
    guest = _SDK / "python"
    for path in sorted(guest.rglob("*.py")):
        yield path.relative_to(guest).as_posix(), path
    yield "pie_core/__init__.py", None
    for path in sorted((_CORE / "eta").rglob("*.py")):
        yield "pie_core/" + path.relative_to(_CORE).as_posix(), path
    yield "pie_core/text/__init__.py", None
    yield "pie_core/text/stream.py", _CORE / "text" / "stream.py"


def _key(version: str) -> str:
    digest = hashlib.sha256(f"{TOOL} {version} {WORLD}\n".encode())
    wit = [(f"wit/{p.name}", p) for p in sorted((_SDK / "wit").glob("*.wit"))]
    for name, source in [*wit, *_sources()]:
        try:
            data = source.read_bytes() if source else b""
        except OSError as error:
            raise BuildError(f"the source file {source} of the Python component cannot be read: {error.strerror}.") from None
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _componentize(tool: Path, stage: Path, out: Path) -> None:
    command: list[str | Path] = [tool, "-q", "-d", _SDK / "wit", "-w", WORLD, "componentize", "-p", stage, "app", "-o", out]
    env = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}  # the tool adds what they name
    try:
        done = subprocess.run(command, env=env, cwd=stage, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        raise BuildError(f"{tool} cannot be started: {error.strerror}.") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"{TOOL} did not finish within {_TIMEOUT_S:.0f} s.") from None
    if done.returncode != 0 or not out.is_file():
        raise BuildError(f"{TOOL} failed with exit status {done.returncode}: {_cause(done.stderr or done.stdout)}")


def _cause(output: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = (line for line in lines if line.partition(":")[0].endswith(("Error", "Exception", "Warning")) and "Traceback" not in line)
    return next(named, lines[0] if lines else "it said nothing")


def main() -> int:
    """Build, print the path; exit status 1 with one sentence on failure."""
    try:
        print(python_component(progress=lambda line: print(line, file=sys.stderr)))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
