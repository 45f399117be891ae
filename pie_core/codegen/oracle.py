"""The NumPy oracle: runs Programs straight from the op table, f32 at each step. For tests; NumPy is imported when called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pie_core.codegen.schedule import live_outputs
from pie_core.eta.flow import pending_values
from pie_core.eta.numerics import NUMPY_DTYPE
from pie_core.eta.ops import OPS
from pie_core.eta.program import Node, Program
from pie_core.eta.rules import elements

Array = Any


def to_words(np: Any, value: Array) -> Array:
    """An array as u32 words, bool as 0 or 1, flat."""
    value = np.ascontiguousarray(value).reshape(-1)
    return value.astype(np.uint32) if value.dtype == np.bool_ else value.view(np.uint32)


def from_words(np: Any, words: Array, dtype: str, shape: Sequence[int]) -> Array:
    """u32 words as an array of `dtype` and `shape`."""
    words = np.ascontiguousarray(words, np.uint32)
    value = words != 0 if dtype == "bool" else words.view(NUMPY_DTYPE[dtype])
    return value.reshape(tuple(shape))


def run_epilogue(  # noqa: PLR0917
    program: Program,
    params: Sequence[int],
    logits: Array | None,
    hidden: Array | None,
    row: int,
    cells: Mapping[int, Array],
) -> tuple[list[Array], dict[int, Array], int]:
    """(outputs, values put by channel, status word) of one pass. `params`: words by slot. `logits` f32 [R, V] and `hidden` f32 [R, d]:
    read-out rows, output(i) is row `row + i`. `cells`: channel -> array of the cell taken or read."""
    import numpy as np

    alias = pending_values(program.ops)
    rows = {"logits": logits, "hidden": hidden}
    values: list[Array] = []
    more: dict[int, tuple[Array, ...]] = {}  # results of ops that have several
    with np.errstate(all="ignore"):
        for index, node in enumerate(program.ops):
            values.append(_value(np, program, index, node, values, alias, params, rows, row, cells, more))
    status = int(any(bool(np.isnan(values[i]).any()) for i in live_outputs(program)))
    puts = {chan: values[e.put] for chan, e in enumerate(program.effects) if e.put is not None}
    return [values[i] for i in program.outs], puts, status


def run_map(program: Program, inputs: Sequence[Array]) -> Array:
    """The output of a map program for input arrays f32 [n] (or [rows, n]: every op is elementwise)."""
    import numpy as np

    values: list[Array] = []
    more: dict[int, tuple[Array, ...]] = {}  # results of ops that have several
    with np.errstate(all="ignore"):
        for index, node in enumerate(program.ops):
            if node.name == "input":
                values.append(np.asarray(inputs[int(node.attrs["index"])], np.float32))
            elif node.name in ("broadcast", "reshape"):
                values.append(values[node.args[0]])
            else:
                values.append(_value(np, program, index, node, values, {}, (), {}, 0, {}, more))
    return np.broadcast_to(values[program.outs[0]], np.broadcast_shapes(*[np.shape(x) for x in inputs]))


def _value(  # noqa: PLR0917
    np: Any, program: Program, index: int, node: Node, values: Sequence[Array], alias: Mapping[int, int], params: Sequence[int],
    rows: Mapping[str, Array | None], row: int, cells: Mapping[int, Array], more: dict[int, tuple[Array, ...]],
) -> Array:  # fmt: skip
    spec = OPS[node.name]
    if spec.kind in ("source", "effect"):
        return _given(np, index, node, values, alias, params, rows, row, cells)
    if spec.kind == "pick":
        return more[node.args[0]][int(node.attrs["i"])]
    args = [values[a] for a in node.args]
    assert spec.numpy is not None, node.name
    if spec.kind == "view":
        result = spec.numpy(np, *args, node.shape)
    elif spec.kind == "generator":
        result = np.reshape(spec.numpy(np, *args, elements(node.shape)), node.shape)
    elif node.name == "cast":
        result = spec.numpy(np, *args, node.dtype)
    else:
        result = spec.numpy(np, *args, **node.attrs)
    if spec.results > 1:
        more[index] = result
        result = result[0]
    result = np.asarray(result)
    assert (result.dtype, result.shape) == (NUMPY_DTYPE[node.dtype], node.shape) or program.stage == "map", (
        node,
        result.dtype,
        result.shape,
    )
    return result


def _given(  # noqa: PLR0917
    np: Any, index: int, node: Node, values: Sequence[Array], alias: Mapping[int, int], params: Sequence[int],
    rows: Mapping[str, Array | None], row: int, cells: Mapping[int, Array],
) -> Array:  # fmt: skip
    """A source or effect."""
    if node.name in ("output", "outputs"):
        source = rows[str(node.attrs["name"])]
        assert source is not None, f"the program reads {node.attrs['name']}"
        found = source[row : row + node.shape[0]] if node.name == "outputs" else source[row + int(node.attrs["index"])]
        return np.asarray(found, np.float32).reshape(node.shape)
    if node.name == "param":
        return from_words(np, [params[int(node.attrs["slot"])]], node.dtype, ())
    if node.name == "const":
        return from_words(np, [int(node.attrs["bits"])], node.dtype, ())
    if node.name in ("take", "read"):
        return values[alias[index]] if index in alias else np.asarray(cells[int(node.attrs["chan"])]).reshape(node.shape)
    if node.name == "put":
        return values[node.args[0]]
    raise AssertionError(f"{node.name} is not there in an epilogue or a map")
