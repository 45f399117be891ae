"""Methods by which what holds a value refuses to be taken for it: Python would compare or test the holder instead, silently."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

Tell = Callable[[object, str], Exception]  # the error for an object, and for what its value was needed

COMPARED = {
    "a comparison": ("__lt__", "__le__", "__gt__", "__ge__"),
}
SHOWN = {
    "text (str, print, an f-string)": ("__str__", "__format__"),
}
USED = {
    "a test for truth (if, while, and, or, not)": ("__bool__",),
    "int(), float() or an index": ("__int__", "__float__", "__complex__", "__index__"),
    "rounding": ("__round__", "__trunc__", "__floor__", "__ceil__"),
    "len()": ("__len__",),
    "iterating or unpacking": ("__iter__", "__reversed__"),
    "`in`": ("__contains__",),
    "indexing": ("__getitem__",),
    "arithmetic": (
        *("__neg__", "__pos__", "__abs__", "__invert__"),
        *(
            f"__{side}{op}__"
            for op in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor", "lshift", "rshift")
            for side in ("", "r")
        ),
    ),
}


def refuse(cls: type, tell: Tell, *uses: Mapping[str, tuple[str, ...]]) -> None:
    """Make objects of `cls` raise `tell(self, what)` where they are used so."""

    def method(what: str) -> Callable[..., NoReturn]:
        def needs_value(self: object, *args: object) -> NoReturn:
            raise tell(self, what)

        return needs_value

    for use in uses:
        for what, names in use.items():
            for name in names:
                setattr(cls, name, method(what))
