"""The random generator: its integer definition, the NumPy lambdas, and that no mantissa gives an infinite Gumbel."""

from __future__ import annotations

import numpy as np

from pie_core.eta import numerics, rng


def test_numpy_follows_the_integer_definition() -> None:
    for key, counter in ((0, 0), (1, 2), (0xFFFFFFFF, 0xFFFFFFFF), (0x12345678, 0x9ABCDEF0)):
        seed = rng.seed_of(key, counter)
        with np.errstate(over="ignore"):
            bits = numerics.random_bits(np, np.array([key, counter], np.uint32), 100)
        assert bits.tolist() == [rng.bits(seed, i) for i in range(100)]


def test_pinned_bits() -> None:
    """The first bits of state [7, 3], worked out by hand-written 64-bit arithmetic: a change of constants fails here."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x ^= x >> 27
        x = x * 0x3C79AC492BA7B653 & mask
        x ^= x >> 33
        x = x * 0x1C69B3F74AC4AE35 & mask
        return x ^ x >> 27

    seed = mix(7 << 32 | 3)
    assert [rng.bits(rng.seed_of(7, 3), i) for i in range(64)] == [
        mix((seed + 0x9E3779B97F4A7C15 * (i + 1)) & mask) >> 40 for i in range(64)
    ]


def test_all_mantissas_give_finite_gumbel() -> None:
    for start in range(0, 1 << 24, 1 << 22):
        u = numerics.uniform_from_bits(np, np.arange(start, start + (1 << 22), dtype=np.uint64))
        assert u.dtype == np.float32 and u.min() > 0 and u.max() <= 1 - 2**-24
        assert np.isfinite(numerics.gumbel_from_uniform(np, u)).all()
    assert numerics.uniform_from_bits(np, np.array([(1 << 24) - 1], np.uint64))[0] == np.float32(1 - 2**-24), "u = 1.0 is clamped"


def test_moments() -> None:
    with np.errstate(over="ignore"):
        state = np.array([11, 0], np.uint32)
        uniform, gumbel, normal = (f(np, state, 200_000) for f in (numerics.uniform, numerics.gumbel, numerics.normal))
    assert abs(uniform.mean() - 0.5) < 0.005 and abs(uniform.var() - 1 / 12) < 0.002
    assert abs(gumbel.mean() - 0.5772) < 0.01 and abs(gumbel.var() - np.pi**2 / 6) < 0.05
    assert abs(normal.mean()) < 0.01 and abs(normal.var() - 1) < 0.02
