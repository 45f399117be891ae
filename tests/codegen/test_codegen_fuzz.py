"""Random elementwise programs, bit for bit against the oracle; mutated programs, which no emitter and no machine may stumble over."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_core.codegen import emit_epilogue_cpu, emit_epilogue_wgsl, emit_epilogue_wgsl_split
from pie_core.eta import OPS, Program, ProgramError, Traced, intrinsics
from pie_core.eta.rules import elements
from tests.codegen.author import Chan, F, counter, traced
from tests.codegen.batch import Batch, Lane, check, same_bits
from tests.codegen.cpu import cpu_machine
from tests.codegen.gpu import run_batches
from tests.codegen.programs import NUMPY, write
from tests.eta.test_eta_hostile import mutate

VOCAB = 1100
# Ops whose result is one exact f32, integer or bool on every machine: the oracle must be met bit for bit.
EXACT = ("add", "sub", "mul", "neg", "abs", "sign", "max", "min", "gt", "ge", "eq", "ne", "lt", "le", "and", "or", "not", "div", "rem")
REDUCE = ("reduce_max", "reduce_min", "reduce_argmax")


class Author:
    """Writes a random program over small whole numbers (f32 stays exact) with a seeded choice at each step."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.channels = [Chan("f32", (VOCAB,)), Chan("i32", (VOCAB,)), Chan("bool", (VOCAB,)), Chan("u32"), counter()]

    def __call__(self) -> Any:
        pick = self.pick
        values: list[Any] = [intrinsics.output(pick.randrange(2))]
        for channel in pick.sample(self.channels, pick.randrange(len(self.channels))):
            values.append(channel.take())
        for _ in range(pick.randrange(3, 30)):
            values.append(self.step(values))
        for channel in self.channels[:4]:
            fits = [v for v in values if v.type == (channel.dtype, channel.shape)]
            if fits and pick.random() < 0.5:
                channel.put(pick.choice(fits))
        return pick.sample(values, min(len(values), pick.randrange(1, 6)))

    def step(self, values: list[Any]) -> Any:
        pick = self.pick
        a = pick.choice(values)
        kind = pick.random()
        if kind < 0.15 and a.dtype != "bool" and len(a.shape) == 1:
            return F["reduce_sum"](a) if a.dtype != "f32" and pick.random() < 0.3 else F[pick.choice(REDUCE)](a)
        if kind < 0.25:
            return self.small(a.cast(pick.choice(("i32", "u32", "bool"))))
        if kind < 0.35:
            return F["select"](self.condition(values), a, self.partner(values, a))
        if kind < 0.4 and a.shape:
            return F["reshape"](a, (a.shape[0] // 2, 2) if len(a.shape) == 1 else a.shape[0] * a.shape[1])
        if kind < 0.45:
            return F["iota"](VOCAB)
        names = [n for n in EXACT if a.dtype in OPS[n].wgsl and not (a.dtype == "f32" and n in ("div", "rem"))]
        name = pick.choice(names)
        args = [a] if OPS[name].arity == 1 else [a, self.partner(values, a, int(name in ("div", "rem")))]
        return self.small(F[OPS[name].py](*args))

    def small(self, x: Any) -> Any:
        """Keep f32 values where products stay whole and exact."""
        return F["maximum"](F["minimum"](x, 1000.0), -1000.0) if x.dtype == "f32" else x

    def partner(self, values: list[Any], a: Any, least: int = 0) -> Any:
        """A value beside `a`, or a constant from `least` on: the tracer refuses a division by a constant 0."""
        fits = [v for v in values if v.dtype == a.dtype and (v.shape == a.shape or not v.shape)]
        constant = self.pick.choice((True, False)) if a.dtype == "bool" else self.pick.randrange(least, 5)
        return self.pick.choice([*fits, constant])

    def condition(self, values: list[Any]) -> Any:
        fits = [v for v in values if v.dtype == "bool" and not v.shape]
        return self.pick.choice([*fits, self.pick.random() < 0.5])


def batch_of(seed: int) -> Batch:
    author = Author(seed)
    result: Traced = traced(author, VOCAB)
    rng = np.random.default_rng(seed)
    logits = rng.integers(-8, 9, (3, VOCAB)).astype(np.float32)
    logits[1, rng.integers(0, VOCAB)] = [np.nan, np.inf, -np.inf, 1.0][seed % 4]
    lanes = []
    for row in (0, 1):
        cells = {}
        for chan, (_, dtype, shape) in enumerate(result.program.chans):
            cells[chan] = np.array(rng.integers(0, 2 if dtype == "bool" else 9, shape)).astype(
                {"f32": "f4", "i32": "i4", "u32": "u4", "bool": "?"}[dtype]
            )
        lanes.append(Lane(row, result.params, cells))
    return Batch(result.program, lanes, logits)


@given(st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_cpu_equals_the_oracle_bit_for_bit(seed: int) -> None:
    batch = batch_of(seed)
    got, want = cpu_machine().run(batch), batch.oracle()
    check(got, want, 0, 0, f"seed {seed}")
    assert same_bits(got[0], cpu_machine().run(Batch(batch.program, batch.lanes[:1], batch.logits))[0])


@pytest.mark.parametrize("machine", ["lavapipe", "swiftshader"])
def test_gpus_equal_the_oracle(machine: str) -> None:
    batches = [batch_of(seed) for seed in range(12)]
    for seed, (batch, got) in enumerate(zip(batches, run_batches(machine, batches), strict=True)):
        check(got, batch.oracle(), 0, 0, f"{machine} seed {seed}")


def test_every_form_of_random_programs_is_emitted() -> None:
    """Or refused with numbers. Emission alone is quick, so that many programs pass by; the first one found that nothing stored in the last
    phase reached the scalar results of a split kernel."""
    for seed in (7_000_860, *range(120)):
        program = write(random.Random(seed), steps=20).program
        for emit in (emit_epilogue_wgsl, emit_epilogue_cpu, partial(emit_epilogue_wgsl_split, groups=1 + seed % 32)):
            try:
                assert emit(program)
            except ProgramError as error:
                assert any(c.isdigit() for c in str(error)), error


def inputs_of(program: Program, seed: int) -> Batch:
    """Any words as inputs of one lane, NaN and huge numbers among them."""
    rng = np.random.default_rng(seed)

    def array(dtype: str, shape: tuple[int, ...]) -> Any:
        words = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
        return words % 2 == 1 if dtype == "bool" else np.asarray(words).view(NUMPY[dtype])

    rows = [array("f32", (max(program.reads, 1), program.width(name) or 1)) for name in ("logits", "hidden")]
    cells = {i: array(c.dtype, c.shape) for i, c in enumerate(program.chans)}
    return Batch(program, [Lane(0, tuple(int(w) for w in rng.integers(0, 1 << 32, len(program.params))), cells)], *rows)


def mutated(count: int) -> list[Program]:
    """Programs that the verifier lets through after changes at random."""
    found: list[Program] = []
    pick = random.Random(11)
    texts = [write(random.Random(seed), steps=8, largest=257).program.text for seed in range(40)]
    while len(found) < count:
        tree = json.loads(pick.choice(texts))
        for _ in range(pick.randrange(1, 4)):
            if isinstance(tree, dict) and tree:
                mutate(tree, pick)
        try:
            program = Program.parse(json.dumps(tree))
        except ProgramError:
            continue
        if program.stage == "epilogue" and sum(elements(n.shape) for n in program.ops) < 1 << 18 and program.text not in texts:
            found.append(program)
    return found


def test_mutated_programs_run_within_their_memory() -> None:
    """What the verifier lets through is emitted in every form or refused with a ProgramError, and the cpu machine writes nothing but
    what belongs to it, whatever the inputs are."""
    ran = 0
    for seed, program in enumerate(mutated(150)):
        try:
            emit_epilogue_wgsl(program)
            emit_epilogue_wgsl_split(program, 2)
            cpu_machine().run(inputs_of(program, seed))
        except ProgramError:
            continue
        ran += 1
    assert ran > 100
