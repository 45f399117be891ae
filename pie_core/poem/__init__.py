"""Poem: models as short programs, traced and lowered to plans. Model files import everything they need from here."""

from pie_core.eta.tensor import Tensor
from pie_core.poem.compile import CompiledModel, Tables
from pie_core.poem.errors import PoemError
from pie_core.poem.graph import Graph, trace_model
from pie_core.poem.ops import Cache, Param, Parameters, attention, embed, linear, read_out, rms_norm, rope, silu
from pie_core.weights import Metadata

__all__ = [
    "Cache", "CompiledModel", "Graph", "Metadata", "Param", "Parameters", "PoemError", "Tables", "Tensor", "attention", "embed",
    "linear", "read_out", "rms_norm", "rope", "silu", "trace_model",
]  # fmt: skip
