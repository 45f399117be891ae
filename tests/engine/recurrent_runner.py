"""The fake runner of a recurrent model: a state slot holds the (token, position) list of the sequence, which every read-out speaks of.

Only the words of the packed step are interpreted. A read-out must find in K and V what its state says, replayed rows must find theirs
there, and no two runs of a step may meet in a slot.
"""

from __future__ import annotations

from array import array
from typing import Any

from pie_core.codegen.layout import lane_layout
from pie_core.device.protocol import NONE, PAGE_TOKENS
from pie_core.engine.runner import RunnerLimits, StepBatch
from pie_core.engine.step_buffer import pack_step
from tests.engine.fake_runner import FakeRunner, answer, limits

State = tuple[tuple[int, int] | None, ...]


def recurrent_limits(slots: int = 16, **changes: int) -> RunnerLimits:
    """Small limits of a model with recurrent state."""
    return limits(state_slots=slots, **changes)


class RecurrentRunner(FakeRunner):
    """`states`: what each slot holds; `replayed`: rows that were run once more."""

    def __init__(self, limits_: RunnerLimits | None = None, delay: float = 0.0) -> None:
        super().__init__(limits_ or recurrent_limits(), delay)
        self.states: dict[int, State] = {}
        self.replayed = 0

    def _check(self, batch: StepBatch) -> None:
        kept = StepBatch(rows=[], tables=batch.tables, masks=batch.masks, reads=batch.reads, results_words=batch.results_words)
        for at in range(0, len(batch.rows), 8):
            if batch.rows[at + 3] != NONE:
                kept.rows += batch.rows[at : at + 8]
        assert batch.n_tokens <= self._limits.max_tokens
        if kept.rows:
            super()._check(kept)
        starts, writes = batch.runs[1::5], [slot for slot in batch.runs[2::5] if slot != NONE]
        assert len(set(writes)) == len(writes), "two runs of one step write the same slot"
        for k, write in enumerate(batch.runs[2::5]):
            assert all(write != start for j, start in enumerate(starts) if j != k and start != NONE), (
                "a run starts where another one writes"
            )

    def _execute(self, batch: StepBatch) -> bytes:
        packed = pack_step(batch)
        step = array("I", bytes(packed.data))
        self._shifts(step)
        whole = step[:]
        self._gates(step)
        n_tokens, n_reads, _, token_off, read_off, _, run_off, n_runs = step[:8]
        assert n_runs > 0 and step[run_off + 5 * (n_runs - 1)] == whole[0], "every row is in a run"
        if not n_tokens:
            n_runs = 0
        after: list[State] = []
        for k in range(n_runs):
            end, start, write, limit, cell = step[run_off + 5 * k : run_off + 5 * k + 5]
            assert len(after) < end and limit <= end - len(after)
            fold = limit if cell == NONE else 0 if self.arena[cell] >> 31 else min(self.arena[cell], limit)
            shut = any(step[token_off + 8 * t + 3] != whole[token_off + 8 * t + 3] for t in range(len(after), end))  # behind a gate
            assert write == NONE or not shut
            state = () if start == NONE else self.states.get(start, ()) if shut else self.states[start]
            folded = state
            for r in range(end - len(after)):
                if r == limit:
                    state = folded  # behind what was folded; drafts that were not are gone
                at = token_off + 8 * len(after)
                word, src, pos, slot, pages = step[at : at + 5]
                token = self.arena[src] if src != NONE else word
                place = step[pages + pos // PAGE_TOKENS] * PAGE_TOKENS + pos % PAGE_TOKENS
                assert shut or pos == len(state), "a run does not go on where its state ends"
                entry = (token, pos) if token < self._limits.vocab else None
                if shut:
                    pass  # neither K and V nor a state are stored
                elif slot == NONE:
                    assert self.kv[place] == entry, "a replayed token is not what was stored"
                    self.replayed += 1
                else:
                    assert slot == place
                    self.kv[place] = entry
                state = (*state, entry)
                after.append(state)
                if r + 1 == fold:
                    folded = state
            if write != NONE:
                self.states[write] = folded
        readouts: list[int | None] = []
        for row in step[read_off : read_off + n_reads]:
            pages = step[token_off + 8 * row + 4]
            seen = after[row]
            stored = [self.kv.get(step[pages + p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS) for p in range(len(seen))]
            masked = step[token_off + 8 * row + 3] != whole[token_off + 8 * row + 3]
            assert masked or stored == list(seen), "K and V are not what the state has seen"
            readouts.append(None if None in seen else answer([cell for cell in seen if cell is not None]))
        results = array("I", [0xDEADBEEF]) * batch.results_words
        for group in packed.groups:
            layout = lane_layout(group.program)
            base = group.lane_offset // 4
            for k in range(group.lanes):
                lane: Any = step[base + k * layout.words : base + (k + 1) * layout.words]
                if lane[0] != NONE:
                    self._lane(group.program, lane, readouts, results)
        return results.tobytes()
