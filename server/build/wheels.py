"""The wheel set of the page: the core, what it needs, and the lock file by which Pyodide finds them beside itself."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pie_server.build.cpu_module import BuildError
from pie_server.build.shrink import without_words

LOCK = "pyodide-lock.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_COMPILED = {".so", ".pyd", ".dylib", ".c", ".pyc"}  # a package with a pure fallback works without them


@dataclass(frozen=True)
class Wheel:
    """A pure wheel before it is packed. `needs` are names of other wheels of the set; `files` are as their package has them.
    `wordless`: Python is packed without its docstrings and comments."""

    name: str
    version: str
    imports: str
    needs: tuple[str, ...]
    files: Mapping[str, bytes]
    wordless: bool = False

    @property
    def file_name(self) -> str:
        """As the wheel format has it."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


def tree_wheel(name: str, version: str, folder: Path, suffixes: Sequence[str], needs: tuple[str, ...] = ()) -> Wheel:
    """The package in `folder`, its files of these suffixes only, packed without words. The name is the import name with hyphens."""
    package = folder.name
    files = {
        f"{package}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix in suffixes and path.is_file()
    }
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    return Wheel(name, version, package, needs, {**files, f"{_info(name, version)}/METADATA": about}, wordless=True)


def installed_wheel(name: str, needs: tuple[str, ...] = ()) -> Wheel:
    """An installed distribution without its compiled parts: the same sources as its sdist, and no network. Raises BuildError."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise BuildError(f"{name} is not installed in this Python; install the [server] extra") from None
    version, files = distribution.version, {}
    package = name.replace("-", "_")
    for file in distribution.files or ():
        place = file.as_posix()
        if file.suffix in _COMPILED or not (file.parts[0] == package or file.parts[0].endswith(".dist-info")):
            continue
        inner = place.split("/", 1)[1]
        if file.parts[0] != package:
            if not (inner == "METADATA" or inner.startswith("licenses/")):
                continue
            place = f"{_info(name, version)}/{inner}"
        files[place] = file.read_binary()
    if not any(place.startswith(f"{package}/") for place in files):
        raise BuildError(f"the files of {name} {version} cannot be found in this Python; reinstall it")
    return Wheel(name, version, package, needs, files)


def pack(wheel: Wheel) -> bytes:
    """The wheel's bytes, equal for equal files. Stored, not deflated: the transfer encoding then compresses across files."""
    info = _info(wheel.name, wheel.version)
    packed = {name: without_words(data) if wheel.wordless and name.endswith(".py") else data for name, data in wheel.files.items()}
    files = {**packed, f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: pie\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    record = "".join(f"{name},sha256={_digest64(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    return stored_zip(files)


def stored_zip(files: Mapping[str, bytes]) -> bytes:
    """A zip of uncompressed members with fixed times."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data)
    return buffer.getvalue()


def write_wheels(wheels: Sequence[Wheel], upstream_lock: Path, folder: Path) -> None:
    """Write the wheels and the lock file for that Pyodide (`upstream_lock` is the one it came with). Raises BuildError, OSError."""
    try:
        info = json.loads(upstream_lock.read_bytes())["info"]
    except (ValueError, KeyError, TypeError):
        raise BuildError(f"{upstream_lock} is not a Pyodide lock file") from None
    packages: dict[str, dict[str, Any]] = {}
    for wheel in wheels:
        data = pack(wheel)
        (folder / wheel.file_name).write_bytes(data)
        packages[wheel.name] = {
            "name": wheel.name,
            "version": wheel.version,
            "file_name": wheel.file_name,
            "install_dir": "site",
            "sha256": hashlib.sha256(data).hexdigest(),
            "package_type": "package",
            "imports": [wheel.imports],
            "depends": list(wheel.needs),
            "unvendored_tests": False,
        }
    (folder / LOCK).write_text(json.dumps({"info": info, "packages": packages}, indent=1, sort_keys=True))


def _info(name: str, version: str) -> str:
    return f"{name.replace('-', '_')}-{version}.dist-info"


def _digest64(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
