"""One small program of each family of ops, for golden WGSL and for both WGSL compilers.

`python -m tests.codegen.wgsl_families` writes the golden files anew: look at the diff before you commit it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pie_core.codegen import WgslKernel, emit_epilogue_wgsl, emit_epilogue_wgsl_split, keep_loops
from pie_core.eta import OPS, Program, intrinsics
from tests.codegen.author import Chan, F, counter, greedy, over_cells, traced

GOLDEN = Path(__file__).parent / "golden"
VOCAB = 49_152


def gumbel() -> Callable[[], Any]:
    """Temperature and Gumbel noise."""
    rng = counter()
    return lambda: F["gumbel_max"](intrinsics.output(0) / 0.7, rng.take())


def penalties() -> Callable[[], Any]:
    """Counts of the tokens so far in a channel, one more each pass."""
    counts = Chan("f32", (VOCAB,))

    def fn() -> Any:
        seen = counts.take()
        token = F["reduce_argmax"](intrinsics.output(0) - 0.5 * seen)
        counts.put(F["scatter_add"](seen, F["reshape"](token, 1), 1.0))
        return token

    return fn


def floats(x: Any, y: Any) -> Any:
    """Each elementwise op of f32, and what leads to it and from it."""
    unary = [F[row.py](x) for row in OPS.values() if row.kind == "elementwise" and row.arity == 1 and row.py and "f32" in row.wgsl]
    binary = [F[row.py](x, y) for row in OPS.values() if row.kind == "elementwise" and row.arity == 2 and "f32" in row.wgsl]
    return *unary, *binary, F["select"](x > y, x, y), x.cast("i32"), x.cast("u32"), x.cast("bool")


def integers(x: Any, y: Any, flag: Any) -> Any:
    """Arithmetic of i32, and conversions among integers and bools."""
    made = x // y, x % y, -x, F["absolute"](x), F["sign"](x), x.cast("f32"), x.cast("bool") ^ flag
    u = x.cast("u32")
    return *made, u // 7, u % 7, u.cast("f32"), flag.cast("f32"), ~flag | (x < y) & (u > 3)


def noise() -> Callable[[], Any]:
    """The generators."""
    rng = counter()

    def fn() -> Any:
        state = rng.take()
        return F["rng_uniform"](state, 100), F["rng_normal"](state, 100), F["rng_gumbel"](state), F["iota"](100)

    return fn


def registers() -> Callable[[], Any]:
    """A cell that stays, one whose value is put and seen again, and one that is only consumed."""
    peeked, total, dropped = Chan("bool", (40,)), Chan("i32", (40,)), Chan("f32")

    def fn() -> Any:
        dropped.take()
        total.put(F["select"](peeked.read(), total.take(), 0))
        return F["reduce_sum"](total.read())

    return fn


def families() -> dict[str, Program]:
    """Programs by name."""
    return {
        "greedy": traced(greedy, VOCAB).program,
        "gumbel": traced(gumbel(), VOCAB).program,
        "softmax_rows": over_cells(F["softmax"], ("f32", (4, 1000))).program,
        "floats": over_cells(floats, ("f32", (100,)), ("f32", (100,))).program,
        "integers": over_cells(integers, ("i32", (100,)), ("i32", (100,)), ("bool", (100,))).program,
        "noise": traced(noise()).program,
        "reductions": over_cells(
            lambda x: tuple(F[name](x) for name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_argmax")), ("f32", (3, 500))
        ).program,
        "view": over_cells(lambda x, y: F["transpose"](x) + F["broadcast"](y, (5, 3)), ("f32", (3, 5)), ("f32", (1, 3))).program,
        "lookup": over_cells(F["gather"], ("f32", (9, 4)), ("i32", (6,))).program,
        "gather_row": over_cells(F["gather_row"], ("f32", (9, 4)), ("i32", (9,))).program,
        "mask_apply": over_cells(F["mask_apply"], ("f32", (100,)), ("u32", (4,))).program,
        "pivot_rank": traced(lambda: F["pivot_threshold"](intrinsics.output(0), rank=40), VOCAB).program,
        "pivot_mass": over_cells(lambda x: F["pivot_threshold"](x, mass=0.9), ("f32", (1000,))).program,
        "pivot_mass_by": over_cells(lambda x, y: F["pivot_threshold"](x, mass=0.9, order=y), ("f32", (3, 500)), ("f32", (3, 500))).program,
        "top_k": traced(lambda: F["top_k"](intrinsics.output(0), 40), VOCAB).program,
        "sort_desc": traced(lambda: F["sort_desc"](intrinsics.output(0)), VOCAB).program,
        "ranks": over_cells(F["sort_desc"], ("i32", (3, 50))).program,
        "cumsum": over_cells(F["cumsum"], ("f32", (3000,))).program,
        "cumprod": over_cells(F["cumprod"], ("f32", (3, 8))).program,
        "matmul": over_cells(F["matmul"], ("f32", (20, 30)), ("f32", (30, 40))).program,
        "scatter": traced(penalties(), VOCAB).program,
        "scatter_set": over_cells(F["scatter_set"], ("f32", (500, 2)), ("u32", (1200,)), ("f32", (1200, 2))).program,
        "rows": traced(lambda: F["reduce_argmax"](intrinsics.outputs("logits")), 1000, rows=3).program,
        "registers": traced(registers()).program,
    }


def golden_texts() -> dict[str, str]:
    """What each golden file holds: fused kernels, one in the form of software adapters, and the launches of two split ones."""
    found = {name: emit_epilogue_wgsl(program).source for name, program in families().items()}
    for name in ("greedy", "sort_desc"):
        found[f"{name}_software"] = keep_loops(emit_epilogue_wgsl(families()[name], 32)).source
    for name in ("greedy", "pivot_mass"):
        found[f"{name}_split"] = "\n".join(k.source for k in emit_epilogue_wgsl_split(families()[name], 8))
    return found


def all_kernels() -> dict[str, WgslKernel]:
    """Every family in every form."""
    found = {}
    for name, program in families().items():
        for workgroup, groups in ((32, 1), (256, 1), (256, 32)):
            kernel = emit_epilogue_wgsl(program, workgroup, groups)
            found[f"{name} {workgroup} {groups}"] = keep_loops(kernel) if workgroup == 32 else kernel
        for i, kernel in enumerate(emit_epilogue_wgsl_split(program, 32)):
            found[f"{name} split {i}"] = kernel
    return found


if __name__ == "__main__":
    for title, text in golden_texts().items():
        (GOLDEN / f"{title}.wgsl").write_text(text)
