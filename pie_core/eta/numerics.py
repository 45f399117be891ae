"""NumPy lambdas of the op table that need more than one call; `np` is always passed in, never imported."""

from __future__ import annotations

from typing import Any

from pie_core.eta import rng

Array = Any
NumPy = Any
NUMPY_DTYPE = {"f32": "float32", "i32": "int32", "u32": "uint32", "bool": "bool"}


def sort_key(np: NumPy, x: Array) -> Array:
    """f32 to ordered u32: NaN is 0, -0 equals +0, larger is greater. The device code compares through the same key."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    bits = np.where(magnitude == 0, np.uint32(0), bits)
    key = np.where(bits >> np.uint32(31) != 0, ~bits, bits ^ np.uint32(0x80000000))
    return np.where(magnitude > np.uint32(0x7F800000), np.uint32(0), key).astype(np.uint32)


def larger(np: NumPy, a: Array, b: Array) -> Array:
    """Elementwise max: the other operand where one is NaN; the second where they are equal."""
    return np.where((a > b) | np.isnan(b), a, b)


def smaller(np: NumPy, a: Array, b: Array) -> Array:
    """Elementwise min, like `larger`."""
    return np.where((a < b) | np.isnan(b), a, b)


def sign(np: NumPy, a: Array) -> Array:
    """-1, 0 or 1; 0 for NaN."""
    return ((a > 0).astype(a.dtype) - (a < 0).astype(a.dtype)).astype(a.dtype)


def divide(np: NumPy, a: Array, b: Array) -> Array:
    """f32 quotient; integers truncate, and give 0 for divisor 0."""
    if a.dtype.kind == "f":
        return a / b
    wide, by = a.astype(np.int64), b.astype(np.int64)
    quotient = np.sign(wide) * np.sign(by) * (np.abs(wide) // np.where(by == 0, 1, np.abs(by)))
    return np.where(by == 0, 0, quotient).astype(a.dtype)


def remainder(np: NumPy, a: Array, b: Array) -> Array:
    """Remainder with the sign of the dividend; integers give 0 for divisor 0."""
    if a.dtype.kind == "f":
        return np.fmod(a, b)
    wide, by = a.astype(np.int64), b.astype(np.int64)
    return np.where(by == 0, 0, np.fmod(wide, np.where(by == 0, 1, by))).astype(a.dtype)


def cast(np: NumPy, a: Array, dtype: str) -> Array:
    """Conversion; f32 to integers truncates and saturates (NaN is 0); to bool is x != 0."""
    if dtype == "bool":
        return a != 0
    if a.dtype.kind == "f" and dtype in ("i32", "u32"):
        low, high = (0, 0xFFFFFFFF) if dtype == "u32" else (-0x80000000, 0x7FFFFFFF)
        wide = np.trunc(np.where(np.isnan(a), 0, a).astype(np.float64))
        return np.clip(wide, low, high).astype(np.int64).astype(NUMPY_DTYPE[dtype])
    return a.astype(NUMPY_DTYPE[dtype])


def reduce_max(np: NumPy, a: Array) -> Array:
    """Maximum without NaN; -inf when all are NaN; a zero is +0."""
    if a.dtype.kind == "f":
        return np.max(np.where(np.isnan(a), np.float32(-np.inf), a), axis=-1) + np.float32(0)
    return np.max(a, axis=-1)


def reduce_min(np: NumPy, a: Array) -> Array:
    """Minimum without NaN; +inf when all are NaN; a zero is +0."""
    if a.dtype.kind == "f":
        return np.min(np.where(np.isnan(a), np.float32(np.inf), a), axis=-1) + np.float32(0)
    return np.min(a, axis=-1)


def reduce_argmax(np: NumPy, a: Array) -> Array:
    """Lowest index of the maximum, never of a NaN; 0 when all are NaN."""
    return np.argmax(sort_key(np, a) if a.dtype.kind == "f" else a, axis=-1).astype(np.int32)


def random_bits(np: NumPy, state: Array, n: int) -> Array:
    """The 24 random bits of flat indices 0..n-1, as u64."""
    seed = rng.seed_of(int(state[0]), int(state[1]))
    index = np.arange(1, n + 1, dtype=np.uint64)
    x = np.uint64(seed) + np.uint64(rng.GAMMA) * index
    for shift, factor in zip(rng.SHIFTS, rng.MULS, strict=False):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(rng.SHIFTS[2]))) >> np.uint64(rng.BITS_SHIFT)


def uniform_from_bits(np: NumPy, bits: Array) -> Array:
    """f32 in (0, 1): (bits + 0.5) / 2^24, at most 1 - 2^-24."""
    value = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(rng.UNIFORM_SCALE)
    return np.minimum(value, np.float32(rng.UNIFORM_MAX))


def uniform(np: NumPy, state: Array, n: int) -> Array:
    """n uniform f32 in (0, 1)."""
    return uniform_from_bits(np, random_bits(np, state, n))


def gumbel_from_uniform(np: NumPy, u: Array) -> Array:
    """-ln(-ln u) in f32."""
    return -np.log(-np.log(u))


def gumbel(np: NumPy, state: Array, n: int) -> Array:
    """n standard Gumbel f32."""
    return gumbel_from_uniform(np, uniform(np, state, n))


def normal(np: NumPy, state: Array, n: int) -> Array:
    """n standard normal f32: Box-Muller cosine over uniforms 2i and 2i+1."""
    u = uniform(np, state, 2 * n)
    angle = (np.float64(rng.TWO_PI) * u[1::2]).astype(np.float64)
    return (np.sqrt(np.float32(-2) * np.log(u[::2])) * np.cos(angle)).astype(np.float32)
