"""What an epilogue reads of its pass."""

from __future__ import annotations

from typing import NoReturn

from pie_core.eta.errors import TraceError
from pie_core.eta.tensor import Tensor
from pie_core.eta.trace import active_trace


def output(i: int = 0, name: str = "logits") -> Tensor:
    """Flat read-out row `i` of the pass: `name` "logits" is f32 [vocabulary], "hidden" f32 [model width]."""
    return active_trace("intrinsics.output").output(i, name)


def outputs(name: str = "logits") -> NoReturn:
    """All read-out rows as one matrix; not executable on the devices yet."""
    raise TraceError(f"intrinsics.outputs({name!r}) is not supported yet: use intrinsics.output(i, {name!r}) for each row i")
