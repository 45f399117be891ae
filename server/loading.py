"""The steps from a model's name to something that runs: checkpoint, device, tokenizer, runner."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pie_core.device.protocol import Device, DeviceError, DeviceInfo
from pie_core.engine.model_runner import ModelRunner
from pie_core.engine.set_files import FileStore
from pie_core.models.registry import resolve as resolve_architecture
from pie_core.poem import PoemError
from pie_core.text.chat import ChatEncoder, load_chat
from pie_core.text.stream import TextError
from pie_core.text.tokenizer import TokenizerSpec, tokenizer_spec
from pie_core.weights import Checkpoint, WeightsError, open_gguf
from pie_server.adapters.tokenizer import HfTokenizer
from pie_server.build.cpu_module import BuildError, cache_root
from pie_server.compiled import CompiledCacheError
from pie_server.config import DeviceName
from pie_server.errors import UserError
from pie_server.file_digest import file_sha256
from pie_server.models import DEFAULT_MODEL, StoreError, resolve
from pie_server.threads import in_thread

# What these raise are sentences about files, models and machines that the operator can act on.
USER_ERRORS: tuple[type[Exception], ...] = (
    UserError, BuildError, CompiledCacheError, DeviceError, PoemError, StoreError, TextError, WeightsError,
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A checkpoint that was found and whose architecture is known."""

    name: str
    path: Path
    checkpoint: Checkpoint
    poem: Path | None

    @property
    def architecture(self) -> str:
        """The checkpoint's own word for it."""
        return self.checkpoint.metadata.str("general.architecture")

    @property
    def context(self) -> int:
        """Most tokens of one sequence."""
        return self.checkpoint.metadata.int(f"{self.architecture}.context_length", low=1)


def open_source(model: str | None, poem: Path | None) -> Source:
    """Find and open a checkpoint and check, without loading it, that it can run. Raises UserError and USER_ERRORS."""
    if poem is not None and not poem.is_file():
        raise UserError(f"the model file {poem} given with --poem {'is a directory' if poem.is_dir() else 'does not exist'}")
    name = DEFAULT_MODEL if model is None else model
    try:
        path = resolve(name)
    except StoreError as error:
        if model is None:
            raise
        raise UserError(f"--model: {error}") from None
    checkpoint = open_gguf(path)
    try:
        resolve_architecture(checkpoint.metadata, poem)
        checkpoint.check_runnable()
    except BaseException:
        checkpoint.close()
        raise
    return Source(path.stem if Path(name).expanduser().exists() else name, path, checkpoint, poem)


async def open_device(wanted: DeviceName, *, timed: bool = False) -> Device:
    """The device of that name; `auto` is a real GPU where there is one, else the cpu. `timed`: such that it has a `step_timer`, where it
    can. Raises DeviceError and BuildError."""
    if wanted != "cpu":
        # Without a desktop session (a container, a service) graphics libraries complain on stderr for every driver they try.
        os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
        from pie_server.adapters.wgpu_native import open_webgpu

        try:
            return await open_webgpu(allow_software=wanted == "webgpu", timed=timed)
        except DeviceError:
            if wanted == "webgpu":
                raise
    from pie_server.adapters.cpu_module import open_cpu_device

    return await in_thread(open_cpu_device)


def describe(info: DeviceInfo) -> str:
    """What really runs, for people."""
    what = info.description if info.name == info.kind else ", ".join(filter(None, (info.name, info.description)))
    return f"{info.kind} ({what}{'; software rendering, slow' if info.software else ''})"


def device_facts(info: DeviceInfo) -> dict[str, Any]:
    """What really runs, for /health and logs."""
    return {"kind": info.kind, "name": info.name, "description": info.description, "software": info.software}


@dataclass(frozen=True)
class Text:
    """The checkpoint's tokenizer and chat template."""

    spec: TokenizerSpec
    tokenizer: HfTokenizer
    chat: ChatEncoder


def load_text(checkpoint: Checkpoint) -> Text:
    """Tokenizer and chat encoder; takes about half a second. Raises TextError, WeightsError."""
    spec = tokenizer_spec(checkpoint.metadata)
    tokenizer = HfTokenizer(spec)
    return Text(spec, tokenizer, load_chat(checkpoint.metadata, spec, tokenizer))


def set_store(source: Source) -> FileStore:
    """Where working sets that inferlets save are kept for this model: under $PIE_CACHE/sets. Raises OSError."""
    identity = file_sha256(source.path)
    if source.poem is not None:
        identity += f", poem {hashlib.sha256(source.poem.read_bytes()).hexdigest()}"
    return FileStore(cache_root() / "sets", identity, run=in_thread)


def load_runner(
    device: Device, source: Source, kv_pool_mb: int, progress: Callable[[int, int], None], *, deterministic: bool = False
) -> ModelRunner:
    """The model on the device. `progress` counts checkpoint bytes. Raises PoemError, WeightsError, DeviceError."""
    return ModelRunner.load(
        device,
        source.checkpoint,
        poem=source.poem,
        kv_pool_bytes=kv_pool_mb << 20,
        progress=progress,
        deterministic=deterministic,
    )
