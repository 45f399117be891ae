"""Random programs over all ops: oracle, cpu and webgpu agree, and a pass alone has the bits that it has in a batch.

Integers, bools, random bits, and whatever is found, compared or sorted among equal values agree exactly. Other floats agree within 1e-5 of
their own magnitude plus that of the terms that made them (program_author.py): where terms cancel a relative error means nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from pie_core.eta import OPS, Tensor
from tests.codegen.batch import Answer, same_bits
from tests.codegen.cpu import cpu_machine
from tests.codegen.gpu import run_batches
from tests.codegen.programs import Case, Value, cases, difference, write


def hold(case: Case, got: list[Answer], alone: Answer, where: str) -> None:
    """A batch as the oracle has it, and its second lane as it is alone."""
    case.check(got, case.batch.oracle(), where)
    assert same_bits(got[1], alone), f"{where}: lane 1 differs from its run alone\n{case.program.listing()}"


@given(cases())
@settings(max_examples=80, deadline=None)
def test_cpu_agrees_with_the_oracle(case: Case) -> None:
    hold(case, cpu_machine().run(case.batch), cpu_machine().run(case.alone(1))[0], "cpu")


FORMS: list[tuple[str, range, dict[str, Any]]] = [
    ("lavapipe", range(0, 14), {}),
    ("lavapipe", range(100, 108), {"split": True, "groups": 3, "workgroup": 64}),
    ("swiftshader", range(200, 208), {}),
    ("swiftshader", range(300, 304), {"split": True, "groups": 2}),
]


@pytest.mark.parametrize(("machine", "seeds", "form"), FORMS, ids=lambda v: v if isinstance(v, str) else "")
def test_webgpu_agrees_with_the_oracle(machine: str, seeds: range, form: dict[str, Any]) -> None:
    written = [write(random.Random(seed), steps=10) for seed in seeds]
    answers = run_batches(machine, [b for case in written for b in (case.batch, case.alone(1))], **form)
    for seed, case, got, alone in zip(seeds, written, answers[::2], answers[1::2], strict=True):
        hold(case, got, alone[0], f"{machine} {form} seed {seed}")


def test_the_programs_use_every_op_on_every_dtype() -> None:
    """Over 400 seeds, so that the property tests leave nothing out for want of luck."""
    seen: Counter[str] = Counter()
    variants: set[tuple[str, str]] = set()
    exact = total = 0
    for seed in range(400):
        case = write(random.Random(seed))
        ops = case.program.ops
        seen.update({n.name for n in ops})
        variants |= {(n.name, ops[n.args[0]].dtype if n.args else n.dtype) for n in ops}
        exact += sum(v.equal for v in case.outs)
        total += len(case.outs)
    assert set(seen) == set(OPS) - {"input", "intrinsic"}, set(OPS) - set(seen)
    structured = {(r.name, d) for r in OPS.values() if r.kind in ("lookup", "pivot", "reduce", "skeleton", "view") for d in r.dtypes}
    assert structured <= variants, structured - variants
    assert 0.5 < exact / total < 0.95, "both kinds of values are returned"


@pytest.mark.parametrize(
    ("equal", "m", "got", "want", "same"),
    [
        (True, 9, [1.0, np.nan], [1.0, np.nan], True),
        (True, 9, [0.0], [-0.0], True), (True, 9, [1.0], [np.nextafter(np.float32(1), 2)], False),
        (True, 9, [np.inf], [-np.inf], False), (True, 9, [np.nan], [1.0], False), (False, 1, [1.00001], [1.0], True),
        (False, 1, [1.0001], [1.0], False), (False, 50, [3e-4], [0.0], True), (False, 50, [6e-4], [0.0], False),
        (False, 50, [np.inf], [3e38], False), (False, 50, [np.nan], [0.0], False), (False, 50, [np.inf], [np.inf], True),
    ],
)  # fmt: skip
def test_the_rule_of_agreement(equal: bool, m: float, got: list[float], want: list[float], same: bool) -> None:
    value = Value(Tensor(None, 0, "f32", (1,)), equal, False, m)  # type: ignore[arg-type]
    assert (difference(value, np.array(got, np.float32), np.array(want, np.float32)) == "") == same
    words = [np.array([1, 2], d) for d in (np.uint32, np.int32)]
    assert difference(value, words[0], words[0]) == "" and "want" in difference(value, words[0], words[1])
