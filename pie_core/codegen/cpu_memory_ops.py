"""Instructions of the cpu virtual machine that read memory at other elements: views, lookups, keep-masks, and skeletons."""

from __future__ import annotations

from collections.abc import Sequence

from pie_core.codegen.cpu_code import SCRATCH, Code, operand_word
from pie_core.codegen.schedule import SMALL_SORT, Skeleton
from pie_core.eta.program import Node, Program
from pie_core.eta.rules import Shape, elements

KEY_KINDS = {"f32": (0xFFFFFFFF, 1 << 31, 0), "i32": (0, 1 << 31, 0xFFFFFFFF), "u32": (0, 0, 0xFFFFFFFF)}  # KeyKind in kernels_wasm/vm.h


def view_table(node: Node, source: Shape) -> tuple[int, ...]:
    """Extents of the result and strides of the source, four each, outermost first; axes that walk on as one are merged."""
    if node.name == "transpose":
        strides = [1, source[1]]
    else:
        padded = [*source, *[1] * (len(node.shape) - len(source))]
        strides = [0 if extent == 1 else elements(tuple(padded[axis + 1 :])) for axis, extent in enumerate(padded)]
    axes: list[tuple[int, int]] = []
    for extent, stride in zip(node.shape, strides, strict=True):
        if axes and axes[-1][1] == stride * extent:
            axes[-1] = (axes[-1][0] * extent, stride)
        elif extent > 1:
            axes.append((extent, stride))
    axes = [(1, 0)] * (4 - len(axes)) + axes
    return *(e for e, _ in axes), *(s for _, s in axes)


def emit_view(code: Code, node: Node, source: Shape, *, d: int, a: int, element: int) -> None:
    """A broadcast or transpose of the memory at `a`."""
    code.emit("view", d, a, c=code.table(*view_table(node, source)), imm=element)
    if node.dtype == "bool":
        code.emit("mask", d, d)


def emit_lookup(code: Code, program: Program, node: Node, *, d: int, operands: Sequence[int], pivot: int, element: int) -> None:
    """A lookup, or the keep-mask of a pivot whose two words a row lie at `pivot`."""
    source = program.ops[node.args[0]].shape
    if node.name == "gather":
        inner = elements(source[1:])
        if inner == 1:
            code.emit("gather", d, *operands, c=code.table(source[0]), imm=element)
        else:
            code.emit("gather_rows", d, *operands, c=code.table(source[0], inner), imm=element)
    elif node.name == "gather_row":
        code.emit("gather_row", d, *operands, c=code.table(source[1]), imm=element)
    elif node.name == "mask_apply":
        code.emit("mask_apply", d, *operands, c=code.table(source[-1]), imm=element)
    else:
        code.emit("pivot", d, operands[0], pivot, c=code.table(source[-1]), imm=element)
    if node.dtype == "bool" and node.name in ("gather", "gather_row"):
        code.emit("mask", d, d)


def emit_skeleton(code: Code, program: Program, skeleton: Skeleton, operands: Sequence[int]) -> None:
    """A skeleton over operands in memory and scalar slots."""
    node = program.ops[skeleton.id]
    name, types = node.name, [program.ops[a].type for a in node.args]
    dtype, shape = types[0]
    d, n, rows = operand_word(SCRATCH, skeleton.result[0]), shape[-1], elements(shape[:-1])
    work = skeleton.work - skeleton.result[0]
    if name == "pivot_rank":
        code.emit(name, d, *operands, c=code.table(rows, n, work))
    elif name == "pivot_mass":
        code.emit("copy_words", d, operands[2], imm=1)
        code.emit(name, d, *operands[:2], c=code.table(rows, n, work))
    elif name in ("sort_desc", "top_k"):
        k = node.shape[-1]
        table = code.table(rows, n, k, *KEY_KINDS[dtype], skeleton.result[1] - skeleton.result[0], work)
        code.emit("top_k" if name == "top_k" and k <= SMALL_SORT else "sort_desc", d, operands[0], c=table)
    elif name in ("cumsum", "cumprod"):
        code.emit(f"{name}_{'f32' if dtype == 'f32' else 'u32'}", d, operands[0], c=code.table(rows, n))
    elif name == "matmul":
        code.emit("matmul", d, *operands, c=code.table(*shape, types[1][1][1]))
    else:
        code.emit("copy_words", d, operands[0], imm=elements(shape))
        key = "" if name == "scatter_set" else "_f32" if dtype == "f32" else "_u32"
        code.emit(name + key, d, *operands[1:], c=code.table(shape[0], elements(shape[1:]), types[1][1][0]))
