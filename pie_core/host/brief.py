"""A guest's value as an error shows it, in time and memory that do not depend on its size."""

from __future__ import annotations

from collections.abc import Iterator

_CLOSING: dict[type, str] = {list: "]", dict: "}"}


def brief(value: object, most: int = 60) -> str:
    """What repr says of a JSON value, in at most about `most` characters: of a long one the beginning, and what closes it."""
    text = ""
    for piece in _pieces(value, most):
        text += piece
        if len(text) > most:
            break
    if len(text) > most or (isinstance(value, str) and len(value) > most):
        return f"{text[: most - 4]}…{_CLOSING.get(type(value), text[-1])}"
    return text


def _pieces(value: object, most: int) -> Iterator[str]:
    if isinstance(value, str):
        yield repr(value[:most])
    elif isinstance(value, list):
        yield "["
        for k, item in enumerate(value):
            if k:
                yield ", "
            yield from _pieces(item, most)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for k, (key, item) in enumerate(value.items()):
            yield f"{', ' if k else ''}{key[:most]!r}: "
            yield from _pieces(item, most)
        yield "}"
    else:
        yield repr(value)
