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
    found = _load(engine, folder, name, progress)  # without the lock: a folder that cannot be written does where nothing is missing
    if found is not None:
        return found
    try:
        with build_lock(folder / f"{name}.lock"):
            return _load(engine, folder, name, progress) or _compile(engine, wasm.name, data, folder, name=name, progress=progress)
    except OSError as error:
        raise CompiledCacheError(f"compiled code cannot be written under {folder}: {error.strerror}; {_FIX}.") from None


_FIX = "set PIE_CACHE to a writable folder"
_Progress = Callable[[str], None] | None


def _load(engine: Engine, folder: Path, name: str, progress: _Progress) -> Component | None:
    """The component from the folder's code, mapped instead of copied into memory; None where there is none that is sound."""
    code = _sound(folder, name)
    if code is None:
        return None
    try:
        return Component.deserialize_file(engine, str(code))
    except WasmtimeError as error:
        if progress is not None:
            progress(f"compiled code is not usable here ({str(error).splitlines()[0]}), compiling again")
        return None


def _compile(engine: Engine, wasm: str, data: bytes, folder: Path, *, name: str, progress: _Progress) -> Component:
    if progress is not None:
        progress(f"compiling {wasm} ({len(data) / 1e6:.1f} MB)")
    machine_code = Component(engine, data).serialize()
    digest = hashlib.sha256(machine_code).hexdigest()
    code = folder / f"{name}-{digest[:32]}.cwasm"
    _write(code, machine_code)
    _write(folder / f"{name}.sha256", digest.encode())  # last: it names the code file
    kind = name.partition("-")[0]
    for pattern in (f"{kind}-*.cwasm", f"{kind}-*.sha256", f"{kind}-*.lock"):
        prune(folder, pattern)
    return Component.deserialize_file(engine, str(code))


def _own(folder: Path) -> None:
    """Make `folder` ours alone: whoever can write there could run code as us."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if sys.platform == "win32":
            return  # the user's profile folder has no other writers
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (os.geteuid(), 0):
            raise CompiledCacheError(
                f"{folder} is not a folder of the current user, so compiled code in it is not loaded; remove it or set PIE_CACHE."
            )
        if info.st_mode & 0o022 or (info.st_mode & 0o077 and os.access(folder, os.W_OK) and info.st_uid == os.geteuid()):
            folder.chmod(0o700)
    except OSError as error:
        raise CompiledCacheError(f"the folder {folder} for compiled code cannot be used: {error.strerror}; {_FIX}.") from None


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
    """Atomically, so that a reader in another process never sees half a file. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise


def _cpu() -> str:
    """Machine and CPU features; wasmtime checks them again when it loads."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {features}"
