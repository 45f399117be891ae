"""Random numbers on the devices: the bits exactly, the Gumbel transform of every mantissa."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from pie_core.eta import Traced, numerics, rng
from tests.codegen.author import Chan, F, over_cells, traced
from tests.codegen.batch import Batch, Lane
from tests.codegen.cpu import cpu_machine
from tests.codegen.gpu import run_batches

STATES = [(0, 0), (1, 0), (0, 1), (7, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x80000000, 0x7FFFFFFF)]
N = 3001


@lru_cache(maxsize=1)
def program() -> Traced:
    return over_cells(lambda state: (F["rng_uniform"](state, N), F["rng_gumbel"](state, N), F["rng_normal"](state, N)), ("u32", (2,)))


@pytest.mark.parametrize("machine", ["cpu", "lavapipe", "swiftshader"])
def test_bits_are_exact(machine: str) -> None:
    """Uniforms equal the integer definition bit for bit on every machine; Gumbel and normal follow closely."""
    batch = Batch(program().program, [Lane(0, (), {0: np.array(s, np.uint32)}) for s in STATES])
    got = cpu_machine().run(batch) if machine == "cpu" else run_batches(machine, [batch])[0]
    for (key, counter), answer in zip(STATES, got, strict=True):
        seed = rng.seed_of(key, counter)
        bits = np.array([rng.bits(seed, i) for i in range(N)], np.uint64)
        uniform = numerics.uniform_from_bits(np, bits)
        assert np.array_equal(answer.outs[0].view(np.uint32), uniform.view(np.uint32)), f"{machine} state [{key}, {counter}]"
        np.testing.assert_allclose(answer.outs[1], -np.log(-np.log(uniform.astype(np.float64))), rtol=1e-6, atol=3e-7)
    for answer, want in zip(got, batch.oracle(), strict=True):
        np.testing.assert_allclose(answer.outs[2], want.outs[2], rtol=1e-5, atol=3e-6)


def test_every_mantissa_on_the_cpu_device_gives_a_finite_gumbel() -> None:
    """All 2^24 uniforms through the device's own logarithm; the error against float64 is measured on a sample."""
    size = 1 << 20
    result = over_cells(lambda u: -F["log"](-F["log"](u)), ("f32", (size,)))
    for part in range(16):
        bits = np.arange(part * size, (part + 1) * size, dtype=np.uint64)
        u = numerics.uniform_from_bits(np, bits)
        (gumbel,) = cpu_machine().run(Batch(result.program, [Lane(0, result.params, {0: u})]))[0].outs
        assert np.isfinite(gumbel).all()
        sample = slice(part * 37, None, 509)
        np.testing.assert_allclose(gumbel[sample], -np.log(-np.log(u[sample].astype(np.float64))), rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize("machine", ["lavapipe", "swiftshader"])
def test_the_ends_of_the_uniforms_on_gpus(machine: str) -> None:
    """The 2,000 lowest and highest mantissas, where a coarse logarithm would choose the wrong token."""
    bits = np.concatenate([np.arange(2000), np.arange((1 << 24) - 2000, 1 << 24)]).astype(np.uint64)
    u = numerics.uniform_from_bits(np, bits)
    result = over_cells(lambda x: -F["log"](-F["log"](x)), ("f32", (4000,)))
    (gumbel,) = run_batches(machine, [Batch(result.program, [Lane(0, result.params, {0: u})])])[0][0].outs
    np.testing.assert_allclose(gumbel, -np.log(-np.log(u.astype(np.float64))), rtol=1e-6, atol=3e-7)


def test_a_counter_gives_new_numbers_each_pass_and_repeats_with_its_seed() -> None:
    channel = Chan("u32", (2,), is_counter=True)
    result = traced(lambda: F["uniform"](channel.take(), 8))
    state = np.array([42, 0], np.uint32)
    seen = []
    for _ in range(3):
        (answer,) = cpu_machine().run(Batch(result.program, [Lane(0, (), {0: state})]))
        seen.append(tuple(answer.outs[0]))
        state = answer.puts[0]
    assert state.tolist() == [42, 3] and len(set(seen)) == 3
