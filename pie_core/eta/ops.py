"""The op table: one row an op. Tensor methods, verifier, oracle and emitters read it; nothing else lists ops.

Columns that hold code are keyed by *variant*: the dtype of the (last) operand, `from>to` for cast, `""` where one text serves all.
WGSL: `{0}` `{1}` `{2}` are operands (f32 i32 u32 bool), `{i}` the u32 index of the element. C: `a` `b` `c` are v128 operands
(bool is a mask of ones or zeros), `i` the index of the first of four elements, `seed` the u64 of a random op. NumPy: operands are arrays,
`n` the number of elements of the result, a view is given the result's shape, cast its dtype, and attributes go in by name. A reduction
holds a `Fold` instead of one expression. Where the emitters own the code (lookups, pivots, skeletons), the code columns are empty.

Kinds:
source       a value from outside           elementwise  an element from the same element of each operand
generator    an element from its flat index view         the same elements at other places, no arithmetic
lookup       elements of operand 0 found through operand 1
pivot        a keep-mask by rank or mass     reduce       over the last axis
skeleton     from memory to memory           pick         a further result of a skeleton
effect       on a channel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pie_core.eta import memory_numerics, numerics, rules
from pie_core.eta.dtypes import DTYPES, NUMERIC
from pie_core.eta.rules import MAX_ELEMENTS, Rule

OUTPUT_NAMES = ("logits", "hidden")
INTRINSIC_NAMES = ("tokens", "positions", "query", "key", "value", "attention", "layer")
MAX_INDEX = 1 << 16  # bound of every integer attribute (rows, slots, channels)


class Fold(NamedTuple):
    """A reduction. WGSL: accumulator type, its start, an element lifted into it, two joined, and the result taken out of it.
    `arg` reductions keep the index of the greatest accumulator, the lowest on ties."""

    acc: str
    init: str
    lift: str
    join: str
    final: str
    arg: bool = False


class CFold(NamedTuple):
    """A reduction in C: the start as a v128, and one step over `acc` and `a`; `final` is applied to the v128 before it is stored."""

    init: str
    step: str
    final: str = "acc"


class Op(NamedTuple):
    """A row of the table. `kind`: see above. `py`: the author's function name, "" if none. `dtypes`: of the first operand, of the
    result where there is none. `constants`: dtype of a Python scalar at an operand position, elsewhere it is that of the tensors beside it.
    `results`: 2 where pick(i=1) takes another."""

    name: str
    arity: int
    attrs: Mapping[str, tuple[str, ...] | int | None]  # allowed words, or the exclusive bound of an integer, or None: a 32-bit word
    kind: str
    rule: Rule
    wgsl: Mapping[str, Any]
    c: Mapping[str, Any]
    numpy: Callable[..., Any] | None
    doc: str
    py: str = ""
    dtypes: tuple[str, ...] = ()
    constants: Mapping[int, str] = {}
    results: int = 1


OPS: dict[str, Op] = {}
_F32 = ("f32",)


def _row(  # noqa: PLR0917 - one argument a column
    name: str, arity: int, kind: str, rule: Rule, wgsl: Mapping[str, Any], c: Mapping[str, Any], numpy: Callable[..., Any] | None,
    doc: str, py: str = "", attrs: Mapping[str, tuple[str, ...] | int | None] | None = None, dtypes: tuple[str, ...] = (),
    constants: Mapping[int, str] | None = None, results: int = 1,
) -> None:  # fmt: skip
    dtypes = dtypes or tuple(dict.fromkeys(key.partition(">")[0] for key in wgsl if key)) or DTYPES
    OPS[name] = Op(name, arity, attrs or {}, kind, rule, wgsl, c, numpy, doc, py, dtypes, constants or {}, results)


def _each(text: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, text)


def _wasm(op: str, **lanes: str) -> dict[str, str]:
    """`wasm_<lane>_<op>(a, b)` for each dtype."""
    return {dtype: f"wasm_{lane}_{op}(a, b)" for dtype, lane in lanes.items()}


# Sources: where values come from.
_row("output", 0, "source", rules.f32_vector, {}, {}, None, "Flat read-out row `index` of `name` (logits or hidden): f32 [width].",
     attrs={"index": MAX_INDEX, "name": OUTPUT_NAMES}, dtypes=_F32)  # fmt: skip
_row("input", 0, "source", rules.f32_vector, {}, {}, None, "Input `index` of a map program: f32 [n].", attrs={"index": 8},
     dtypes=_F32)  # fmt: skip
_row("param", 0, "source", rules.scalar, {}, {}, None, "A lifted scalar constant; its word travels in the lane table.",
     attrs={"slot": MAX_INDEX})  # fmt: skip
_row("const", 0, "source", rules.scalar, {}, {}, None, "A scalar by its 32-bit word (bool as 0 or 1).", attrs={"bits": None})

_row("outputs", 0, "source", rules.f32_rows, {}, {}, None, "All read-out rows of the pass: f32 [rows, width].",
     attrs={"name": OUTPUT_NAMES}, dtypes=_F32)  # fmt: skip
_row("intrinsic", 0, "source", rules.source, {}, {}, None, "A value that a stage is given, by name; the stage fixes its type.",
     attrs={"name": INTRINSIC_NAMES}, dtypes=("f32", "u32"))  # fmt: skip

# Elementwise, one operand.
_row("exp", 1, "elementwise", rules.floating, {"f32": "f_exp({0})"}, {"f32": "simd_exp(a)"}, lambda np, a: np.exp(a),
     "e to the x; below 2^-126 it is 0.", "exp")  # fmt: skip
_row("log", 1, "elementwise", rules.floating, {"f32": "f_log({0})"}, {"f32": "simd_log(a)"}, lambda np, a: np.log(a),
     "Natural logarithm; -inf at 0, NaN below.", "log")  # fmt: skip
_row("recip", 1, "elementwise", rules.floating, {"f32": "1.0 / {0}"}, {"f32": "wasm_f32x4_div(wasm_f32x4_splat(1.0f), a)"},
     lambda np, a: np.float32(1) / a, "1 / x.", "recip")  # fmt: skip
_row("sin", 1, "elementwise", rules.floating, {"f32": "f_sin({0})"}, {"f32": "simd_sin(a)"}, lambda np, a: np.sin(a),
     "Sine; accurate for |x| <= 8192.", "sin")  # fmt: skip
_row("cos", 1, "elementwise", rules.floating, {"f32": "f_cos({0})"}, {"f32": "simd_cos(a)"}, lambda np, a: np.cos(a),
     "Cosine; accurate for |x| <= 8192.", "cos")  # fmt: skip
_row("sqrt", 1, "elementwise", rules.floating, {"f32": "sqrt({0})"}, {"f32": "wasm_f32x4_sqrt(a)"}, lambda np, a: np.sqrt(a),
     "Square root.", "sqrt")  # fmt: skip
_row("rsqrt", 1, "elementwise", rules.floating, {"f32": "inverseSqrt({0})"},
     {"f32": "wasm_f32x4_div(wasm_f32x4_splat(1.0f), wasm_f32x4_sqrt(a))"}, lambda np, a: np.float32(1) / np.sqrt(a),
     "1 / square root.", "rsqrt")  # fmt: skip
_row("tanh", 1, "elementwise", rules.floating, {"f32": "f_tanh({0})"}, {"f32": "simd_tanh(a)"}, lambda np, a: np.tanh(a),
     "Hyperbolic tangent.", "tanh")  # fmt: skip
_row("neg", 1, "elementwise", rules.numeric, {"f32": "bitcast<f32>(bitcast<u32>({0}) ^ 0x80000000u)", "i32": "0i - {0}", "u32": "0u - {0}"},
     {"f32": "wasm_f32x4_neg(a)", **_each("wasm_i32x4_neg(a)", "i32", "u32")}, lambda np, a: np.negative(a),
     "-x; integers wrap.", "neg")  # fmt: skip
_row("abs", 1, "elementwise", rules.numeric,
     {"f32": "bitcast<f32>(bitcast<u32>({0}) & 0x7fffffffu)", "i32": "select({0}, 0i - {0}, {0} < 0i)", "u32": "{0}"},
     {"f32": "wasm_f32x4_abs(a)", "i32": "wasm_i32x4_abs(a)", "u32": "a"}, lambda np, a: np.abs(a),
     "Absolute value; the lowest i32 stays.", "absolute")  # fmt: skip
_row("sign", 1, "elementwise", rules.numeric,
     {"f32": "f_sign({0})", "i32": "select(select(0i, 1i, {0} > 0i), -1i, {0} < 0i)", "u32": "min({0}, 1u)"},
     {"f32": "v_sign_f32(a)", "i32": "v_sign_i32(a)", "u32": "wasm_u32x4_min(a, wasm_i32x4_splat(1))"}, numerics.sign,
     "-1, 0 or 1; 0 for NaN.", "sign")  # fmt: skip
_row("not", 1, "elementwise", rules.boolean, {"bool": "!{0}"}, {"bool": "wasm_v128_not(a)"}, lambda np, a: np.logical_not(a),
     "Logical not.", "logical_not")  # fmt: skip
_row("cast", 1, "elementwise", rules.cast,
     {"f32>i32": "f_to_i32({0})", "f32>u32": "f_to_u32({0})", "f32>bool": "(bitcast<u32>({0}) << 1u) != 0u",
      "i32>f32": "f_from_i32({0})", "i32>u32": "bitcast<u32>({0})", "i32>bool": "{0} != 0i",
      "u32>f32": "f_from_u32({0})", "u32>i32": "bitcast<i32>({0})", "u32>bool": "{0} != 0u",
      "bool>f32": "select(0.0, 1.0, {0})", "bool>i32": "select(0i, 1i, {0})", "bool>u32": "select(0u, 1u, {0})",
      **{f"{d}>{d}": "{0}" for d in DTYPES}},
     {"f32>i32": "wasm_i32x4_trunc_sat_f32x4(a)", "f32>u32": "wasm_u32x4_trunc_sat_f32x4(a)",
      "f32>bool": "wasm_f32x4_ne(a, wasm_f32x4_splat(0.0f))",
      "i32>f32": "wasm_f32x4_convert_i32x4(a)", "u32>f32": "wasm_f32x4_convert_u32x4(a)",
      **_each("a", "i32>u32", "u32>i32", *(f"{d}>{d}" for d in DTYPES)),
      **_each("wasm_i32x4_ne(a, wasm_i32x4_splat(0))", "i32>bool", "u32>bool"),
      "bool>f32": "wasm_v128_and(a, wasm_f32x4_splat(1.0f))", **_each("wasm_v128_and(a, wasm_i32x4_splat(1))", "bool>i32", "bool>u32")},
     numerics.cast, "Conversion; f32 to integers truncates and saturates, NaN is 0; to bool is x != 0.")  # fmt: skip

# Elementwise, two operands of one numeric dtype.
_row("add", 2, "elementwise", rules.arithmetic, _each("{0} + {1}", *NUMERIC), _wasm("add", f32="f32x4", i32="i32x4", u32="i32x4"),
     lambda np, a, b: np.add(a, b), "Sum; integers wrap.", "add")  # fmt: skip
_row("sub", 2, "elementwise", rules.arithmetic, _each("{0} - {1}", *NUMERIC), _wasm("sub", f32="f32x4", i32="i32x4", u32="i32x4"),
     lambda np, a, b: np.subtract(a, b), "Difference; integers wrap.", "sub")  # fmt: skip
_row("mul", 2, "elementwise", rules.arithmetic, _each("{0} * {1}", *NUMERIC), _wasm("mul", f32="f32x4", i32="i32x4", u32="i32x4"),
     lambda np, a, b: np.multiply(a, b), "Product; integers wrap.", "mul")  # fmt: skip
_row("div", 2, "elementwise", rules.arithmetic, {"f32": "{0} / {1}", "i32": "i_div({0}, {1})", "u32": "u_div({0}, {1})"},
     {"f32": "wasm_f32x4_div(a, b)", "i32": "v_div_i32(a, b)", "u32": "v_div_u32(a, b)"}, numerics.divide,
     "Quotient; integers truncate, 0 for divisor 0.", "div")  # fmt: skip
_row("rem", 2, "elementwise", rules.arithmetic, {"f32": "f_rem({0}, {1})", "i32": "i_rem({0}, {1})", "u32": "u_rem({0}, {1})"},
     {"f32": "v_rem_f32(a, b)", "i32": "v_rem_i32(a, b)", "u32": "v_rem_u32(a, b)"}, numerics.remainder,
     "Remainder with the sign of x, exact; for divisor 0 integers give 0, f32 NaN.", "rem")  # fmt: skip
_row("max", 2, "elementwise", rules.arithmetic, {"f32": "f_max({0}, {1})", **_each("max({0}, {1})", "i32", "u32")},
     {"f32": "v_max_f32(a, b)", "i32": "wasm_i32x4_max(a, b)", "u32": "wasm_u32x4_max(a, b)"}, numerics.larger,
     "The larger; the other where one is NaN.", "maximum")  # fmt: skip
_row("min", 2, "elementwise", rules.arithmetic, {"f32": "f_min({0}, {1})", **_each("min({0}, {1})", "i32", "u32")},
     {"f32": "v_min_f32(a, b)", "i32": "wasm_i32x4_min(a, b)", "u32": "wasm_u32x4_min(a, b)"}, numerics.smaller,
     "The smaller; the other where one is NaN.", "minimum")  # fmt: skip
for _name, _sign, _doc in (("gt", ">", "x > y"), ("ge", ">=", "x >= y"), ("eq", "==", "x == y"), ("ne", "!=", "x != y"),
                           ("lt", "<", "x < y"), ("le", "<=", "x <= y")):  # fmt: skip
    _equal = _name in ("eq", "ne")
    _row(_name, 2, "elementwise", rules.compare, {"f32": f"f_{_name}({{0}}, {{1}})", **_each(f"{{0}} {_sign} {{1}}", "i32", "u32")},
         _wasm(_name, f32="f32x4", i32="i32x4", u32="i32x4" if _equal else "u32x4"),
         {"gt": lambda np, a, b: a > b, "ge": lambda np, a, b: a >= b, "eq": lambda np, a, b: a == b, "ne": lambda np, a, b: a != b,
          "lt": lambda np, a, b: a < b, "le": lambda np, a, b: a <= b}[_name],
         f"{_doc}, bool; NaN compares as in IEEE 754.", _name)  # fmt: skip

# Logic.
_row("and", 2, "elementwise", rules.boolean, {"bool": "{0} && {1}"}, {"bool": "wasm_v128_and(a, b)"},
     lambda np, a, b: np.logical_and(a, b), "Logical and.", "logical_and")  # fmt: skip
_row("or", 2, "elementwise", rules.boolean, {"bool": "{0} || {1}"}, {"bool": "wasm_v128_or(a, b)"},
     lambda np, a, b: np.logical_or(a, b), "Logical or.", "logical_or")  # fmt: skip
_row("select", 3, "elementwise", rules.select, {"": "select({2}, {1}, {0})"}, {"": "wasm_v128_bitselect(b, c, a)"},
     lambda np, cond, a, b: np.where(cond, a, b), "a where cond, else b.", "select",
     dtypes=("bool",), constants={0: "bool"})  # fmt: skip

# Generators: values made from their index.
_row("iota", 0, "generator", rules.iota, {"": "{i}"}, {"": "v_iota(i)"}, lambda np, n: np.arange(n, dtype=np.uint32),
     "0, 1, … n - 1 as u32 [n].", dtypes=("u32",))  # fmt: skip
_row("rng_uniform", 1, "generator", rules.random, {"": "rng_uniform({0}, {i})"}, {"": "v_uniform(seed, i)"}, numerics.uniform,
     "Uniform f32 in (0, 1) from a state u32[2].", dtypes=("u32",))  # fmt: skip
_row("rng_gumbel", 1, "generator", rules.random, {"": "rng_gumbel({0}, {i})"}, {"": "v_gumbel(seed, i)"}, numerics.gumbel,
     "Standard Gumbel noise from a state u32[2]; always finite.", dtypes=("u32",))  # fmt: skip
_row("rng_normal", 1, "generator", rules.random, {"": "rng_normal({0}, {i})"}, {"": "v_normal(seed, i)"}, numerics.normal,
     "Standard normal noise from a state u32[2].", dtypes=("u32",))  # fmt: skip

# Views: the same elements at other places.
_row("broadcast", 1, "view", rules.broadcast, {"": "{0}"}, {"": "a"}, memory_numerics.broadcast,
     "x repeated over a shape; its extents, left-aligned with the shape's, are 1 or equal, missing ones 1.")  # fmt: skip
_row("reshape", 1, "view", rules.reshape, {"": "{0}"}, {"": "a"}, lambda np, a, shape: np.reshape(a, shape),
     "The same elements in another shape, in row-major order.")  # fmt: skip
_row("transpose", 1, "view", rules.transpose, {}, {}, lambda np, a, shape: np.transpose(a), "A matrix [m, n] as [n, m].", "transpose")

# Lookups: an element of operand 0 found through operand 1.
_row("gather", 2, "lookup", rules.gather, {}, {}, memory_numerics.gather,
     "Rows of a table [n, …] by i32 or u32 indices: shape of the indices + table.shape[1:]; 0 where an index is out of range.", "gather",
     constants={1: "i32"})  # fmt: skip
_row("gather_row", 2, "lookup", rules.gather_row, {}, {}, memory_numerics.gather_row,
     "One element a row: x [m, n] at indices [m] gives [m]; 0 where an index is out of range.", "gather_row")  # fmt: skip
_row("mask_apply", 2, "lookup", rules.mask_apply, {}, {}, memory_numerics.mask_apply,
     "x f32 [n] or [m, n] where the bit of a packed mask u32 [ceil(n / 32)] is set (bit i % 32 of word i / 32), else -inf.", "mask_apply",
     dtypes=_F32)  # fmt: skip

# Pivots: bool keep-masks of each row.
_row("pivot_rank", 2, "pivot", rules.pivot_rank, {}, {}, memory_numerics.pivot_rank,
     "True where fewer than k elements of the row are strictly greater (ties may keep more than k); never a NaN.", dtypes=_F32,
     constants={1: "u32"})  # fmt: skip
_row("pivot_mass", 3, "pivot", rules.pivot_mass, {}, {}, memory_numerics.pivot_mass,
     "Of order, x and p: true while the probabilities x walked before an element, in descending order, sum to less than p; in units of "
     "2^-30; never where the order is a NaN.", dtypes=_F32, constants={2: "f32"})  # fmt: skip

# Skeletons: from memory to memory.
_row("cumsum", 1, "skeleton", rules.cumulative, {}, {}, lambda np, a: memory_numerics.running(np, a, "cumsum"),
     "Running sum along the last axis, left to right; integers wrap.", "cumsum", dtypes=NUMERIC)  # fmt: skip
_row("cumprod", 1, "skeleton", rules.cumulative, {}, {}, lambda np, a: memory_numerics.running(np, a, "cumprod"),
     "Running product along the last axis, left to right; integers wrap.", "cumprod", dtypes=NUMERIC)  # fmt: skip
_row("sort_desc", 1, "skeleton", rules.sort, {}, {}, memory_numerics.sort_desc,
     "Each row of rank 1 or 2 in descending order, ties by lower index, NaN last: values, and u32 indices.", dtypes=NUMERIC,
     results=2)  # fmt: skip
_row("top_k", 1, "skeleton", rules.top_k, {}, {}, memory_numerics.top_k,
     "The first k of sort_desc of each row: values, and u32 indices.", attrs={"k": MAX_ELEMENTS + 1}, dtypes=NUMERIC,
     results=2)  # fmt: skip
_row("matmul", 2, "skeleton", rules.matmul, {}, {}, memory_numerics.matmul, "Matrix product: f32 [m, k] and f32 [k, n] give f32 [m, n].",
     "matmul", dtypes=_F32)  # fmt: skip
_row("scatter_add", 3, "skeleton", rules.scatter_add, {}, {}, memory_numerics.scatter_add,
     "base [n, …] with values [m, …] added at rows idx [m], in index order; an index out of range is skipped.", dtypes=NUMERIC)  # fmt: skip
_row(
    "scatter_set",
    3,
    "skeleton",
    rules.scatter_set,
    {},
    {},
    memory_numerics.scatter_set,
    "base [n, …] with values [m, …] stored at rows idx [m], the last of equal indices wins; out of range is skipped.",
)
_row("pick", 1, "pick", rules.pick, {}, {}, None, "Result i of an op with several: the u32 indices of sort_desc or top_k.",
     attrs={"i": 2}, dtypes=NUMERIC)  # fmt: skip

# Reductions along the last axis of rank 1 to 4. Sums run in a fixed tree.
_ISUM = {d: Fold(d, f"{z}", "{0}", "{0} + {1}", "{0}") for d, z in (("f32", "0.0"), ("i32", "0i"), ("u32", "0u"))}
_row("reduce_sum", 1, "reduce", rules.reduce_same, _ISUM,
     {"f32": CFold("wasm_f32x4_splat(0.0f)", "wasm_f32x4_add(acc, a)"), **{
         d: CFold("wasm_i32x4_splat(0)", "wasm_i32x4_add(acc, a)") for d in ("i32", "u32")}},
     lambda np, a: np.sum(a, axis=-1, dtype=a.dtype), "Sum along the last axis; integers wrap.", "reduce_sum")  # fmt: skip
_row("reduce_max", 1, "reduce", rules.reduce_same,
     {"f32": Fold("u32", "0x007fffffu", "f_key({0})", "max({0}, {1})", "f_unkey({0})"),
      "i32": Fold("i32", "-2147483647i - 1i", "{0}", "max({0}, {1})", "{0}"), "u32": Fold("u32", "0u", "{0}", "max({0}, {1})", "{0}")},
     {"f32": CFold("wasm_f32x4_splat(-__builtin_inff())", "wasm_f32x4_pmax(acc, a)", "wasm_f32x4_add(acc, wasm_f32x4_splat(0.0f))"),
      "i32": CFold("wasm_i32x4_splat((int)0x80000000)", "wasm_i32x4_max(acc, a)"),
      "u32": CFold("wasm_i32x4_splat(0)", "wasm_u32x4_max(acc, a)")},
     numerics.reduce_max, "Largest element along the last axis; ignores NaN, -inf when all are NaN.", "reduce_max")  # fmt: skip
_row("reduce_min", 1, "reduce", rules.reduce_same,
     {"f32": Fold("u32", "0x007fffffu", "f_down_key({0})", "max({0}, {1})", "f_unkey(~{0})"),
      "i32": Fold("i32", "2147483647i", "{0}", "min({0}, {1})", "{0}"), "u32": Fold("u32", "0xffffffffu", "{0}", "min({0}, {1})", "{0}")},
     {"f32": CFold("wasm_f32x4_splat(__builtin_inff())", "wasm_f32x4_pmin(acc, a)", "wasm_f32x4_add(acc, wasm_f32x4_splat(0.0f))"),
      "i32": CFold("wasm_i32x4_splat(0x7fffffff)", "wasm_i32x4_min(acc, a)"),
      "u32": CFold("wasm_i32x4_splat(-1)", "wasm_u32x4_min(acc, a)")},
     numerics.reduce_min, "Smallest element along the last axis; ignores NaN, +inf when all are NaN.", "reduce_min")  # fmt: skip
_row("reduce_argmax", 1, "reduce", rules.reduce_index,
     {"f32": Fold("u32", "0u", "f_key({0})", "", "", True), "i32": Fold("u32", "0u", "bitcast<u32>({0}) ^ 0x80000000u", "", "", True),
      "u32": Fold("u32", "0u", "{0}", "", "", True)},
     {"f32": "argmax_f32", "i32": "argmax_i32", "u32": "argmax_u32"}, numerics.reduce_argmax,
     "i32 index of the largest element of the last axis; lowest on ties, never a NaN; 0 where all are NaN, and where all are -inf.",
     "reduce_argmax")  # fmt: skip

# Effects on channels, in program order, never removed.
_row("take", 0, "effect", rules.source, {}, {}, None, "Consume the channel's cell.", attrs={"chan": MAX_INDEX})
_row("read", 0, "effect", rules.source, {}, {}, None, "Peek at the channel's cell.", attrs={"chan": MAX_INDEX})
_row("put", 1, "effect", rules.same, {}, {}, None, "Put a value into the channel.", attrs={"chan": MAX_INDEX})

PURE_KINDS = ("source", "elementwise", "generator", "view", "lookup", "pivot", "reduce", "skeleton", "pick")


def variant(op: str, arg_dtypes: tuple[str, ...], dtype: str, column: Mapping[str, Any]) -> Any:
    """The entry of a code column for these operand dtypes. KeyError names a gap in the table."""
    if "" in column:
        return column[""]
    key = f"{arg_dtypes[0]}>{dtype}" if op == "cast" else arg_dtypes[-1]
    return column[key]
