"""Recurrent state on both devices, with a purely recurrent model and one that has attention too: whatever a set went through, its next
token is that of the plain sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from pie_core.codegen.layout import lane_layout
from pie_core.device.protocol import NONE, DeviceError
from pie_core.engine.errors import InvalidState
from pie_core.engine.forward import BUFFERED, FOLDING, Geometry, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.model_runner import ModelRunner
from pie_core.engine.runner import EpilogueGroup, StepBatch
from pie_core.engine.working_set import WorkingSet
from pie_core.eta import Model, channel, intrinsics, reduce_argmax, trace_epilogue
from pie_core.eta.tracing import Traced
from pie_core.weights import open_gguf
from tests.support.engines import Kind, open_device
from tests.support.tiny_recurrent import POEM, write_tiny_recurrent

PROMPT = [5, 17, 30, 71, 2, 9, 44, 200, 13, 101, 8, 66, 31, 150, 99, 3, 7, 12, 42]  # over one page
DRAFTS = [61, 14, 250, 33, 8, 127]
MODELS: dict[str, Sequence[Any]] = {"recurrent": ("recurrent", "recurrent"), "hybrid": ("attention", "recurrent")}
TOLERANCE = 2e-4  # of hidden; kernels of other shapes round in another way


class Count:
    """A channel of one count, as the tracer sees it."""

    dtype, shape, capacity, is_counter = "i32", (), 1, False


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("recurrent")
    return {name: write_tiny_recurrent(folder / f"{name}.gguf", kinds) for name, kinds in MODELS.items()}


async def load(kind: Kind, path: Path, pool_bytes: int = 1 << 20) -> ModelRunner:
    device = await open_device(kind)
    with open_gguf(path) as checkpoint:
        try:
            return ModelRunner.load(device, checkpoint, poem=POEM, kv_pool_bytes=pool_bytes)
        except BaseException:
            device.close()
            raise


@pytest_asyncio.fixture(params=[(kind, name) for kind in ("cpu", "webgpu") for name in MODELS], ids="-".join)
async def engine(request: pytest.FixtureRequest, files: dict[str, Path]) -> AsyncIterator[Engine]:
    kind, name = request.param
    engine = Engine(await load(kind, files[name]))
    engine.start()
    try:
        yield engine
        assert engine.pool.used == 0
        assert engine.states is not None and engine.states.used == 0, "every test must give all slots back"
    finally:
        await engine.stop()
        engine.runner.close()  # type: ignore[attr-defined]


def rows(engine: Engine, n: int = 1) -> Traced:
    """The hidden rows of the first `n` read-outs."""
    return trace_epilogue(lambda: tuple(intrinsics.output(k, "hidden") for k in range(n)), Model(engine.limits.vocab, engine.limits.hidden))


async def run(
    inst: Instance, ws: WorkingSet, tokens: Sequence[int], geometry: Geometry = FOLDING, reads: Sequence[int] | None = None
) -> Any:
    """[reads, hidden] of a pass; by default of its last token."""
    t = rows(inst.engine, 1 if reads is None else len(reads))
    pipe = inst.pipeline()
    spec = PassSpec(list(tokens), [ws], geometry, None if reads is None else [list(reads)], t.program, t.params)
    values: list[Any] = [await out for out in inst.submit(pipe, spec)]
    inst.close_pipeline(pipe)
    return np.array([value.tolist() for value in values])


async def plain(inst: Instance, tokens: Sequence[int], **geometry: Any) -> Any:
    """Hidden of the last of `tokens` in a set of its own."""
    ws = inst.working_set()
    hidden = await run(inst, ws, tokens, Geometry(**geometry))
    inst.drop(ws)
    return hidden


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


async def test_chunks_token_by_token_and_the_whole_agree(engine: Engine) -> None:
    inst = engine.open_instance("t")
    want = await plain(inst, PROMPT)
    for cuts in ([7], [1, 2, 18], list(range(1, len(PROMPT)))):
        ws = inst.working_set()
        for a, b in zip([0, *cuts], [*cuts, len(PROMPT)], strict=True):
            got = await run(inst, ws, PROMPT[a:b])
        close(got, want)
    assert np.abs(want - await plain(inst, [250, *PROMPT[1:]])).max() > 1e-2  # the first token is remembered
    inst.close()


async def test_a_prompt_over_several_steps(engine: Engine) -> None:
    inst = engine.open_instance("t")
    long = [(7 * i + 3) % engine.limits.vocab for i in range(2 * engine.limits.max_tokens + 9)]
    ws = inst.working_set()
    await run(inst, ws, long[:11])
    close(await run(inst, ws, long[11:]), await plain(inst, long))
    inst.close()


async def test_mixed_lengths_share_steps_and_equal_their_solo_runs(engine: Engine) -> None:
    inst = engine.open_instance("t")
    prompts = [PROMPT[: 1 + 3 * k] for k in range(6)]
    solo = [await plain(inst, p) for p in prompts]
    for got, want in zip(await asyncio.gather(*(plain(inst, p) for p in prompts)), solo, strict=True):
        close(got, want)
    inst.close()


@pytest.mark.parametrize("depth", [1, 16, 19])
async def test_forks_at_any_depth_diverge_like_separate_runs(engine: Engine, depth: int) -> None:
    inst = engine.open_instance("t")
    ws = inst.working_set()
    await run(inst, ws, PROMPT[:depth])
    states = engine.states
    assert states is not None
    used = states.used
    children = [inst.fork(ws) for _ in range(3)]
    assert states.used == used  # a fork is a reference
    got = await asyncio.gather(*(run(inst, c, [11 + k, *DRAFTS[:k]]) for k, c in enumerate(children)))
    for k, hidden in enumerate(got):
        close(hidden, await plain(inst, [*PROMPT[:depth], 11 + k, *DRAFTS[:k]]))
    close(await run(inst, ws, [9]), await plain(inst, [*PROMPT[:depth], 9]))  # the parent never saw them
    inst.close()


@pytest.mark.parametrize("n", [0, 4, 6])
@pytest.mark.parametrize("geometry", [{}, {"window": 5, "sinks": 2}])
async def test_verifying_then_folding_a_part_equals_the_plain_run(engine: Engine, n: int, geometry: dict[str, int]) -> None:
    """The next pass verifies more drafts and folds what was accepted, in one."""
    inst = engine.open_instance("t")
    ws = inst.working_set()
    await run(inst, ws, PROMPT)
    verified = await run(inst, ws, DRAFTS, Geometry("buffered", **geometry), range(len(DRAFTS)))
    close(verified[2:3], await plain_then(inst, DRAFTS[:3], geometry))
    inst.commit(ws, n)
    inst.discard(ws)
    more = await run(inst, ws, [77, 78], Geometry("buffered", **geometry))
    close(more, await plain_then(inst, [*DRAFTS[:n], 77, 78], geometry))
    inst.commit(ws, 1)
    inst.discard(ws)
    close(await run(inst, ws, [79], Geometry(**geometry)), await plain_then(inst, [*DRAFTS[:n], 77, 79], geometry))
    inst.close()


async def plain_then(inst: Instance, tokens: Sequence[int], geometry: dict[str, int]) -> Any:
    """PROMPT, then `tokens` one by one under a geometry: a window makes K and V of later layers differ."""
    ws = inst.working_set()
    await run(inst, ws, PROMPT)
    for token in tokens:
        hidden = await run(inst, ws, [token], Geometry(**geometry))
    inst.drop(ws)
    return hidden


async def test_drafts_pass_after_pass_and_a_fork_with_the_buffer(engine: Engine) -> None:
    inst = engine.open_instance("t")
    ws = inst.working_set()
    await run(inst, ws, PROMPT)
    for k, token in enumerate(DRAFTS):  # each replays those before it
        close(await run(inst, ws, [token], BUFFERED), await plain(inst, [*PROMPT, *DRAFTS[: k + 1]]))
    with_buffer, without = inst.fork(ws, buffer=True), inst.fork(ws)
    inst.commit(ws, 3)
    inst.discard(ws, 1)
    close(await run(inst, ws, [40], BUFFERED), await plain(inst, [*PROMPT, *DRAFTS[:5], 40]))
    close(await run(inst, with_buffer, [41], BUFFERED), await plain(inst, [*PROMPT, *DRAFTS, 41]))
    close(await run(inst, without, [42]), await plain(inst, [*PROMPT, 42]))
    inst.close()


async def test_a_token_of_the_device_feeds_the_next_pass(engine: Engine) -> None:
    inst = engine.open_instance("t")
    cell = inst.channel("i32", (1,), 2)

    def step() -> Any:
        token = reduce_argmax(intrinsics.output(0, "logits"))
        channel.put(cell, token)
        return token

    t = trace_epilogue(step, Model(engine.limits.vocab, engine.limits.hidden))
    ws, pipe = inst.working_set(), inst.pipeline()
    outs = [inst.submit(pipe, PassSpec(feed, [ws], FOLDING, None, t.program, t.params, t.channels))[0] for feed in (PROMPT, *[cell] * 6)]
    tokens: list[Any] = [await out for out in outs]
    assert len(set(tokens)) > 2
    close(await run(inst, ws, [9]), await plain(inst, [*PROMPT, *tokens[:-1], 9]))
    inst.close()


async def test_passes_behind_a_stop_leave_the_state_alone(engine: Engine) -> None:
    """Passes that were scheduled ahead are masked out on the device; the set goes on from the last one that ran."""
    inst = engine.open_instance("t")

    async def loop(stop: int) -> tuple[WorkingSet, list[Any]]:
        fed, done = inst.channel("i32", (1,), 2), inst.channel("bool", capacity=4)

        def step() -> Any:
            token = reduce_argmax(intrinsics.output(0, "logits"))
            channel.put(fed, token)
            channel.put(done, token == stop)
            return token

        t = trace_epilogue(step, Model(engine.limits.vocab, engine.limits.hidden))
        ws, pipe = inst.working_set(), inst.pipeline()
        pipe.stop_when(done)
        outs = [inst.submit(pipe, PassSpec(feed, [ws], FOLDING, None, t.program, t.params, t.channels))[0] for feed in (PROMPT, *[fed] * 4)]
        said = await asyncio.gather(*outs, return_exceptions=True)
        return ws, [token for token in said if isinstance(token, int)]

    _, tokens = await loop(-1)
    assert len(tokens) == 5
    cut = tokens.index(tokens[2]) + 1
    ws, said = await loop(tokens[2])
    assert said == tokens[:cut] and ws.length == len(PROMPT) + cut - 1
    close(await run(inst, ws, [9]), await plain(inst, [*PROMPT, *tokens[: cut - 1], 9]))
    assert engine.metrics.revived == 0
    inst.close()


async def test_a_whole_buffer_runs_in_one_step(engine: Engine) -> None:
    """What was committed of it is folded in a step of its own when the next pass leaves no room."""
    inst = engine.open_instance("t")
    most = engine.limits.max_tokens
    ws, other = inst.working_set(), inst.working_set()
    tokens = [(11 * i + 5) % engine.limits.vocab for i in range(3 * most)]
    await run(inst, ws, tokens[: most - 1], BUFFERED)
    inst.commit(ws, most - 2)
    close(await run(inst, ws, tokens[most - 1 : most + 20], BUFFERED), await plain(inst, tokens[: most + 20]))
    with pytest.raises(InvalidState, match=rf"adds {most} tokens to a buffer of 22; .* of at most {most} tokens"):
        await run(inst, ws, tokens[:most], BUFFERED)
    await run(inst, other, tokens[:most], BUFFERED)
    inst.commit(other, most)
    close(await run(inst, other, tokens[most:]), await plain(inst, tokens))
    inst.close()


@pytest.mark.parametrize("kind", ["cpu", "webgpu"])
@pytest.mark.parametrize("accepted", [0, 2, 6, 9])
async def test_the_device_folds_what_its_own_epilogue_accepted(files: dict[str, Path], kind: Kind, accepted: int) -> None:
    """The count of a cell that a pass wrote is read by the next one; the host does not see it. Slots: 0 the prompt, 1 what is folded."""
    runner = await load(kind, files["recurrent"])
    limits = runner.limits
    cell, model = Count(), Model(limits.vocab, limits.hidden)
    t = trace_epilogue(lambda: channel.put(cell, reduce_argmax(intrinsics.output(0, "hidden")) * 0 + accepted), model)
    layout = lane_layout(t.program)
    hidden = trace_epilogue(lambda: intrinsics.output(0, "hidden"), model)
    shown = lane_layout(hidden.program)

    def batch(tokens: Sequence[int], runs: Sequence[int]) -> StepBatch:
        made = StepBatch(n_seqs=1, tables=[0, 1, 2], runs=list(runs))
        for pos, token in enumerate(tokens):
            made.rows += (token, NONE, pos, pos, 0, 0, 0, 0)
        return made

    def seen(made: StepBatch) -> Any:
        made.reads, made.results_words = [made.n_tokens - 1], 1 + limits.hidden
        made.epilogues = [EpilogueGroup(hidden.program, [shown.pack(0, 0, [], [1], hidden.params)])]
        return runner.submit(made).results()

    try:
        steps = [runner.submit(batch(PROMPT, [len(PROMPT), NONE, 0, len(PROMPT), NONE]))]
        verify = batch(DRAFTS, [6, 0, NONE, 0, NONE])
        verify.reads, verify.results_words = [5], 1
        verify.epilogues = [EpilogueGroup(t.program, [layout.pack(0, 0, [(NONE, 40, NONE)], [], t.params)])]
        steps.append(runner.submit(verify))
        got = np.frombuffer(await seen(batch([*DRAFTS, 77], [7, 0, 1, 6, 40])), np.float32)[1:]
        later = np.frombuffer(await seen(batch([78], [1, 1, NONE, 0, NONE])), np.float32)[1:]
        n = min(accepted, 6)
        for value, tail in ((got, 77), (later, 78)):
            whole = [*PROMPT, *DRAFTS[:n], tail]
            want = np.frombuffer(await seen(batch(whole, [len(whole), NONE, 2, len(whole), NONE])), np.float32)[1:]
            close(value, want)
        for step in steps:
            await step.results()
    finally:
        runner.close()


async def test_a_pool_too_small_for_two_slots_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(DeviceError, match=r"pool of 6000 bytes leaves 1/4 for recurrent state, less than two slots of 768 bytes"):
        await load("cpu", files["recurrent"], 6000)
