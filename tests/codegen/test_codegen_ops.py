"""Op by op: NumPy oracle against the cpu virtual machine, lavapipe (naga) and SwiftShader (Tint)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from pie_core.eta import OPS
from tests.codegen.author import F, over_cells
from tests.codegen.batch import Answer, Batch, Lane, check
from tests.codegen.cpu import cpu_machine
from tests.codegen.gpu import run_batches

N = 1029  # over a chunk of 1,024, not a multiple of 4
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, -2.5, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 2.0**31, -(2.0**31), 2.0**32, 1e-30, 88.0, -80.0]
F32, I32, U32, BOOL = (("f32", (N,)), ("i32", (N,)), ("u32", (N,)), ("bool", (N,)))


def floats(seed: int, scale: float = 10.0) -> Any:
    x = np.random.default_rng(seed).normal(0, scale, N).astype(np.float32)
    pairs = [(a, b) for a in SPECIAL for b in SPECIAL]
    x[: len(pairs)] = np.array([p[seed % 2] for p in pairs], np.float32)
    return x


def integers(seed: int, dtype: Any) -> Any:
    info = np.iinfo(dtype)
    x = np.random.default_rng(seed).integers(info.min, info.max, N, dtype=dtype, endpoint=True)
    small = [0, 1, 2, 3, 7, info.max, info.min, info.max - 1] + ([-1, -2, -7] if info.min else [5, 6, 9])
    pairs = [(a, b) for a in small for b in small]
    x[: len(pairs)] = np.array([p[seed % 2] for p in pairs], dtype)
    return x


def bools(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 2, N).astype(bool)


def unary(dtype: str) -> list[str]:
    return [r.name for r in OPS.values() if r.kind == "elementwise" and r.arity == 1 and dtype in r.wgsl]


def binary(dtype: str) -> list[str]:
    return [r.name for r in OPS.values() if r.kind == "elementwise" and r.arity == 2 and dtype in r.wgsl]


def apply(names: list[str]) -> Callable[..., Any]:
    return lambda *args: tuple(F[OPS[name].py](*args) for name in names)


BOTH = ["gt", "ge", "eq", "ne", "lt", "le"]
SMOOTH = floats(3, 3.0)
SMOOTH[: len(SPECIAL) ** 2] = np.tile(np.array([0.0, 1.0, -1.0, 5e-7, 80.0, -80.0, 1e30, np.inf, -np.inf], np.float32), 36)
TRIG = np.random.default_rng(4).uniform(-8192, 8192, N).astype(np.float32)
TRIG[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, np.pi]
NEAR_ONE = np.concatenate([1 - np.arange(1, 200) * 2.0**-24, np.arange(1, 200) * 2.0**-24, np.linspace(0.01, 5, N - 398)]).astype(
    np.float32
)

QUARTERS = (np.random.default_rng(7).integers(-400, 400, N) / 4).astype(np.float32)
DIVISORS = np.random.default_rng(8).uniform(0.5, 9, N).astype(np.float32)
ORDINARY = np.random.default_rng(9).normal(1, 1, N).astype(np.float32)
FRACTIONS = np.random.default_rng(10).uniform(1, 2, N).astype(np.float32)
DISTANT = FRACTIONS * (2.0 ** np.random.default_rng(11).uniform(-126, 127, N)).astype(np.float32)  # quotients of all sizes
SUBNORMAL = np.random.default_rng(12).integers(1, 1 << 23, N, dtype=np.uint32).view(np.float32)
RAMP = np.linspace(-3, 3, N).astype(np.float32)
INTS, WORDS = (integers(0, np.int32), integers(1, np.int32)), (integers(0, np.uint32), integers(1, np.uint32))


def both(dtype: str) -> Callable[..., Any]:
    """All unary ops of the first operand and all binary ops."""
    return lambda a, b: apply(unary(dtype))(a) + apply(binary(dtype))(a, b)


def shapes(x: Any) -> Any:
    top = F["reduce_max"](x)
    return F["reshape"](x, (3, 343)) + 1.0, F["broadcast"](top, (2, 5)), F["iota"](N), F["reshape"](F["broadcast"](top, 1), ())


def pairwise(name: str) -> list[str]:
    return [n for n in binary(name) if n not in ("rem", "div")] if name == "f32" else binary(name)


# name -> (function, cells with values, relative tolerance, absolute tolerance)
CASES: dict[str, tuple[Callable[..., Any], list[tuple[Any, Any]], float, float]] = {
    "f32 unary": (apply([n for n in unary("f32") if n not in ("sin", "cos")]), [(F32, SMOOTH)], 1e-6, 1e-37),
    "f32 trig": (apply(["sin", "cos"]), [(F32, TRIG)], 1e-6, 1e-6),
    "f32 log": (lambda x: (F["log"](x), -F["log"](-F["log"](x))), [(F32, NEAR_ONE)], 1e-6, 1e-6),
    "f32 binary": (apply(pairwise("f32")), [(F32, floats(0)), (F32, floats(1))], 1e-6, 1e-37),
    "f32 quotients": (
        lambda a, b: (a / b, a % 1.0, a % 0.75), [(F32, QUARTERS), (F32, DIVISORS)],
        2e-6, 2e-5,
    ),
    "f32 of one value": (  # compilers may not take x - x for 0, as it is not for NaN and infinities
        lambda x: (x - x, x / x, x * 0.0, x + -x, 0.0 - x, x % x, F["reduce_max"](x - x), *(F[n](x, x) for n in (*BOTH, "maximum"))),
        [(F32, floats(0))], 0, 0,
    ),
    "f32 remainders": (  # exact: they tell of a quotient that is off by one, and of a product that was rounded
        lambda a, b, c, d: (a % b, -a % b, b % a, c % d, d % c, a % d, d % a, c % b, c % 0.1, a % 1.2e-38),
        [(F32, floats(0)), (F32, floats(1)), (F32, DISTANT), (F32, SUBNORMAL)], 0, 0,
    ),
    "i32": (both("i32"), [(I32, INTS[0]), (I32, INTS[1])], 0, 0),
    "u32": (both("u32"), [(U32, WORDS[0]), (U32, WORDS[1])], 0, 0),
    "bool": (both("bool"), [(BOOL, bools(0)), (BOOL, bools(1))], 0, 0),
    "casts": (
        lambda *x: tuple(v.cast(d) for v in x for d in ("f32", "i32", "u32", "bool")),
        [(F32, floats(0, 1e9)), (I32, INTS[0]), (U32, WORDS[0]), (BOOL, bools(0))], 0, 0,
    ),
    "select": (
        lambda c, f, i: (F["select"](c, f, 1.5), F["select"](c, -1, i), F["select"](c, ~c, c), F["select"](True, f, f)),
        [(BOOL, bools(0)), (F32, floats(0)), (I32, INTS[1])], 0, 0,
    ),
    "scalars": (
        lambda x: (2.0 - x, x * 0.5, 3.0 / x, x > 0.25, F["maximum"](x, 0.0), F["minimum"](1.0, x), F["reduce_sum"](x) * 2.0 - 1.0),
        [(F32, RAMP)], 1e-6, 1e-3,
    ),
    "shapes": (shapes, [(F32, floats(2, 1.0))], 0, 0),
    "reductions": (
        lambda f, i, u: tuple(F[n](v) for n in ("reduce_sum", "reduce_max", "reduce_min", "reduce_argmax") for v in (f, i, u)),
        [(F32, ORDINARY), (I32, INTS[0]), (U32, WORDS[0])], 1e-6, 1e-6,
    ),
}  # fmt: skip


@lru_cache(maxsize=1)
def batches() -> dict[str, Batch]:
    made = {}
    for name, (fn, cells, _, _) in CASES.items():
        result = over_cells(fn, *[type_ for type_, _ in cells])
        made[name] = Batch(result.program, [Lane(0, result.params, {i: v for i, (_, v) in enumerate(cells)})])
    return made


@lru_cache(maxsize=4)
def answers(machine: str) -> dict[str, list[Answer]]:
    if machine == "cpu":
        return {name: cpu_machine().run(batch) for name, batch in batches().items()}
    return dict(zip(batches(), run_batches(machine, list(batches().values())), strict=True))


@pytest.mark.parametrize("machine", ["cpu", "lavapipe", "swiftshader"])
@pytest.mark.parametrize("name", CASES)
def test_ops(name: str, machine: str) -> None:
    _, _, rtol, atol = CASES[name]
    check(answers(machine)[name], batches()[name].oracle(), rtol, atol, f"{name} on {machine}")


def test_every_executable_variant_is_covered() -> None:
    """Each code variant of each elementwise and reduction row occurs in a program above."""
    seen: set[tuple[str, str]] = set()
    for batch in batches().values():
        ops = batch.program.ops
        for node in ops:
            if node.args:
                dtypes = [ops[a].dtype for a in node.args]
                key = f"{dtypes[0]}>{node.dtype}" if node.name == "cast" else dtypes[-1]
                seen.add((node.name, "" if "" in OPS[node.name].wgsl else key))
    missing = {(r.name, k) for r in OPS.values() if r.kind in ("elementwise", "reduce") for k in r.wgsl} - seen
    assert not missing


def argmax_cases() -> list[Any]:
    nan, inf = np.nan, np.inf
    rows = [
        [nan] * 40, [nan, -inf] + [nan] * 38, [-inf] * 40, [0.0, -0.0] * 20, [-0.0, 0.0] * 20, [1.0] * 40, list(range(40)),
        [nan, 5.0, 5.0, nan] * 10,
        [-inf, nan, inf, inf] * 10, [-3.0, -1.0, -2.0, -1.0] * 10, [1e-40, 2e-40, 2e-40, 0.0] * 10,
    ]  # fmt: skip
    return [np.array(r, np.float32) for r in rows]


@pytest.mark.parametrize("machine", ["cpu", "lavapipe", "swiftshader"])
@pytest.mark.parametrize("n", [40, 5000])
def test_ties_nan_and_infinities(machine: str, n: int) -> None:
    """Lowest index on ties, never NaN, all-NaN gives 0; max and min ignore NaN. Rows shorter and longer than a chunk."""
    names = ("reduce_argmax", "reduce_max", "reduce_min")
    result = over_cells(lambda x: (*[F[name](x) for name in names], F["reduce_argmax"](-x)), ("f32", (n,)))
    lanes = [Lane(0, result.params, {0: np.resize(row, n)}) for row in argmax_cases()]
    batch = Batch(result.program, lanes)
    got = cpu_machine().run(batch) if machine == "cpu" else run_batches(machine, [batch])[0]
    check(got, batch.oracle(), 0, 0, f"{machine} {n}")
    assert [int(a.outs[0]) for a in got[:4]] == [0, 1, 0, 0]


@pytest.mark.parametrize("machine", ["cpu", "lavapipe", "swiftshader"])
def test_a_late_maximum_is_found(machine: str) -> None:
    """The winner in every position class: first and last element, chunk borders, the tail of a vector."""
    places = [0, 3, 1023, 1024, 2047, 2048, 4095, 4096, 4097, 4098]
    result = over_cells(F["reduce_argmax"], ("f32", (4099,)))
    rows = [np.where(np.arange(4099) == p, 9.0, -1.0).astype(np.float32) for p in places]
    batch = Batch(result.program, [Lane(0, (), {0: row}) for row in rows])
    got = cpu_machine().run(batch) if machine == "cpu" else run_batches(machine, [batch])[0]
    assert [int(a.outs[0]) for a in got] == places
