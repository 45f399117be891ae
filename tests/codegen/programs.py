"""Random programs with inputs, for hypothesis or a seed, and how far two devices may differ on each output (see program_author.py)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pie_core.eta import Model, Program, Tensor, trace_epilogue
from tests.codegen.batch import Answer, Batch, Lane
from tests.codegen.program_author import Author, Value

RTOL = 1e-5
NUMPY = {"f32": np.float32, "i32": np.int32, "u32": np.uint32, "bool": np.bool_}


@dataclass(frozen=True)
class Case:
    """A program with the inputs of three lanes, and what is known of its outputs and of what it puts, by channel."""

    batch: Batch
    outs: list[Value]
    puts: dict[int, Value]

    @property
    def program(self) -> Program:
        """Of the batch."""
        return self.batch.program

    def alone(self, lane: int) -> Batch:
        """One lane in a launch of its own."""
        return Batch(self.program, [self.batch.lanes[lane]], self.batch.logits, self.batch.hidden)

    def check(self, got: list[Answer], want: list[Answer], where: str) -> None:
        """Every lane agrees: equal values bit for bit (a zero has no sign here, and NaN no payload), others within 1e-5 * (|want| + m)."""
        for lane, (g, w) in enumerate(zip(got, want, strict=True)):
            assert g.status == w.status, f"{where} lane {lane}: status {g.status}, want {w.status}\n{self.program.listing()}"
            assert g.puts.keys() == w.puts.keys()
            pairs = [(f"output %{o}", v, a, b) for o, v, a, b in zip(self.program.outs, self.outs, g.outs, w.outs, strict=True)]
            pairs += [(f"channel {c}", self.puts[c], g.puts[c], w.puts[c]) for c in w.puts]
            for name, value, a, b in pairs:
                fault = difference(value, np.asarray(a), np.asarray(b))
                assert not fault, f"{where} lane {lane} {name}: {fault}\n{self.program.listing()}"


def difference(value: Value, got: Any, want: Any) -> str:
    """Where two arrays differ by more than their value may; "" when nowhere."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype}{got.shape}, want {want.dtype}{want.shape}"
    if want.dtype != np.float32:
        bad = got != want
    else:
        with np.errstate(all="ignore"):
            near = np.abs(got.astype(np.float64) - want) <= (0.0 if value.equal else RTOL * (np.abs(want) + value.m))
        bad = ~(near | (got == want) | (np.isnan(got) & np.isnan(want)))
    if not bad.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(bad)[0]) if bad.shape else ()
    return (
        f"{int(bad.sum())} of {bad.size} differ, first at {list(at)}: {got[at]!r}, want {want[at]!r} (equal={value.equal}, m={value.m:g})"
    )


def write(pick: random.Random, steps: int = 14, largest: int = 4096) -> Case:
    """A program and its inputs. Whole numbers in the rows, sometimes with a NaN or an infinity; integers of all sizes in the cells."""
    author = Author(pick, steps, largest)
    traced = trace_epilogue(author, Model(author.vocab, author.hidden), rows=author.rows)
    program, params = Program.parse(traced.program.text), traced.params
    if pick.random() < 0.1:
        program, params = _with_consts(program, params), ()
    rng = np.random.default_rng(pick.randrange(1 << 30))
    total = author.rows + 2
    logits, hidden = (rng.integers(-9, 10, (total, n)).astype(np.float32) for n in (author.vocab, author.hidden))
    if pick.random() < 0.3:
        logits[rng.integers(total), rng.integers(author.vocab)] = pick.choice((np.nan, np.inf, -np.inf, -0.0))
    lanes = []
    for row in (0, 2, 1):
        cells = {}
        for chan, (_, dtype, shape) in enumerate(program.chans):
            low, high = {"f32": (-9, 10), "i32": (-(2**31), 2**31), "u32": (0, 2**32), "bool": (0, 2)}[dtype]
            if dtype in ("i32", "u32") and rng.random() < 0.5:
                low, high = max(low, -4), 40
            cells[chan] = np.array(rng.integers(low, high, shape)).astype(NUMPY[dtype])
        lanes.append(Lane(row, params, cells))
    slots = {id(channel): i for i, channel in enumerate(traced.channels)}
    puts = {slots[id(channel)]: value for channel, value in author.puts}
    counters = {i: Value(Tensor(None, 0, "u32", (2,))) for i, c in enumerate(traced.channels) if c.is_counter}  # type: ignore[arg-type]
    batch = Batch(program, lanes, logits, hidden)
    return Case(batch, author.outs, {**counters, **puts})


def _with_consts(program: Program, words: tuple[int, ...]) -> Program:
    """The program with its params as consts: the op that no author writes in an epilogue."""
    ops = [n._replace(name="const", attrs={"bits": words[int(n.attrs["slot"])]}) if n.name == "param" else n for n in program.ops]
    return Program(program.stage, ops, program.outs, program.chans).verify()


def cases(steps: int = 14, largest: int = 4096) -> st.SearchStrategy[Case]:
    """Random cases that hypothesis can shrink."""
    return st.randoms(use_true_random=False).map(lambda pick: write(pick, steps, largest))


__all__ = ["NUMPY", "Case", "Value", "cases", "difference", "write"]
