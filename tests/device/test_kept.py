"""What is kept of programs is bounded by number and by ops in all."""

from __future__ import annotations

import pytest

from pie_core.device.kept import Kept

CASES = [
    ("number", Kept(3), [("a", 1), ("b", 1), ("c", 1), ("d", 1)], "bcd"),
    ("ops", Kept(9, 100), [("a", 40), ("b", 40), ("c", 40)], "bc"),
    ("one over the ops stays", Kept(9, 100), [("a", 10), ("b", 500)], "b"),
    ("put again", Kept(9, 100), [("a", 60), ("b", 30), ("a", 70)], "ba"),
]


@pytest.mark.parametrize(("name", "kept", "puts", "left"), CASES, ids=[name for name, *_ in CASES])
def test_the_one_used_longest_ago_goes(name: str, kept: Kept[int], puts: list[tuple[str, int]], left: str) -> None:
    for key, ops in puts:
        kept.keep(key, ops, ops)
    assert [key for key in "abcd" if key in kept] == sorted(left)
    assert len(kept) == len(left)
    assert all(kept.find(key) == dict(puts)[key] for key in left)


def test_what_is_found_stays() -> None:
    kept: Kept[int] = Kept(2)
    kept.keep("a", 1, 1)
    kept.keep("b", 2, 1)
    assert kept.find("a") == 1
    kept.keep("c", 3, 1)
    assert kept.find("b") is None
    assert "a" in kept
