"""Index arithmetic in WGSL: where the element of a view or lookup lies in its operand."""

from __future__ import annotations

from pie_core.eta.rules import Shape, elements


def grouped(expr: str) -> str:
    """`(expr)`, without the parentheses around a name or number."""
    return expr if expr.isidentifier() or expr[:-1].isdigit() else f"({expr})"


def times(expr: str, factor: int) -> str:
    """`expr * factor`."""
    return expr if factor == 1 else f"{expr} * {factor}u"


def over(expr: str, divisor: int) -> str:
    """`expr / divisor`."""
    return expr if divisor == 1 else f"{expr} / {divisor}u"


def modulo(expr: str, divisor: int) -> str:
    """`expr % divisor`."""
    return "0u" if divisor == 1 else f"{expr} % {divisor}u"


def broadcast_index(index: str, source: Shape, shape: Shape) -> str:
    """The source element of flat element `index` of a broadcast: extents are left-aligned, 1 or equal, missing ones 1."""
    source = source + (1,) * (len(shape) - len(source))
    parts = []
    stride, step = elements(shape), elements(source)
    for axis, (have, want) in enumerate(zip(source, shape, strict=True)):
        step //= have
        whole = stride
        stride //= want
        if have == 1:
            continue
        first = all(extent == 1 for extent in shape[:axis]) or whole == elements(shape)
        coordinate = over(index, stride) if first else f"{grouped(over(index, stride))} % {want}u"
        parts.append(times(grouped(coordinate), step))
    return " + ".join(parts) or "0u"


def transpose_index(index: str, shape: Shape) -> str:
    """The source element of flat element `index` of a transposed matrix of shape [n, m]."""
    n, m = shape
    return f"{grouped(modulo(index, m))} * {n}u + {over(index, m)}"


def view_index(name: str, index: str, source: Shape, shape: Shape) -> str:
    """The source element of flat element `index` of a view that moves elements."""
    return transpose_index(index, shape) if name == "transpose" else broadcast_index(index, source, shape)
