"""What `Channel.of` takes for values, and which dtype it takes them for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sdk.conftest import Local
from tests.sdk.scripted_host import ScriptedHost, drive, result_of

HEAD = """
import array, collections, enum
from inferlet.eta import Channel
class Kind(enum.IntEnum): A = 7
"""
ONE = 0x3F800000  # 1.0

TAKEN: list[tuple[str, str, list[int], list[int]]] = [  # values, dtype, shape, words
    ("range(3)", "i32", [3], [0, 1, 2]),
    ("(1, 2)", "i32", [2], [1, 2]),
    ("[range(2), (3, 4)]", "i32", [2, 2], [0, 1, 3, 4]),
    ("array.array('f', [1, 2])", "f32", [2], [ONE, 0x40000000]),
    ("array.array('I', [1])", "i32", [1], [1]),
    ("collections.deque([-1, 1], 4)", "i32", [2], [0xFFFFFFFF, 1]),
    ("list(b'ab')", "i32", [2], [97, 98]),
    ("memoryview(b'ab')", "i32", [2], [97, 98]),
    ("[Kind.A, 1]", "i32", [2], [7, 1]),
    ("Kind.A", "i32", [], [7]),
    ("True", "bool", [], [1]),
    ("[True, False]", "bool", [2], [1, 0]),
    ("[1, 1.0]", "f32", [2], [ONE, ONE]),
    ("[[1], [1.0]]", "f32", [2, 1], [ONE, ONE]),
    ("2**32 - 1", "u32", [], [0xFFFFFFFF]),
    ("[0, 2**31]", "u32", [2], [0, 2**31]),
    ("[[[[1]]]]", "i32", [1, 1, 1, 1], [1]),
    ("[1, 2], 'f32'", "f32", [2], [ONE, 0x40000000]),
    ("[1, 2], 'u32'", "u32", [2], [1, 2]),
]


@pytest.mark.parametrize("case", TAKEN, ids=[values for values, _, _, _ in TAKEN])
async def test_what_is_taken(guest: Local, host: ScriptedHost, case: tuple[str, str, list[int], list[int]]) -> None:
    values, dtype, shape, words = case
    source = HEAD + f"def main(input):\n    ch = Channel.of({values}); ch.declare(); return repr(ch)"
    assert (await result_of(guest, host, source)).startswith(f"Channel({dtype!r}, ")
    (made,) = host.payloads("ch.new")
    assert (made["dtype"], made["shape"], [w & 0xFFFFFFFF for w in made["seed"]]) == (dtype, shape, words)


REFUSED: list[tuple[str, str]] = [
    ("(i for i in [1])", "values is <generator object main.<locals>.<genexpr>>; use a number, a bool, or lists of them (list(…)"),
    ("{1, 2}", "values is {1, 2}; use a number, a bool, or lists of them"),
    ("{1: 2}", "values is {1: 2}; use"),
    ("b'ab'", "values is b'ab'; use"),
    ("bytearray(b'ab')", "values is bytearray(b'ab'); use"),
    ("'12'", "values is '12'; use"),
    ("[[1, 'x']]", "values has 'x'; use"),
    ("[None]", "values has None; use"),
    ("1j", "values is 1j; use"),
    ("[[[[[1]]]]]", "values is nested more than 4 levels deep"),
    ("endless", "values is nested more than 4 levels deep"),
    ("range(0)", "values has an empty list"),
    ("[[1], []]", "values has an empty list"),
    ("[1, [1]]", "values is ragged"),
    ("[True, 1]", "values mixes bools and numbers; use one kind"),
    ("[0.5, True]", "values mixes bools and numbers"),
    ("2**32", "values has integers from 4294967296 to 4294967296; an i32 ends at +-2^31, a u32 is from 0 to 2^32 - 1"),
    ("[-1, 2**31]", "values has integers from -1 to 2147483648; an i32"),
    ("10**5000", "values has integers from a huge integer to a huge integer"),
    ("10**5000, 'f32'", "values has a huge integer; the largest f32 is 3.4028235e38"),
    ("[1.5], 'i32'", "values has 1.5; an i32 cell takes integers"),
    ("[1], 'bool'", "values has 1; a bool cell takes True or False"),
    ("1, ''", "dtype is ''; use one of f32"),
    ("Broken()", "values is a Broken; use"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[v for v, _ in REFUSED])
async def test_what_is_refused(guest: Local, host: ScriptedHost, values: str, words: str) -> None:
    head = HEAD + "class Broken:\n    def __repr__(self): raise ValueError('mine')\nendless = []\nendless.append(endless)\n"
    error: dict[str, Any] = (await drive(guest, host, head + f"def main(input):\n    Channel.of({values})"))["e"]
    assert (error["type"], error["line"]) == ("UsageError", head.count("\n") + 2), error
    assert words in error["message"]
