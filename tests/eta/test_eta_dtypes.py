"""Words of Python scalars."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pie_core.eta import TraceError
from pie_core.eta.dtypes import bits_f32, f32_bits, from_word, is_finite_bits, to_word


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 0.7, 1e-45, 3.4028235e38, 3.4028236e38, 1e39, -1e39, math.inf, -math.inf])
def test_f32_words_are_numpys(value: float) -> None:
    with np.errstate(over="ignore"):
        assert f32_bits(value) == int(np.float32(value).view(np.uint32))
    assert is_finite_bits(f32_bits(value)) == (abs(value) < 3.4028235677973366e38)


def test_nan_and_back() -> None:
    assert f32_bits(math.nan) == 0x7FC00000 and math.isnan(bits_f32(0x7FC00000)) and not is_finite_bits(0x7FC00000)
    assert from_word(to_word(-5, "i32"), "i32") == -5 and from_word(0xFFFFFFFF, "u32") == 0xFFFFFFFF
    assert from_word(to_word(True, "bool"), "bool") is True and from_word(to_word(0.5, "f32"), "f32") == 0.5
    assert to_word(math.inf, "f32") == 0x7F800000 and to_word(-math.inf, "f32") == 0xFF800000


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (1 << 31, "i32", "does not fit i32"),
        (-1, "u32", "does not fit u32"),
        (0.5, "i32", "cast"),
        (True, "f32", "bool constant"),
        (1, "bool", "int constant"),
        ("1", "f32", "str constant"),
        (None, "u32", "NoneType constant"),
        (1e40, "f32", r"constant 1e\+40 does not fit f32, whose largest number is 3.4028235e38"),
        (-3.4028236e38, "f32", r"does not fit f32, .* float\('inf'\) is infinity"),
        (10**400, "f32", "constant 1000000000000000000000000000000000000000 does not fit f32"),
    ],
)
def test_wrong_kinds_are_refused(value: object, dtype: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        to_word(value, dtype)
