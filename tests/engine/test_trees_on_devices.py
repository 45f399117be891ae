"""Trees, paths, masks and saved sets over real devices and a tiny random model: what the fake runner cannot show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pie_core.engine.forward import BUFFERED, Geometry, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.saved_sets import SavedSets
from pie_core.engine.set_files import FileStore
from pie_core.engine.working_set import WorkingSet
from pie_core.eta import cast, intrinsics, reduce_argmax
from pie_core.eta import channel as ch
from tests.engine.test_on_devices import PROMPT, decode, greedy, spec, traced
from tests.support.engines import Kind, running_engine
from tests.support.tiny_gguf import write_tiny_gguf

DRAFTS = [50, 51, 52, 53, 54, 55]
TREE = (-1, 0, 0, 2, 2, -1)
PATHS = ([0], [0, 1], [0, 2], [0, 2, 3], [0, 2, 4], [5])


@pytest.fixture(scope="session")
def shaped_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trees") / "tiny.gguf"
    write_tiny_gguf(path, layers=3, context=256, seed=5)
    return path


@pytest_asyncio.fixture(params=["cpu", "webgpu"])
async def engine(request: pytest.FixtureRequest, shaped_model: Path) -> AsyncIterator[Engine]:
    kind: Kind = request.param
    async with running_engine(kind, shaped_model, kv_pool_mb=1) as e:
        yield e
        assert e.pool.used == 0


async def rows(engine: Engine, inst: Instance, ws: WorkingSet, tokens: list[int], geometry: Geometry) -> list[list[float]]:
    """The logits behind each token of a pass."""
    t = traced(engine, lambda: tuple(intrinsics.output(k, "logits") for k in range(len(tokens))))
    work = PassSpec(tokens, [ws], geometry, [list(range(len(tokens)))], t.program, t.params)
    values: list[Any] = [await out for out in inst.submit(inst.pipeline(), work)]
    return [value.tolist() for value in values]


async def stem(engine: Engine, inst: Instance) -> WorkingSet:
    ws = inst.working_set()
    await inst.submit(inst.pipeline(), PassSpec(PROMPT, [ws]))[0]
    return ws


async def test_a_verified_tree_equals_its_branches(engine: Engine) -> None:
    """Every node gives the logits of its path alone under plain attention."""
    inst = engine.open_instance("t")
    ws = await stem(engine, inst)
    got = await rows(engine, inst, inst.fork(ws), DRAFTS, Geometry.check("buffered", tree=TREE))
    for node, path in zip(got, PATHS, strict=True):
        want = await rows(engine, inst, inst.fork(ws), [DRAFTS[k] for k in path], BUFFERED)
        assert node == pytest.approx(want[-1], rel=0, abs=1e-4)
        assert node.index(max(node)) == want[-1].index(max(want[-1]))
    inst.close()


async def test_a_committed_path_goes_on_like_the_path_alone(engine: Engine) -> None:
    inst = engine.open_instance("t")
    ws = await stem(engine, inst)
    await inst.submit(inst.pipeline(), PassSpec(DRAFTS, [ws], Geometry.check("buffered", tree=TREE)))[0]
    forks = [inst.fork(ws, buffer=True) for _ in PATHS]
    for fork, path in zip(forks, PATHS, strict=True):
        inst.commit(fork, path)
    for fork, path in zip(forks, PATHS, strict=True):
        assert await decode(engine, inst, [60], 5, fork) == await decode(engine, inst, [*PROMPT, *(DRAFTS[k] for k in path), 60], 5)
    inst.close()


async def test_a_mask_that_hides_the_past_is_a_prompt_without_it(engine: Engine) -> None:
    """Hidden tokens leave the positions as they are, so that a window over the same tokens says the same."""
    inst = engine.open_instance("t")
    n = len(PROMPT)
    mask = [[k - 3 <= p <= k for p in range(n)] for k in range(n)]
    got = await rows(engine, inst, inst.working_set(), PROMPT[:16], Geometry.check(mask=[row[:16] for row in mask[:16]]))
    want = await rows(engine, inst, inst.working_set(), PROMPT[:16], Geometry(window=4))
    plain = await rows(engine, inst, inst.working_set(), PROMPT[:16], Geometry())
    assert got[-1] == pytest.approx(want[-1], rel=0, abs=1e-4)
    assert got[-1] != pytest.approx(plain[-1], rel=0, abs=1e-3)
    inst.close()


async def test_speculation_with_the_count_left_on_the_device(engine: Engine) -> None:
    """Two right drafts and a wrong one; the epilogue counts the right ones, and the next pass is submitted before anybody knows."""
    inst = engine.open_instance("t")
    want = await decode(engine, inst, PROMPT, 5)
    ws = await stem(engine, inst)
    cell = inst.channel("i32", (), 1, host="reader")
    guess = [want[0], want[1], (want[2] + 1) % engine.limits.vocab]
    t = greedy(engine)
    # token k was right if the row before it chose it

    def count() -> Any:
        right = [cast(reduce_argmax(intrinsics.output(k, "logits")) == guess[k + 1], "i32") for k in range(2)]
        ch.put(cell, right[0] + right[0] * right[1] + 1)
        return reduce_argmax(intrinsics.output(1, "logits"))

    counted = traced(engine, count)
    pipe = inst.pipeline()
    work = PassSpec(guess, [ws], BUFFERED, [[0, 1, 2]], counted.program, counted.params, counted.channels)
    third = inst.submit(pipe, work)[0]
    inst.commit(ws, cell)
    inst.discard(ws)
    after = inst.submit(pipe, spec(t, [want[2]], ws))[0]
    assert await third == want[2]
    assert await after == want[3]
    assert ws.length == len(PROMPT) + 3
    inst.close()


@pytest.mark.parametrize("kind", ["cpu", "webgpu"])
async def test_saved_sets_go_on_after_a_restart(kind: Kind, shaped_model: Path, tmp_path: Path) -> None:
    future: asyncio.Future[Any]

    def store(engine: Engine) -> None:
        engine.saved = SavedSets(engine, FileStore(tmp_path, "tiny"))

    async with running_engine(kind, shaped_model, kv_pool_mb=1) as engine:
        store(engine)
        inst = engine.open_instance("t", "ann")
        want = await decode(engine, inst, [*PROMPT, 60], 6)
        ws = await stem(engine, inst)
        await inst.submit(inst.pipeline(), PassSpec(DRAFTS, [ws], Geometry.check("buffered", tree=TREE)))[0]
        future = asyncio.get_running_loop().create_future()
        inst.save(ws, "kept", lambda n, error: future.set_exception(error) if error else future.set_result(n))
        assert await future == len(PROMPT) + len(DRAFTS)
        inst.close()
    async with running_engine(kind, shaped_model, kv_pool_mb=1) as engine:
        store(engine)
        inst = engine.open_instance("t", "ann")
        inst.submit(inst.pipeline(), PassSpec(list(range(40)), [inst.working_set()]))  # other pages than before
        ws = inst.open("kept", lambda n, error: None)
        path = inst.fork(ws, buffer=True)
        inst.commit(path, [0, 2, 4])
        inst.discard(ws)
        assert await decode(engine, inst, [60], 6, ws) == want
        assert await decode(engine, inst, [60], 6, path) == await decode(engine, inst, [*PROMPT, 50, 52, 54, 60], 6)
        inst.close()
