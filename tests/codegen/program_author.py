"""The author of random well-typed programs over all ops: what it knows of each value, and one function a step.

A value is `equal`, the same bits on every device (integers, bools, whole f32 numbers and what is found or compared among them), or has a
magnitude m, that of the same expression over absolute values: two devices differ by at most 1e-5 * m there, also where terms cancel.
Ops that jump (comparisons, casts to integers, sorting, pivots, argmax) take equal values only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pie_core.eta import Tensor, intrinsics
from tests.codegen.author import Chan, F, counter

SIZES = (1, 2, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 4096)  # both sides of every size switch of the devices
SMALL = (1, 2, 3, 5)
MAX_MAGNITUDE = 1e4
MAX_ELEMENTS = 1 << 14
JUMPS = ("gt", "ge", "eq", "ne", "lt", "le")


@dataclass(frozen=True, eq=False)
class Value:
    """`equal`: the same bits everywhere. `whole`: an f32 that holds whole numbers up to 1000 (or infinities and NaN). `m`: see above."""

    x: Tensor
    equal: bool = True
    whole: bool = True
    m: float = 1000.0

    @property
    def dtype(self) -> str:
        """Of the tensor."""
        return self.x.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return self.x.shape


class Author:
    """Writes a program, one random step after the other; call it inside of a trace. `outs` and `puts` remember what was returned."""

    def __init__(self, pick: random.Random, steps: int = 14, largest: int = 4096) -> None:
        self.pick = pick
        self.steps = steps
        sizes = [s for s in SIZES if s <= largest]
        self.vocab = pick.choice(sizes)
        self.hidden = pick.choice((*SMALL, 33))
        self.rows = pick.choice((1, 2, 3))
        n, m = self.vocab, pick.choice(SMALL)
        d = self.hidden
        self.channels = [
            Chan("f32", (n,)), Chan("i32", (n,)), Chan("bool", (n,)), Chan("u32", (m,)), Chan("f32", (m, d)), Chan("i32", (d, m)),
            Chan("u32", (d, 2)), Chan("bool", (m, d)), Chan("i32"), Chan("bool"), counter(),
        ]  # fmt: skip
        self.values: list[Value] = []
        self.outs: list[Value] = []
        self.puts: list[tuple[Chan, Value]] = []

    def __call__(self) -> tuple[Tensor, ...]:
        pick = self.pick
        self.values = [Value(intrinsics.output(pick.randrange(self.rows)))]
        if pick.random() < 0.5:
            self.values.append(Value(intrinsics.output(pick.randrange(self.rows), "hidden")))
        if self.rows * self.vocab <= MAX_ELEMENTS and pick.random() < 0.5:
            self.values.append(Value(intrinsics.outputs(pick.choice(("logits", "hidden")))))
        self.state = F["constant"](5, "u32") + F["iota"](2)
        for channel in pick.sample(self.channels, pick.randrange(len(self.channels))):
            peek = pick.random() < 0.2 and not channel.is_counter
            self.values.append(Value(channel.read() if peek else channel.take()))
            if channel.is_counter:
                self.state = self.values[-1].x
            elif not peek and pick.random() < 0.5:
                self.put(channel)
                if pick.random() < 0.3:
                    self.values.append(self.taken_back(channel))
        for _ in range(pick.randrange(3, self.steps)):
            self.values += self.step()
        for channel in self.channels[:-1]:
            if pick.random() < 0.3 and not any(c is channel for c, _ in self.puts):
                self.put(channel)
        self.outs = pick.sample(self.values, min(len(self.values), pick.randrange(1, 6)))
        if self.values[-1] not in self.outs:
            self.outs.append(self.values[-1])
        return tuple(v.x for v in self.outs)

    def put(self, channel: Chan) -> None:
        """Something that fits, if the channel was not only read."""
        fits = [v for v in self.values if v.x.type == (channel.dtype, channel.shape)]
        if fits:
            value = self.pick.choice(fits)
            try:
                channel.put(value.x)
            except TypeError:  # only read in this pass
                return
            self.puts.append((channel, value))

    def taken_back(self, channel: Chan) -> Value:
        """The pending value through the register, if there is one."""
        if self.puts and self.puts[-1][0] is channel:
            value = self.puts[-1][1]
            return Value(channel.read(), value.equal, value.whole, value.m)
        return self.values[-1]

    def step(self) -> list[Value]:
        """New values of one random step; none where it found no operands."""
        return self.pick.choice(STEPS)(self)

    # --- operands

    def one(self, test: Callable[[Value], bool]) -> Value | None:
        """Some value that passes; any dtype as likely as another half of the time, as most values are f32."""
        fits = [v for v in self.values if test(v)]
        if fits and self.pick.random() < 0.5:
            dtype = self.pick.choice(sorted({v.dtype for v in fits}))
            fits = [v for v in fits if v.dtype == dtype]
        return self.pick.choice(fits) if fits else None

    def number(self, dtype: str) -> Any:
        """A Python scalar of a dtype."""
        if dtype == "bool":
            return self.pick.random() < 0.5
        if dtype == "f32":
            return float(self.pick.randrange(-9, 10))
        return self.pick.choice((0, 1, 2, 7, 1000, 2**31 - 1)) if self.pick.random() < 0.5 else self.pick.randrange(50)

    def partner(self, a: Value, *, divisor: bool = False) -> Value:
        """A value beside `a`: of its shape or a scalar; a constant `divisor` is not 0, which the tracer refuses."""
        fits = [v for v in self.values if v.dtype == a.dtype and (v.shape == a.shape or not v.shape)]
        if fits and self.pick.random() < 0.7:
            return self.pick.choice(fits)
        number = self.number(a.dtype)
        number = 3 if divisor and a.dtype in ("i32", "u32") and number == 0 else number
        return Value(F["constant"](number, a.dtype), m=1000.0)

    def small(self, v: Value, most: float = 1000.0) -> Value:
        """f32 values cut off to `most`, which also takes NaN away; whole numbers stay whole."""
        if v.dtype != "f32":
            return v
        return Value(F["maximum"](F["minimum"](v.x, most), -most), v.equal, v.whole, min(v.m, most) if v.equal else v.m)

    def indices(self, n: int, shape: tuple[int, ...]) -> Tensor:
        """Places in 0..n-1, mostly: i32 may be negative, u32 huge, both too large."""
        count = int(np.prod(shape)) if shape else 1
        flat = (F["iota"](count) * self.pick.choice((1, 3, 7)) + self.pick.randrange(4)) % (n + self.pick.choice((0, 0, 1, 3)))
        flat = flat // 2 if self.pick.random() < 0.3 else flat  # places that come twice
        flat = flat - 1 if self.pick.random() < 0.3 else flat
        flat = flat.cast("i32") if self.pick.random() < 0.5 else flat
        return F["reshape"](flat, shape)


def _made(x: Tensor, *of: Value, m: float | None = None, whole: bool | None = None) -> list[Value]:
    """x made of values without arithmetic, or with arithmetic on whole numbers when `whole` says so."""
    equal = all(v.equal for v in of)
    return [Value(x, equal, all(v.whole for v in of) if whole is None else whole, m if m is not None else max(v.m for v in of))]


def _rounded(x: Tensor, m: float) -> list[Value]:
    return [Value(x, False, False, m)] if m <= MAX_MAGNITUDE else []


def arithmetic(a: Author) -> list[Value]:
    """add sub mul max min rem div, neg abs sign."""
    left = a.one(lambda v: v.dtype != "bool")
    if left is None:
        return []
    right = a.partner(left, divisor=True)
    name = a.pick.choice(("add", "sub", "mul", "max", "min", "rem", "div", "neg", "abs", "sign"))
    name = "sub" if left.dtype == "bool" else name
    function = F[{"max": "maximum", "min": "minimum", "abs": "absolute"}.get(name, name)]
    if name in ("neg", "abs"):
        return _made(function(left.x), left)
    if name == "sign":
        return _made(function(left.x), left, m=1.0, whole=True) if left.equal else []
    if left.dtype != "f32":
        return _made(function(left.x, right.x), left, right)
    if name in ("max", "min"):
        return _made(function(left.x, right.x), left, right)
    exact = left.equal and right.equal and left.whole and right.whole
    if exact and name != "div":
        left, right = a.small(left), a.small(right)
        made = _made(function(left.x, right.x), left, right)[0]
        return [a.small(made)]
    left, right = a.small(left), a.small(right)
    if name == "rem":
        return _made(left.x % right.x, left, right, whole=False) if left.equal and right.equal else []
    if name == "div":
        return _rounded(left.x / (F["absolute"](right.x) + 1.0), left.m * (1.0 + (0.0 if right.equal else right.m)))
    return _rounded(function(left.x, right.x), left.m * right.m if name == "mul" else left.m + right.m)


def compare(a: Author) -> list[Value]:
    """Comparisons of equal values."""
    left = a.one(lambda v: v.dtype != "bool" and v.equal)
    if left is None:
        return []
    right = a.partner(left)
    return _made(F[a.pick.choice(JUMPS)](left.x, right.x), left, right) if right.equal else []


def logic(a: Author) -> list[Value]:
    """and or not."""
    left = a.one(lambda v: v.dtype == "bool")
    if left is None:
        return []
    name = a.pick.choice(("logical_and", "logical_or", "logical_not"))
    right = a.partner(left)
    return _made(F[name](left.x) if name == "logical_not" else F[name](left.x, right.x), left, right)


def select(a: Author) -> list[Value]:
    """select by a condition of the shape, or a scalar one."""
    left = a.one(lambda v: True) or a.values[0]
    right = a.partner(left)
    shape = left.shape or right.shape
    cond = a.one(lambda v: v.dtype == "bool" and v.shape in (shape, ()))
    return _made(F["select"](cond.x if cond else a.pick.random() < 0.5, left.x, right.x), left, right)


def cast(a: Author) -> list[Value]:
    """To another dtype."""
    v = a.one(lambda v: True) or a.values[0]
    dtype = a.pick.choice(("f32", "i32", "u32", "bool"))
    if dtype != "f32" and not v.equal:
        return []
    made = Value(v.x.cast(dtype), v.equal, v.whole if v.dtype == "f32" else True, v.m)
    return [a.small(made)]


def transcendental(a: Author) -> list[Value]:
    """exp log recip sin cos sqrt rsqrt tanh, kept away from their poles."""
    v = a.one(lambda v: v.dtype == "f32")
    if v is None:
        return []
    name = a.pick.choice(("exp", "log", "recip", "sin", "cos", "sqrt", "rsqrt", "tanh"))
    error = 0.0 if v.equal else v.m  # what the operand may differ by, in units of 1e-5
    if name == "exp":
        v = a.small(v, 4.0)
        return _rounded(F["exp"](v.x), 55.0 * (1.0 + error))
    v = a.small(v)
    if name in ("sin", "cos", "tanh"):
        return _rounded(F[name](v.x), 1.0 + error)
    return _rounded(F[name](F["absolute"](v.x) + 1.0), 32.0 + error)


def view(a: Author) -> list[Value]:
    """reshape, broadcast, transpose."""
    v = a.one(lambda v: True) or a.values[0]
    n = int(np.prod(v.shape)) if v.shape else 1
    kind = a.pick.randrange(3) if len(v.shape) != 2 or a.pick.random() < 0.5 else 1
    if kind == 0:
        shapes = [(n,), (1, n), (n, 1), (1, n, 1)] + [(n // 2, 2), (2, n // 2)] * (n % 2 == 0)
        return _made(F["reshape"](v.x, a.pick.choice(shapes)), v)
    if kind == 1 and len(v.shape) == 2:
        return _made(F["transpose"](v.x), v)
    times = a.pick.choice(SMALL)
    if n * times > MAX_ELEMENTS or len(v.shape) == 4:
        return []
    if v.shape and a.pick.random() < 0.5:
        return _made(F["broadcast"](F["reshape"](v.x, (1, *v.shape)), (times, *v.shape)), v)
    return _made(F["broadcast"](v.x, (*v.shape, times)), v)


def generator(a: Author) -> list[Value]:
    """iota and the random ops."""
    n = a.pick.choice((a.vocab, a.hidden, *SMALL))
    shape = a.pick.choice(((n,), (n,), (2, n), ()))
    name = a.pick.choice(("iota", "rng_uniform", "rng_gumbel", "rng_normal"))
    if name == "iota":
        return [Value(F["iota"](n))]
    state = a.one(lambda v: v.x.type == ("u32", (2,)))
    x = F[name](state.x if state else a.state, shape)
    return [Value(x, name == "rng_uniform", False, 1.0 if name == "rng_uniform" else 20.0)]


def gather(a: Author) -> list[Value]:
    """gather, along axis 0."""
    v = a.one(lambda v: len(v.shape) > 0)
    if v is None:
        return []
    shape = a.pick.choice(((), (3,), (2, 3), (a.hidden,), (a.vocab,)))
    width = int(np.prod(v.shape[1:])) if v.shape[1:] else 1
    if len(shape) + len(v.shape) > 5 or (int(np.prod(shape)) if shape else 1) * width > MAX_ELEMENTS:
        return []
    found = a.one(lambda i: i.dtype in ("i32", "u32") and i.shape == shape)
    index = found.x if found and a.pick.random() < 0.3 else a.indices(v.shape[0], shape)
    return _made(F["gather"](v.x, index), v)


def gather_row(a: Author) -> list[Value]:
    """gather_row of a matrix."""
    v = a.one(lambda v: len(v.shape) == 2)
    return _made(F["gather_row"](v.x, a.indices(v.shape[1], v.shape[:1])), v) if v else []


def mask_apply(a: Author) -> list[Value]:
    """A packed mask."""
    v = a.one(lambda v: v.dtype == "f32" and len(v.shape) in (1, 2))
    if v is None:
        return []
    words = F["iota"](-(-v.shape[-1] // 32)) * 0x9E3779B9 + a.pick.randrange(1 << 31)
    made = _made(F["mask_apply"](v.x, words), v)[0]
    return [made if v.whole else a.small(made)]


def pivot(a: Author) -> list[Value]:
    """By rank over equal values; by mass over multiples of 2^-10."""
    v = a.one(lambda v: v.dtype == "f32" and len(v.shape) in (1, 2) and v.equal)
    if v is None:
        return []
    if a.pick.random() < 0.5:
        count = a.one(lambda k: k.dtype == "u32" and not k.shape)
        return _made(F["pivot_threshold"](v.x, rank=count.x if count else a.pick.choice((0, 1, 2, 5, 40, 300))), v)
    if not v.whole:
        return []
    shares = F["absolute"](v.x) / 1024.0
    order = a.one(lambda o: o.dtype == "f32" and o.shape == v.shape and o.equal)
    by = order.x if order is not None and a.pick.random() < 0.5 else None
    return _made(F["pivot_threshold"](shares, mass=a.pick.choice((-1.0, 0.0, 0.001, 0.25, 0.5, 0.9, 1.0)), order=by), v)


def reduce(a: Author) -> list[Value]:
    """Along the last axis."""
    v = a.one(lambda v: len(v.shape) > 0 and v.dtype != "bool")
    if v is None:
        return []
    name = a.pick.choice(("reduce_sum", "reduce_max", "reduce_min", "reduce_argmax"))
    if name == "reduce_argmax":
        return _made(F[name](v.x), v) if v.equal else []
    if name != "reduce_sum" or v.dtype != "f32":
        return _made(F[name](v.x), v)
    n = v.shape[-1]
    if v.equal and v.whole:
        summed = Value(F[name](a.small(v).x))
        return [a.small(summed)]
    return _rounded(F[name](a.small(v).x), v.m * n)


def running(a: Author) -> list[Value]:
    """cumsum, cumprod."""
    v = a.one(lambda v: len(v.shape) > 0 and v.dtype != "bool")
    if v is None:
        return []
    name = a.pick.choice(("cumsum", "cumprod"))
    if v.dtype != "f32":
        return _made(F[name](v.x), v)
    if v.equal and v.whole:
        made = Value(F[name](a.small(v, 1000.0 if name == "cumsum" else 1.0).x))
        return [a.small(made)]
    if name == "cumsum":
        return _rounded(F[name](a.small(v).x), v.m * v.shape[-1])
    share = F["tanh"](a.small(v).x)  # a product of n factors of at most 1
    return _rounded(F[name](share), (1.0 + (0.0 if v.equal else v.m)) * v.shape[-1])


def sort(a: Author) -> list[Value]:
    """sort_desc, top_k of equal values."""
    v = a.one(lambda v: len(v.shape) in (1, 2) and v.dtype != "bool" and v.equal)
    if v is None:
        return []
    n = v.shape[-1]
    k = min(n, a.pick.choice((1, 2, 40, 257, n)))
    values, order = F["sort_desc"](v.x) if a.pick.random() < 0.5 else F["top_k"](v.x, k)
    both = [*_made(values, v), Value(order)]
    return both if a.pick.random() < 0.7 else both[a.pick.randrange(2) :]


def matmul(a: Author) -> list[Value]:
    """A matrix by itself turned, or by another one that fits."""
    left = a.one(lambda v: v.dtype == "f32" and len(v.shape) == 2)
    if left is None:
        return []
    right = a.one(lambda v: v.dtype == "f32" and len(v.shape) == 2 and v.shape[0] == left.shape[1])
    if right is None:
        right = Value(F["transpose"](left.x), left.equal, left.whole, left.m)
    m, k, n = *left.shape, right.shape[1]
    if m * n > MAX_ELEMENTS or m * k * n > 1 << 18:
        return []
    left, right = a.small(left, 16.0), a.small(right, 16.0)
    product = left.x @ right.x
    if left.equal and right.equal and left.whole and right.whole:
        return [a.small(Value(product))]
    return _rounded(product, left.m * right.m * k)


def scatter(a: Author) -> list[Value]:
    """scatter_add, scatter_set."""
    base = a.one(lambda v: len(v.shape) > 0)
    if base is None:
        return []
    count = a.pick.choice((1, 2, 40, base.shape[0]))
    if count * int(np.prod(base.shape)) // base.shape[0] > MAX_ELEMENTS:
        return []
    index, shape = a.indices(base.shape[0], (count,)), (count, *base.shape[1:])
    values = a.one(lambda v: v.dtype == base.dtype and v.shape in (shape, ())) or Value(
        F["constant"](a.number(base.dtype), base.dtype), m=9.0
    )
    if base.dtype == "bool" or a.pick.random() < 0.5:
        return _made(F["scatter_set"](base.x, index, values.x), base, values)
    if base.dtype != "f32":
        return _made(F["scatter_add"](base.x, index, values.x), base, values)
    base, values = a.small(base), a.small(values)
    made = F["scatter_add"](base.x, index, values.x)
    if base.equal and values.equal and base.whole and values.whole:
        return [a.small(Value(made))]
    return _rounded(made, base.m + values.m * count)


def library(a: Author) -> list[Value]:
    """Softmax and its relatives over what is small enough to stay well conditioned."""
    v = a.one(lambda v: v.dtype == "f32" and len(v.shape) in (1, 2))
    if v is None:
        return []
    error = 0.0 if v.equal else v.m
    x = a.small(v, 8.0).x
    name = a.pick.choice(("softmax", "log_softmax", "entropy", "l2norm"))
    return _rounded(F[name](x), {"softmax": 1.0, "l2norm": 1.0}.get(name, 32.0) + 4.0 * error)


STEPS: tuple[Callable[[Author], list[Value]], ...] = (
    arithmetic, arithmetic, arithmetic, compare, logic, select, cast, cast, transcendental, view, view, view, generator, gather, gather_row,
    gather_row, mask_apply, pivot, pivot, reduce, reduce, running, running, sort, sort, matmul, scatter, scatter, library,
)  # fmt: skip
