"""Tracing a model: its class runs once over symbolic rows; what remains is a graph for lowering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pie_core.device.protocol import ParamValue
from pie_core.eta.dtypes import bits_f32
from pie_core.eta.program import Program
from pie_core.eta.tensor import Tensor
from pie_core.eta.trace import Trace
from pie_core.poem.errors import PoemError
from pie_core.poem.ops import ELEMENTWISE, TABLE, Cache, Param, Parameters
from pie_core.weights import Checkpoint

OUTPUTS = ("hidden", "logits")
_FLOATS = ("eps", "base", "scale")  # attributes that travel as 32-bit words


@dataclass(frozen=True)
class Node:
    """One op of the model: `args` are earlier node ids, `width` its row width (0 for a scalar), `weight` its parameter."""

    id: int
    op: str
    args: tuple[int, ...]
    attrs: Mapping[str, ParamValue]
    width: int
    weight: Param | None = None

    @property
    def matrix(self) -> Param:
        """The node's parameter. Raises PoemError for an op without one."""
        if self.weight is None:
            raise PoemError(f"op {self.op!r} has no parameter")
        return self.weight


@dataclass(frozen=True)
class Graph:
    """A traced model. `cache_widths`: kv_heads * head_dim of each layer's cache, 0 of a layer without one; `state_width`: f32 of all
    recurrent states of a sequence together, 0 where the model has none."""

    nodes: tuple[Node, ...]
    outputs: Mapping[str, int]
    parameters: Mapping[str, Param]
    cache_widths: tuple[int, ...]
    state_width: int = 0


def trace_model(model_class: Any, config: Any, checkpoint: Checkpoint) -> Graph:
    """Build the model over the checkpoint's parameters and trace it for one row.

    `config.layers` caches are handed in. Raises PoemError, WeightsError (a missing tensor) or TraceError.
    """
    parameters = Parameters(checkpoint)
    model = model_class(config, parameters)
    trace = Trace("model", table=TABLE, max_ops=1 << 16)
    caches = [Cache(i) for i in range(config.layers)]
    outputs = check_outputs(model(trace.add("tokens", (), {}, ("u32", ())), caches), config)
    unused = [c.layer for c in caches if not c.width and not c.states]
    if unused:
        raise PoemError(f"layers {unused} never append to their cache; the config asks for {config.layers} layers")
    nodes = []
    state_width = 0
    for i, n in enumerate(trace.ops):
        attrs: dict[str, ParamValue] = {k: bits_f32(int(v)) if k in _FLOATS else v for k, v in n.attrs.items()}
        weight = parameters.used[str(attrs.pop("w"))] if "w" in attrs else None
        if n.name == "recur":
            attrs["offset"] = state_width  # states lie side by side in a slot
            state_width += n.shape[0]
        nodes.append(Node(i, n.name, n.args, attrs, n.shape[0] if n.shape else 0, weight))
    return Graph(tuple(nodes), {k: v.id for k, v in outputs.items()}, dict(parameters.used), tuple(c.width for c in caches), state_width)


def check_outputs(found: Any, config: Any) -> dict[str, Tensor]:
    """What a model returned as its read-outs, each of the width that the engine reads. Raises PoemError."""
    if not isinstance(found, Mapping):
        raise PoemError(f"a model returns a dict with the read-outs {', '.join(OUTPUTS)}, got {type(found).__name__}")
    if set(found) != set(OUTPUTS):
        raise PoemError(f"a model returns a dict with the read-outs {', '.join(OUTPUTS)}, got {sorted(map(str, found))}")
    for name, size in zip(OUTPUTS, (config.width, config.vocab), strict=True):
        value = found[name]
        if not isinstance(value, Tensor):
            raise PoemError(f"a model's read-out {name!r} must be a tensor, got {type(value).__name__}")
        if value.shape != (size,):
            raise PoemError(f"a model's read-out {name!r} has shape {list(value.shape)}, the config asks for {[size]}")
    return dict(found)


def map_program(graph: Graph, end: Node) -> tuple[Program, list[int]]:
    """The elementwise chain that ends at `end` as a map Program, and the ids of the nodes that are its inputs, in order."""
    trace = Trace("map")
    leaves: list[int] = []
    made: dict[int, Tensor] = {}

    def value(i: int) -> Tensor:
        if i not in made:
            node = graph.nodes[i]
            if node.op == "const":
                made[i] = trace.add("const", (), {"bits": int(node.attrs["bits"])}, ("f32", ()))
            elif node.op in ELEMENTWISE:
                made[i] = trace.add(node.op, [value(a) for a in node.args], node.attrs)  # type: ignore[arg-type]
            else:
                made[i] = trace.input(len(leaves), end.width)
                leaves.append(i)
        return made[i]

    return trace.finish([value(end.id)]), leaves
