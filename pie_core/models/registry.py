"""Which model file runs a checkpoint: by `general.architecture`, or a file named by the operator (`--poem FILE`)."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

from pie_core.poem import Metadata, PoemError

ARCHITECTURES = {"llama": "pie_core.models.llama"}


class UnknownArchitecture(PoemError):
    """No model file is registered for the checkpoint's architecture."""


def resolve(meta: Metadata, poem: Path | None = None) -> Any:
    """The model class (with a `Config.from_metadata`) for a checkpoint.

    `poem` replaces the registered file with one of the operator's own; it must define `Model`. It is Python that runs with
    the server's rights: never take it from a request. Raises UnknownArchitecture naming the architecture, PoemError for a
    poem file that fails to load or lacks `Model`.
    """
    if poem is not None:
        try:
            found = runpy.run_path(str(poem)).get("Model")
        except Exception as e:  # the operator's file may raise anything; it becomes one sentence
            raise PoemError(f"poem {poem} did not load: {type(e).__name__}: {e}") from e
        if found is None or not hasattr(found, "Config"):
            raise PoemError(f"poem {poem} must define a class Model with a Config (see pie_core/models/llama.py)")
        return found
    arch = meta.str("general.architecture")
    module = ARCHITECTURES.get(arch)
    if module is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownArchitecture(f"unknown architecture {arch!r}; known: {known}. A model file of your own can be given with --poem FILE")
    return importlib.import_module(module).Model
