"""Which model file runs a checkpoint: by `general.architecture`, or a file named by the operator (`--poem FILE`)."""

from __future__ import annotations

import importlib
import runpy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pie_core.poem import Cache, Metadata, Parameters, PoemError, Tensor
from pie_core.poem.graph import check_outputs

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
        return _load(poem)
    arch = meta.str("general.architecture")
    module = ARCHITECTURES.get(arch)
    if module is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnknownArchitecture(f"unknown architecture {arch!r}; known: {known}. A model file of your own can be given with --poem FILE")
    found = importlib.import_module(module)
    return Architecture(found.Model, found.Config)


def _load(poem: Path) -> Architecture:
    with _blamed(poem, "did not load"):
        names = runpy.run_path(str(poem))
    if not {"Model", "Config"} <= set(names):
        raise PoemError(f"poem {poem} must define the classes Model and Config (see pie_core/models/llama.py)")
    return Architecture(_OperatorsModel(poem, names["Model"]), _OperatorsConfig(poem, names["Config"]))


@contextmanager
def _blamed(poem: Path, what: str) -> Iterator[None]:
    """The operator's file may raise anything, SystemExit too; it becomes one sentence with the file and its innermost line."""
    try:
        yield
    except (Exception, SystemExit) as e:
        lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == str(poem)]
        if isinstance(e, SyntaxError) and e.filename == str(poem):
            lines.append(e.lineno)
        place = f", line {lines[-1]}," if lines else ""
        said = str(e) if isinstance(e, PoemError) else f"{type(e).__name__}: {e.msg if isinstance(e, SyntaxError) else e}"
        raise PoemError(f"poem {poem}{place} {what}: {said}") from e


class _OperatorsConfig:
    """A poem's Config: what it reads from a checkpoint has the sizes that the engine asks for."""

    def __init__(self, poem: Path, config: Any) -> None:
        self._poem, self._config = poem, config

    def from_metadata(self, meta: Metadata) -> Any:
        with _blamed(self._poem, "failed to read the checkpoint's sizes"):
            config = self._config.from_metadata(meta)
        for name in ("layers", "width", "vocab", "context"):
            size = getattr(config, name, None)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise PoemError(f"poem {self._poem}: Config.{name} is {size!r}; it must be a whole number from 1")
        return config


class _OperatorsModel:
    """A poem's Model, built and then traced."""

    def __init__(self, poem: Path, model: Any) -> None:
        self._poem, self._model = poem, model

    def __call__(self, config: Any, parameters: Parameters) -> Any:
        with _blamed(self._poem, "failed to build the model"):
            model = self._model(config, parameters)

        def trace(tokens: Tensor, caches: list[Cache]) -> Any:
            with _blamed(self._poem, "failed to run the model"):
                return check_outputs(model(tokens, caches), config)

        return trace
