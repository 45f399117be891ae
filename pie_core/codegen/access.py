"""How an op reads its operands: at the same element, as a scalar, or at other elements through memory."""

from __future__ import annotations

from typing import Literal

from pie_core.eta.ops import OPS
from pie_core.eta.program import Program
from pie_core.eta.rules import elements

Access = Literal["same", "scalar", "state", "memory"]


def access(program: Program, value: int, position: int) -> Access:
    """How op `value` reads operand `position`. same: the element of its own flat index. scalar: element 0. state: elements 0 and 1 of an
    RNG state. memory: elements that depend on more than the flat index, so the operand must lie in memory."""
    node = program.ops[value]
    spec = OPS[node.name]
    source = program.ops[node.args[position]].shape
    if spec.kind == "generator":
        return "state"
    if spec.kind == "skeleton":
        return "memory" if source else "scalar"
    if spec.kind == "pivot":
        return "same" if position == 0 else "memory" if source else "scalar"
    if spec.kind == "view":
        return _view(node.name, source, node.shape)
    if node.name == "gather":
        if position == 0:
            return "memory"
        if elements(source) == 1:
            return "scalar"
        return "same" if elements(node.shape) == elements(source) else "memory"
    if node.name == "gather_row":
        return "memory" if position == 0 else "same"
    if node.name == "mask_apply":
        return "same" if position == 0 else "memory"
    return "same" if source or not node.shape else "scalar"  # elementwise, reduce, put, pick


def _view(name: str, source: tuple[int, ...], shape: tuple[int, ...]) -> Access:
    if elements(source) == 1:
        return "same" if elements(shape) == 1 else "scalar"
    if name == "transpose":
        return "same" if 1 in source else "memory"
    return "same" if elements(source) == elements(shape) else "memory"
