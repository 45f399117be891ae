"""Builds the cpu device's WebAssembly module with zig, once for each state of its sources."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import kernels_wasm
from pie_core.codegen.cpu_source import vm_ops_header
from pie_server.build.artifacts import seal, sound
from pie_server.errors import UserError

# -ffp-contract=off: a row must have the same bits from every host and every build.
# Memory may reach 4 GiB less a page, wasm32's most but one (the linker cannot say 2^32).
FLAGS = (
    "-target", "wasm32-freestanding", "-mcpu=generic+simd128+bulk_memory+sign_ext+nontrapping_fptoint", "-O3", "-std=c11",
    "-s", "-nostdlib", "-ffreestanding", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror",
    "-mllvm", "-disable-lsr",  # keeps constant offsets in loads: prefill is 8 % faster
    "-Wl,--no-entry", "-Wl,--export-memory", "-Wl,-z,stack-size=65536", "-Wl,--max-memory=4294901760",
)  # fmt: skip
BUILD_TIMEOUT_S = 300.0


class BuildError(UserError):
    """The module could not be built; the message is one sentence that names the cause and the fix."""


def cache_root() -> Path:
    """$PIE_CACHE, by default ~/.cache/pie."""
    return Path(os.environ.get("PIE_CACHE") or Path.home() / ".cache" / "pie")


def module_sources() -> dict[str, str]:
    """File name to text of everything the module is compiled from, generated headers included."""
    folder = Path(kernels_wasm.__file__).parent
    files = {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.suffix in {".c", ".h"}}
    files["vm_ops.h"] = vm_ops_header()
    return files


def source_key(files: dict[str, str], zig_version: str, flags: tuple[str, ...]) -> str:
    """Hex sha256 over sources, compiler version and flags: what the module's bytes depend on."""
    digest = hashlib.sha256()
    for part in (zig_version, "\0".join(flags), *(f"{name}\0{text}" for name, text in sorted(files.items()))):
        digest.update(f"{len(part)}:".encode())
        digest.update(part.encode())
    return digest.hexdigest()


def zig_version() -> str:
    """Version of the installed `ziglang` package; BuildError when there is none."""
    if importlib.util.find_spec("ziglang") is None:
        raise BuildError("the cpu device's kernels are built with zig, which is not installed; run `pip install ziglang` and start again")
    return metadata.version("ziglang")


def module_path(files: dict[str, str], cache: Path | None = None) -> Path:
    """Where the module of these sources is or will be. Raises BuildError."""
    # Without zig a module built earlier would still do, but its key needs the version: the package is required either way.
    return (cache or cache_root()) / "build" / f"cpu-{source_key(files, zig_version(), FLAGS)[:32]}.wasm"


def cpu_module(cache: Path | None = None) -> Path:
    """Path of the built module, compiling it first when the cache (default `cache_root()`) has no sound one for these sources.

    Takes seconds the first time and milliseconds afterwards. Raises BuildError.
    """
    files = module_sources()
    target = module_path(files, cache)
    folder = target.parent
    if not sound(target):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            compile_c(files, target)
        except OSError as error:
            raise BuildError(f"cannot write the cpu module under {folder}: {error.strerror}; set PIE_CACHE to a writable folder") from error
    return target


def compile_c(files: dict[str, str], target: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile the `.c` files among `files` into `target`, which appears complete or not at all. Raises BuildError."""
    zig_version()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="cpu-build-") as temporary:
        work = Path(temporary)
        for name, text in files.items():
            (work / name).write_text(text)
        command = [sys.executable, "-m", "ziglang", "cc", *flags, *sorted(n for n in files if n.endswith(".c")), "-o", "module.wasm"]
        environment = {**os.environ, "ZIG_LOCAL_CACHE_DIR": str(work / "zig"), "ZIG_GLOBAL_CACHE_DIR": str(target.parent / "zig")}
        try:
            done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"building the cpu module took over {BUILD_TIMEOUT_S:.0f} s; try again on a quieter machine") from error
        if done.returncode:
            raise BuildError(f"zig could not build the cpu module (exit status {done.returncode}): {_first_error(done.stderr)}")
        seal(work / "module.wasm")
        os.replace(work / "module.wasm", target)


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
