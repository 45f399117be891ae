"""Poem: the model language. Its op rows stand beside eta's in the trace of a model; a tensor has the shape of ONE token row.

Model files use the functions below and eta's operators. Weights are handles (`Param`) with their checkpoint format; the
state of a layer, its KV cache and its recurrences, is a `Cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pie_core.eta.dtypes import f32_bits
from pie_core.eta.ops import OPS, Op
from pie_core.eta.rules import Attrs, RuleError, Type, show
from pie_core.eta.tensor import Tensor
from pie_core.poem.errors import PoemError

if TYPE_CHECKING:
    from pie_core.weights import Checkpoint


@dataclass(frozen=True)
class Param:
    """A parameter of the checkpoint: `fmt` as stored, a matrix [rows, cols] (out, in) or a vector [1, cols]."""

    name: str
    fmt: str
    rows: int
    cols: int


class Parameters:
    """The checkpoint's tensors under a name prefix; every request checks the shape."""

    def __init__(self, checkpoint: Checkpoint, prefix: str = "", used: dict[str, Param] | None = None) -> None:
        self._checkpoint, self._prefix = checkpoint, prefix
        self.used: dict[str, Param] = {} if used is None else used

    def scope(self, name: str) -> Parameters:
        """The parameters below `name.`."""
        return Parameters(self._checkpoint, f"{self._prefix}{name}.", self.used)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor."""
        return self._prefix + name in self._checkpoint.tensors

    def matrix(self, name: str, rows: int, cols: int) -> Param:
        """The matrix [rows, cols]. Raises MissingKey, or PoemError when its shape differs or cols is not a multiple of 32."""
        p = self._get(name, rows, cols)
        if cols % 32:
            raise PoemError(f"tensor {p.name!r} has {cols} columns; kernels need a multiple of 32")
        return p

    def vector(self, name: str, width: int) -> Param:
        """The f32 vector [width]. Raises MissingKey, or PoemError when its shape or format differs."""
        p = self._get(name, 1, width)
        if p.fmt != "f32":
            raise PoemError(f"tensor {p.name!r} is stored as {p.fmt}; vectors must be f32")
        return p

    def _get(self, name: str, rows: int, cols: int) -> Param:
        info = self._checkpoint.tensor(self._prefix + name)
        if info.shape != (rows, cols):
            raise PoemError(f"tensor {info.name!r} has shape {list(info.shape)}, the metadata asks for {[rows, cols]}")
        return self.used.setdefault(info.name, Param(info.name, info.fmt, rows, cols))


class Cache:
    """The state of one layer: its paged KV cache, to which `append` adds every token, and recurrent states that `recur` advances.
    `width`: of K, 0 without any; `states`: width of each recurrent state by name."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.width = 0
        self.states: dict[str, int] = {}

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store k and v, each [kv_heads * head_dim], at the token's slot, before any attention of this layer."""
        if self.width:
            raise PoemError(f"layer {self.layer} appends to its cache twice")
        self.width = k.shape[0]
        k.trace.add("kv_append", (k, v), {"layer": self.layer})

    def recur(self, name: str, x: Tensor, decay: Param, gain: Param) -> Tensor:
        """Advance the layer's recurrent state `name`, f32 [width] and zero before the first token: h = decay * h + gain * x, elementwise,
        for x [width] and the vectors decay and gain. Returns the token's h [width]. Raises PoemError."""
        width = x.shape[0]
        if name in self.states:
            raise PoemError(f"layer {self.layer} advances its state {name!r} twice")
        if width % 4:
            raise PoemError(f"layer {self.layer}: state {name!r} has width {width}; kernels need a multiple of 4")
        for what, w in (("decay", decay), ("gain", gain)):
            if (w.fmt, w.rows, w.cols) != ("f32", 1, width):
                raise PoemError(f"layer {self.layer}: {what} {w.name!r} of state {name!r} must be an f32 vector of {width}, like x")
        self.states[name] = width
        return x.trace.add("recur", (x,), {"layer": self.layer, "state": name, "w": decay.name, "gain": gain.name})


# --- rows


def _row(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    """f32 vectors in, the declared type out."""
    for a in args:
        if a[0] != "f32" or len(a[1]) != 1:
            raise RuleError(f"takes an f32 row, got {show(a)}")
    return declared or args[0]


def _declared(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    if declared is None:
        raise RuleError("needs its result type")
    return declared


def _pair(args: Sequence[Type], attrs: Attrs, declared: Type | None) -> Type:
    if args[0] != args[1]:
        raise RuleError(f"k is {show(args[0])} and v {show(args[1])}; they must be equal")
    return _row(args, attrs, declared)


def _op(name: str, arity: int, kind: str, rule: object, doc: str) -> Op:
    return Op(name, arity, {}, kind, rule, {}, {}, None, doc)  # type: ignore[arg-type]


_ROWS = (
    _op("tokens", 0, "source", _declared, "The token id of the row: u32 scalar."),
    _op("embed", 1, "model", _declared, "Row `token` of an embedding matrix."),
    _op("linear", 1, "model", _row, "W x for a (quantised) matrix W."),
    _op("rms_norm", 1, "model", _row, "x / sqrt(mean(x^2) + eps) * w (arXiv:1910.07467)."),
    _op("rope", 1, "model", _row, "Rotary positions on every head (arXiv:2104.09864)."),
    _op("kv_append", 2, "effect", _pair, "Store k and v of the row in a layer's cache."),
    _op("attention", 1, "model", _row, "softmax(scale q K) V over the visible positions."),
    _op("recur", 1, "model", _row, "h = decay * h + gain * x over the tokens of a sequence; h is kept in a state slot."),
    _op("read_out", 1, "model", _row, "The rows that the batch reads out; everything after it runs for those only."),
)
TABLE: dict[str, Op] = {**OPS, **{r.name: r for r in _ROWS}}
ELEMENTWISE = frozenset(r.name for r in OPS.values() if r.kind == "elementwise")


# --- functions for model files


def embed(tokens: Tensor, w: Param) -> Tensor:
    """Row of `w` [vocab, width] for each token: [width]."""
    return tokens.trace.add("embed", (tokens,), {"w": w.name}, ("f32", (w.cols,)))


def linear(x: Tensor, w: Param) -> Tensor:
    """w [m, k] times x [k]: [m]. Raises PoemError when k differs."""
    if x.shape != (w.cols,):
        raise PoemError(f"linear {w.name!r} takes a row of {w.cols}, got {show(x.type)}")
    return x.trace.add("linear", (x,), {"w": w.name}, ("f32", (w.rows,)))


def rms_norm(x: Tensor, w: Param, eps: float) -> Tensor:
    """x [n] normalised by its root mean square, times w [n]. Raises PoemError when n differs."""
    if x.shape != (w.cols,):
        raise PoemError(f"rms_norm {w.name!r} takes a row of {w.cols}, got {show(x.type)}")
    return x.trace.add("rms_norm", (x,), {"w": w.name, "eps": f32_bits(eps)})


def rope(x: Tensor, head_dim: int, base: float, style: str = "half") -> Tensor:
    """Rotate every head of x [heads * head_dim] by the row's position.

    style: "interleaved" pairs elements (2j, 2j+1), "half" pairs (j, j + head_dim/2). Pair j turns by pos * base^(-2j/head_dim).
    """
    if x.shape[0] % head_dim or head_dim % 2 or style not in ("interleaved", "half"):
        raise PoemError(f"rope: head_dim {head_dim} must be even and divide {x.shape[0]}, style {style!r} be interleaved or half")
    return x.trace.add("rope", (x,), {"dim": head_dim, "base": f32_bits(base), "style": style})


def attention(q: Tensor, kv: Cache, *, scale: float, head_dim: int) -> Tensor:
    """Grouped-query attention of q [heads * head_dim] over `kv`: [heads * head_dim]. Call after `kv.append`."""
    if not kv.width:
        raise PoemError(f"layer {kv.layer}: append to the cache before attention, a token sees itself")
    if q.shape[0] % head_dim or kv.width % head_dim or (q.shape[0] // head_dim) % (kv.width // head_dim):
        raise PoemError(f"attention: q of {q.shape[0]} and k of {kv.width} do not divide into grouped heads of {head_dim}")
    return q.trace.add("attention", (q,), {"layer": kv.layer, "dim": head_dim, "kv": kv.width, "scale": f32_bits(scale)})


def read_out(h: Tensor) -> Tensor:
    """The rows that are read out. What follows (the head) is not computed for other tokens."""
    return h.trace.add("read_out", (h,))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) (arXiv:1702.03118)."""
    return x / (1.0 + x.trace.op("exp", -x))
