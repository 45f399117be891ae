"""The canonical order of values: what a program computes decides it, not the order in which its author wrote statements."""

from __future__ import annotations

from collections.abc import Sequence

from pie_core.eta.program import Node


def canonical(old: Sequence[Node], outs: Sequence[int], effects: Sequence[int]) -> tuple[list[Node], list[int], list[int]]:
    """(ops, output ids, slots of `old` by new slot): effects as they came, then outputs, each behind what it needs, operands from left to
    right, params by first use. Ops that nothing uses are left out."""
    moved = [-1] * len(old)
    ops: list[Node] = []
    slots: list[int] = []
    todo = [*reversed(outs), *reversed(effects)]
    while todo:  # a stack, since chains are long: an op comes again when its operands are there
        i = todo.pop()
        if moved[i] >= 0:
            continue
        node = old[i]
        args = node[1]
        missing = [a for a in args if moved[a] < 0]
        if missing:
            todo.append(i)
            missing.reverse()
            todo += missing
            continue
        ids = tuple([moved[a] for a in args])
        if node[0] == "param":
            slots.append(int(node[2]["slot"]))
            node = Node("param", (), {"slot": len(slots) - 1}, node[3], ())
        elif ids != args:
            node = Node(node[0], ids, node[2], node[3], node[4])
        moved[i] = len(ops)
        ops.append(node)
    return ops, [moved[i] for i in outs], slots
