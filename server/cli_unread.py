"""Finds input of `pie run` that the inferlet never reads: mostly a misspelt --key."""

from __future__ import annotations

import ast
from collections.abc import Iterable

_LOOKUPS = ("get", "pop", "setdefault")


def unread_keys(source: str, keys: Iterable[str]) -> list[str]:
    """Those of `keys` that no text in `source` names, where `main` and what it hands its input to only look up keys in it; none where
    the whole input may be used (returned, looped over, given away) or `source` does not parse."""
    try:
        tree = ast.parse(source)
        unnamed = [key for key in keys if key not in source]
        return unnamed if unnamed and _only_looks_up(tree) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the run itself will say so, with its line
        return []


def _only_looks_up(tree: ast.Module) -> bool:
    functions = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    todo, seen = [("main", 0)], set()
    while todo:
        name, index = todo.pop()
        if (name, index) in seen:
            continue
        seen.add((name, index))
        function = functions.get(name)
        if function is None or index >= len(function.args.args):
            return False
        found = _handed_on(function, function.args.args[index].arg)
        if found is None:
            return False
        todo += found
    return True


def _handed_on(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> list[tuple[str, int]] | None:
    """The (function, argument index) pairs that get `name` as an argument; None where it is used otherwise than to look up a key."""
    uses = {id(node) for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name}
    handed: list[tuple[str, int]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript):
            uses.discard(id(node.value))
        elif isinstance(node, ast.Compare) and all(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
            uses.difference_update(map(id, node.comparators))
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _LOOKUPS:
                uses.discard(id(node.func.value))
            elif isinstance(node.func, ast.Name):
                for index, argument in enumerate(node.args):
                    if id(argument) in uses:
                        handed.append((node.func.id, index))
                        uses.discard(id(argument))
    return handed if not uses else None
