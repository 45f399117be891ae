"""The order of edits against passes: who waits for whom, and what may happen ahead of time. And how a step carries what moves."""

from __future__ import annotations

from collections.abc import Callable

from pie_core.device.protocol import NONE
from pie_core.engine.edit_order import EditOrder
from pie_core.engine.runner import ROW_WORDS, Gate, Shift, StepBatch
from pie_core.engine.step_buffer import HEADER_WORDS, SHIFT_WORDS, pack_step


class Script:
    """An order, and what has happened in it. `can`: whether edits may happen early."""

    def __init__(self, *, can: bool = True) -> None:
        self.order, self.can = EditOrder(), can
        self.log: list[str] = []

    def op(self, name: str) -> Callable[[], None]:
        return lambda: self.log.append(name)

    def late(self) -> int:
        """An edit by a value, with the right to happen early. Gives the ticket of the value."""
        ticket, op = self.order.enter(value=True), self.op("late")

        def early() -> bool:
            if self.can:
                self.log.append("early")
            return self.can

        self.order.run(op)
        assert self.order.amend(op, op, early)
        return ticket


def test_an_early_edit_waits_only_until_what_is_before_it_is_scheduled() -> None:
    s = Script()
    first = s.order.enter()
    value = s.late()
    behind = s.order.enter()
    assert s.order.early and not s.order.may_run(behind) and not s.log
    s.order.scheduled(first)
    assert s.log == ["early"] and s.order.may_run(behind)
    s.order.run(s.op("fork"))
    s.order.scheduled(behind)
    s.order.leave(behind, queued=False)
    assert s.log == ["early"] and s.order.outstanding == 2 and not s.order.idle
    s.order.leave(first, queued=False)
    s.order.leave(value, queued=False)
    assert s.log == ["early", "fork"] and s.order.idle and not s.order.early


def test_an_edit_that_cannot_happen_early_waits_for_its_value_and_all_before_it() -> None:
    s = Script(can=False)
    first, value = s.order.enter(), s.late()
    behind = s.order.enter()
    s.order.scheduled(first)
    s.order.leave(value, queued=False)
    assert not s.order.may_run(behind)
    s.order.leave(first, queued=False)
    assert s.log == ["late"] and s.order.may_run(behind)


def test_it_is_tried_again_when_something_ends() -> None:
    s = Script(can=False)
    first, second, _ = s.order.enter(), s.order.enter(), s.late()
    s.order.scheduled(first)
    s.order.scheduled(second)
    s.can = True
    s.order.leave(first, queued=False)
    assert s.log == ["early"]


def test_behind_a_barrier_nothing_runs_before_values_are_there() -> None:
    s = Script()
    first, value = s.order.enter(), s.late()
    s.order.scheduled(first)
    s.order.barrier()
    behind = s.order.enter()
    s.order.leave(first, queued=False)
    assert not s.order.may_run(behind)
    s.order.leave(value, queued=False)
    assert s.order.may_run(behind)


def test_only_the_last_edit_with_nothing_behind_it_is_amended() -> None:
    s = Script()
    op = s.op("commit")
    assert not s.order.amend(op, op, None)  # nothing waits
    s.order.enter()
    s.order.run(op)
    behind = s.order.enter()
    assert not s.order.amend(op, s.op("other"), None)
    s.order.leave(behind)
    s.order.run(s.op("later"))
    assert not s.order.amend(op, s.op("other"), None)


def test_the_end_runs_what_waits_and_later_leaves_are_nothing() -> None:
    s = Script()
    first, value = s.order.enter(), s.late()
    s.order.scheduled(first)
    s.order.run(s.op("drop"))
    s.order.end()
    s.order.leave(value, queued=False)
    s.order.leave(first)
    s.order.scheduled(first)
    assert s.log == ["early", "drop"] and s.order.idle
    s.order.run(s.op("after"))
    assert s.log[-1] == "after"


def test_a_step_carries_shifts_and_the_counts_of_their_runs() -> None:
    batch = StepBatch(rows=[7, NONE, 3, 3, 0, 0, 0, 0] * 5, tables=[0], n_seqs=2, runs=[2, 0, 1, 0, NONE, 5, 2, 3, 1, NONE])
    shift = Shift(40, True, 41, 1, 0, 1)
    batch.gates = [Gate(NONE, NONE, range(2, 5), range(1, 2), None, shift)]
    assert batch.may_shift and not batch.may_cancel and not batch.skippable
    words = memoryview(pack_step(batch).data).cast("I")
    at, count = words[11:13]
    assert count == 1 and list(words[at : at + SHIFT_WORDS]) == [40, 1, 41, 1, 0, 2, 1, 3]
    assert words[9] == 0 and words[10] == 5, "no gate, and no row that has one"
    runs = words[6]
    assert list(words[runs : runs + 10]) == [2, 0, 1, 0, NONE, 5, 2, 3, 1, 41]
    assert at >= HEADER_WORDS + 5 * ROW_WORDS
    batch.gates.append(Gate(60, NONE, range(2), range(1), None))
    words = memoryview(pack_step(batch).data).cast("I")
    assert batch.may_cancel and (words[9], words[10]) == (1, 3)
