"""The constants of the counter-based random generator; WGSL, C and NumPy are generated from this one table.

mix(x): x ^= x >> SHIFTS[0]; x *= MULS[0]; x ^= x >> SHIFTS[1]; x *= MULS[1]; x ^= x >> SHIFTS[2]   (mod 2^64)
seed = mix(key << 32 | counter) for a state u32[2] = [key, counter]
bits(i) = mix(seed + GAMMA * (i + 1)) >> 40 for the flat index i;  uniform(i) = min((bits + 0.5) / 2^24, 1 - 2^-24) in f32
gumbel(i) = -ln(-ln uniform(i));  normal(i) = sqrt(-2 ln uniform(2 i)) * cos(2 pi uniform(2 i + 1))
"""

from __future__ import annotations

MASK64 = 0xFFFFFFFFFFFFFFFF
SHIFTS = (27, 33, 27)
MULS = (0x3C79AC492BA7B653, 0x1C69B3F74AC4AE35)
GAMMA = 0x9E3779B97F4A7C15
BITS_SHIFT = 40
UNIFORM_SCALE = 2.0**-24
UNIFORM_MAX = 1.0 - 2.0**-24
TWO_PI = 6.283185307179586


def mix(x: int) -> int:
    """One round of the mixer on a 64-bit integer."""
    x ^= x >> SHIFTS[0]
    x = x * MULS[0] & MASK64
    x ^= x >> SHIFTS[1]
    x = x * MULS[1] & MASK64
    return x ^ (x >> SHIFTS[2])


def seed_of(key: int, counter: int) -> int:
    """The 64-bit seed of a state [key, counter]."""
    return mix((key & 0xFFFFFFFF) << 32 | (counter & 0xFFFFFFFF))


def bits(seed: int, index: int) -> int:
    """The 24 random bits of flat index `index`."""
    return mix((seed + GAMMA * (index + 1)) & MASK64) >> BITS_SHIFT
