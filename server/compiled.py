"""The cache of compiled WebAssembly: machine code is loaded only where this user wrote it and it is unchanged."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from wasmtime import Engine, WasmtimeError
from wasmtime.component import Component

from pie_server.build.artifacts import build_lock, prune


class CompiledCacheError(Exception):
    """The cache folder cannot be trusted or written; the message is one sentence."""


def load_component(engine: Engine, config: str, wasm: Path, folder: Path, progress: Callable[[str], None] | None = None) -> Component:
    """The component `wasm` as machine code for `engine`, compiled (7 to 16 s for Python) when `folder` has no sound copy.

    `config` names the engine's settings and is part of the key, with wasmtime's version, the CPU and the component's sha256.
    Raises CompiledCacheError, and OSError when `wasm` cannot be read.
    """
    data = wasm.read_bytes()
    _own(folder)
    parts = (importlib.metadata.version("wasmtime"), config, _cpu(), hashlib.sha256(data).hexdigest())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    name = f"{wasm.stem.partition('-')[0]}-{key[:32]}"
    with build_lock(folder / f"{name}.lock"):
        code = _sound(folder, name)
        if code is not None:
            try:
                return Component.deserialize_file(engine, str(code))
            except WasmtimeError as error:
                if progress is not None:
                    progress(f"compiled code is not usable here ({str(error).splitlines()[0]}), compiling again")
        if progress is not None:
            progress(f"compiling {wasm.name} ({len(data) / 1e6:.1f} MB)")
        machine_code = Component(engine, data).serialize()
        digest = hashlib.sha256(machine_code).hexdigest()
        code = folder / f"{name}-{digest[:32]}.cwasm"
        _write(code, machine_code)
        _write(folder / f"{name}.sha256", digest.encode())  # last: it names the code file
        kind = name.partition("-")[0]
        for pattern in (f"{kind}-*.cwasm", f"{kind}-*.sha256", f"{kind}-*.lock"):
            prune(folder, pattern)
        return Component.deserialize_file(engine, str(code))  # mapped from the file, instead of a copy in memory


def _own(folder: Path) -> None:
    """Make `folder` ours alone: whoever can write there could run code as us."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if sys.platform == "win32":
            return  # the user's profile folder has no other writers
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise CompiledCacheError(
                f"{folder} is not a folder of the current user, so compiled code in it is not loaded; remove it or set PIE_CACHE."
            )
        if info.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise CompiledCacheError(
            f"the folder {folder} for compiled code cannot be used: {error.strerror}; set PIE_CACHE to a writable folder."
        ) from None


def _sound(folder: Path, name: str) -> Path | None:
    """The code file that was written for `name`, when its bytes are still what was written."""
    try:
        digest = (folder / f"{name}.sha256").read_text()
        code = folder / f"{name}-{digest[:32]}.cwasm"
        with code.open("rb") as file:
            return code if hashlib.file_digest(file, "sha256").hexdigest() == digest else None
    except (OSError, ValueError):  # absent, or a damaged digest that is no text
        return None


def _write(path: Path, data: bytes | bytearray) -> None:
    """Atomically, so that a reader in another process never sees half a file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except OSError as error:
            Path(file.name).unlink(missing_ok=True)
            raise CompiledCacheError(f"compiled code cannot be written to {path}: {error.strerror}.") from None


def _cpu() -> str:
    """Machine and CPU features; wasmtime checks them again when it loads."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {features}"
