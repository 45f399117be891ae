"""Python sources without docstrings and comments, line for line: what a page downloads, while tracebacks name the same lines."""

from __future__ import annotations

import ast
import io
import tokenize

_HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def without_words(source: bytes) -> bytes:
    """`source` (UTF-8 Python) with empty docstrings and no comments; every statement stays on its line. Raises SyntaxError."""
    lines = source.decode().splitlines(keepends=True)
    cuts: list[tuple[int, int, int, int, str]] = []  # (line, column) of both ends in characters, and what stands there instead
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, _HOLDERS) and node.body and isinstance(node.body[0], ast.Expr)):
            continue
        value = node.body[0].value
        if (
            isinstance(value, ast.Constant)
            and isinstance(value.value, str)
            and value.end_lineno is not None
            and value.end_col_offset is not None
        ):
            start, end = _characters(lines, value.lineno, value.col_offset), _characters(lines, value.end_lineno, value.end_col_offset)
            cuts.append((value.lineno, start, value.end_lineno, end, '""'))
    for token in tokenize.generate_tokens(io.StringIO("".join(lines)).readline):
        if token.type == tokenize.COMMENT:
            cuts.append((*token.start, *token.end, ""))
    for first, start, last, end, instead in sorted(cuts, reverse=True):
        before, behind = lines[first - 1][:start], lines[last - 1][end:]
        if not instead:
            before = before.rstrip()  # what stood before a comment
        lines[first - 1] = before + instead + behind
        lines[first:last] = ["\n"] * (last - first)
    return "".join(lines).encode()


def _characters(lines: list[str], line: int, offset: int) -> int:
    """The column in characters of a byte offset in a line."""
    return len(lines[line - 1].encode()[:offset].decode())
