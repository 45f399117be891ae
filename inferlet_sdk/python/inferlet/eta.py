"""Forward passes and tensor programs: `from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, ...`.

The functions for epilogues come from eta's tables; `help(inferlet.eta.softmax)` shows each one's line. A star import brings all but `log`.
"""

from typing import Any

from pie_core.eta import FUNCTIONS, EtaError, ProgramError, Tensor, TraceError, intrinsics

from ._channel import Channel
from ._forward import ForwardPass, Pipeline
from ._output import Output, Outputs
from ._state import StateGeometry, WorkingSet

globals().update(FUNCTIONS)

# A star import leaves out `log`, the logarithm, which would hide `inferlet.log`, which writes a line: there it is `eta.log(x)`.
__all__ = [  # noqa: PLE0604  the functions are listed by eta's tables
    "Channel", "EtaError", "ForwardPass", "Output", "Outputs", "Pipeline", "ProgramError", "StateGeometry", "Tensor", "TraceError",
    "WorkingSet", "intrinsics", *(name for name in FUNCTIONS if name != "log"),
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The table's functions are set above; this is for names that do not exist, and for type checkers."""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
