"""Which model file runs a checkpoint: by `general.architecture`, or a file named by the operator (`--poem FILE`)."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any, NamedTuple

from pie_core.poem import Metadata, PoemError

ARCHITECTURES = {"llama": "pie_core.models.llama"}


class UnknownArchitecture(PoemError):
    """No model file is registered for the checkpoint's architecture."""


class Architecture(NamedTuple):
    """A model file: `Config.from_metadata(metadata)` gives the sizes, `Model(config, parameters)` is what is traced."""

    Model: Any
    Config: Any


def resolve(meta: Metadata, poem: Path | None = None) -> Architecture:
    """The model file for a checkpoint.

    `poem` replaces the registered one with a file of the operator's own, which defines (or imports) `Model` and `Config`. It is
    Python that runs with the server's rights: never take it from a request. Raises UnknownArchitecture naming the
    architecture, PoemError for a poem file that fails to load or lacks either class.
    """
    if poem is not None:
        try:
            names = runpy.run_path(str(poem))
        except Exception as e:  # the operator's file may raise anything; it becomes one sentence
            raise PoemError(f"poem {poem} did not load: {type(e).__name__}: {e}") from e
        if not {"Model", "Config"} <= set(names):
            raise PoemError(f"poem {poem} must define the classes Model and Config (see pie_core/models/llama.py)")
        return Architecture(names["Model"], names["Config"])
    arch = meta.str("general.architecture")
    module = ARCHITECTURES.get(arch)
    if module is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownArchitecture(f"unknown architecture {arch!r}; known: {known}. A model file of your own can be given with --poem FILE")
    found = importlib.import_module(module)
    return Architecture(found.Model, found.Config)
