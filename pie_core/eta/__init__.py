"""eta: the language of tensor programs. Standard library only; this package is bundled into the Python guest.

Authors use `intrinsics`, the functions of the op table and the library; hosts use `Program.parse`, `trace_epilogue` and `OPS`.
"""

from __future__ import annotations

from typing import Any

from pie_core.eta import channel, intrinsics
from pie_core.eta.errors import EtaError, ProgramError, TraceError
from pie_core.eta.functions import OTHER_FUNCTIONS, TABLE_FUNCTIONS
from pie_core.eta.library import LIBRARY
from pie_core.eta.ops import OPS
from pie_core.eta.program import Chan, Node, Program
from pie_core.eta.stages import STAGES
from pie_core.eta.tensor import Tensor
from pie_core.eta.trace import Model, Trace
from pie_core.eta.tracing import Traced, is_tracing, trace_epilogue, trace_stage

# Every function an author may call inside an epilogue, by name; SDK surfaces are generated from it.
FUNCTIONS: dict[str, Any] = {
    **TABLE_FUNCTIONS,
    **OTHER_FUNCTIONS,
    **LIBRARY,
}
globals().update(FUNCTIONS)

__all__ = [  # noqa: PLE0604 - the author's functions are listed by the tables
    "FUNCTIONS", "OPS", "STAGES", "Chan", "EtaError", "Model", "Node", "Program", "ProgramError", "Tensor", "Trace", "TraceError", "Traced",
    "channel", "intrinsics", "is_tracing", "trace_epilogue", "trace_stage", *sorted(FUNCTIONS),
]  # fmt: skip
