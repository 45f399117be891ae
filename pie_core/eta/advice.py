"""What to write instead: the ends of error messages about what Python, NumPy or PyTorch would allow and a trace does not."""

from __future__ import annotations

_AWAIT = "await the output of the pass, that is the value"
_CAST = "cast(x, 'f32'), or 'i32', 'u32', 'bool'"
_RESHAPE = "reshape(x, shape)"
_ATTRIBUTES = {
    "sum": "reduce_sum(x)", "max": "reduce_max(x)", "amax": "reduce_max(x)", "min": "reduce_min(x)", "amin": "reduce_min(x)",
    "argmax": "reduce_argmax(x)", "argmin": "reduce_argmax(-x)", "mean": "reduce_sum(x) / x.shape[-1]", "any": "reduce_max(x.cast('i32'))",
    "all": "reduce_min(x.cast('i32'))", "T": "transpose(x)", "t": "transpose(x)", "item": _AWAIT, "tolist": _AWAIT, "numpy": _AWAIT,
    "astype": _CAST, "to": _CAST, "type": _CAST, "float": _CAST, "int": _CAST, "long": _CAST, "bool": _CAST, "view": _RESHAPE,
    "flatten": _RESHAPE, "ravel": _RESHAPE, "squeeze": _RESHAPE, "unsqueeze": _RESHAPE, "expand": "broadcast(x, shape)",
    "repeat": "broadcast(x, shape)", "clip": "minimum(maximum(x, low), high)", "clamp": "minimum(maximum(x, low), high)",
    "sort": "sort_desc(x)", "argsort": "sort_desc(x)", "topk": "top_k(x, k)", "size": "x.shape", "ndim": "len(x.shape)",
    "dim": "len(x.shape)", "pow": "x * x squares", "multinomial": "gumbel_max(x, state)", "masked_fill": "select(mask, value, x)",
}  # fmt: skip


def attribute_advice(name: str) -> str:
    """The end of a sentence that a Tensor has no attribute `name`; "" where nothing is known."""
    from pie_core.eta import FUNCTIONS  # it imports Tensor

    known = _ATTRIBUTES.get(name)
    if known is None and name in FUNCTIONS:
        known = f"{name} is a function, {name}(x)"
    return f": {known}" if known else ": it has dtype, shape and cast(dtype), all else are functions"


def is_channel(x: object) -> bool:
    """Whether x is an author's channel."""
    return hasattr(x, "take") and hasattr(x, "capacity")


def operand_advice(x: object) -> str:
    """The end of a message about an operand that is neither a Tensor nor a Python number; "" where nothing is known."""
    if is_channel(x):
        return "; .take() gives its value"
    if hasattr(type(x), "__await__"):
        return "; await it before the pass is made: its value is what enters"
    if type(x).__module__ == "numpy":
        return "; x.item() makes a Python number of one element, and arrays enter through Channel.of(x.tolist()) and .take()"
    if isinstance(x, (list, tuple)):
        return "; values enter through Channel.of(values) and .take()"
    return ""


def result_advice(x: object) -> str:
    """What a traced function returns instead of x."""
    if is_channel(x):
        return "return what its .take() gave, or put values into it and return nothing"
    if isinstance(x, (list, tuple)):
        return "return one flat tuple"
    if isinstance(x, (bool, int, float)):
        return "constant(x, dtype) makes one, though what is known now needs no epilogue"
    if x is None:
        return "leave out what is None, or return nothing at all"
    if isinstance(x, dict):
        return "return a tuple and name its outputs where the pass is made: a, b = fwd.epilogue(fn)"
    return "return a Tensor, a tuple of them, or nothing"
