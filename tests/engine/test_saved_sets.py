"""Saved sets: kept and opened within a process, and in files across engines; what is checked, what makes room, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pie_core.device.protocol import DeviceError
from pie_core.engine.errors import (
    BudgetExceeded,
    EngineError,
    InvalidState,
    OutOfPages,
    PassFailed,
    SavedSetDamaged,
    SavedSetMismatch,
    SavedSetsFull,
    UnknownSavedSet,
)
from pie_core.engine.forward import BUFFERED, Geometry, PassSpec
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.loop import Engine
from pie_core.engine.saved_sets import AT_ONCE, MemoryStore, SetStore, Snapshot
from pie_core.engine.set_files import FileStore
from pie_core.engine.working_set import WorkingSet
from tests.engine.fake_runner import FakeRunner, limits, reference
from tests.engine.support import decode, greedy, settle

STEM = [(5 * p + 1) % 80 for p in range(37)]


def save(inst: Instance, ws: WorkingSet, name: str = "x") -> asyncio.Future[int]:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    inst.save(ws, name, lambda n, error: future.set_exception(error) if error else future.set_result(n or 0))
    return future


def opened(inst: Instance, name: str = "x") -> tuple[WorkingSet, asyncio.Future[int]]:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    ws = inst.open(name, lambda n, error: future.set_exception(error) if error else future.set_result(n or 0))
    return ws, future


class Engines:
    """Engines over one store, one after another or side by side; at the end nothing may be left over."""

    def __init__(self, store: Callable[[], SetStore]) -> None:
        self.store = store
        self.made: list[Engine] = []

    def start(self, **changes: int) -> Engine:
        engine = Engine(FakeRunner(limits(**changes)), sets=self.store())
        engine.start()
        self.made.append(engine)
        return engine

    async def stop(self) -> None:
        for engine in self.made:
            await engine.stop()
            assert engine.pool.used == 0 and not engine.instances


@pytest.fixture(params=["memory", "files"])
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Engines:
    memory = MemoryStore()
    return Engines(lambda: memory if request.param == "memory" else FileStore(tmp_path / "sets", "a model"))


async def prefilled(inst: Instance) -> WorkingSet:
    ws, pipe = inst.working_set(), inst.pipeline()
    await inst.submit(pipe, PassSpec(STEM, [ws]))[0]
    inst.close_pipeline(pipe)
    return ws


async def test_a_set_goes_on_in_another_engine(engines: Engines) -> None:
    first, second = engines.start(), engines.start()
    inst = first.open_instance("a", "ann")
    ws = await prefilled(inst)
    assert await save(inst, ws) == 37
    inst.close()
    other = second.open_instance("b", "ann")
    again, there = opened(other)
    out = other.submit(other.pipeline(), greedy([3], again))[0]  # before it is there
    assert await there == 37 and await out == reference([*STEM, 3])
    assert second.metrics.prefill_tokens + second.metrics.decode_tokens == 1, "nothing was computed again"
    assert await decode(other, [4], 3, again) == await decode(other, [*STEM, 3, 4], 3)
    other.close()
    await engines.stop()


async def test_buffer_tree_and_fork_points_come_along(engines: Engines) -> None:
    engine = engines.start()
    inst, pipe = (made := engine.open_instance("a")), made.pipeline()
    ws = await prefilled(inst)
    inst.submit(pipe, PassSpec([60, 61, 62], [ws], Geometry.check("buffered", tree=[-1, 0, 0])))
    assert await save(inst, ws) == 40, "ordered after what was accepted"
    again, _ = opened(inst)
    inst.commit(again, [0, 2])
    assert await inst.submit(pipe, greedy([3], again))[0] == reference([*STEM, 60, 62, 3])
    inst.commit(ws, [0, 1])
    assert await inst.submit(pipe, greedy([3], ws))[0] == reference([*STEM, 60, 61, 3])
    third, there = opened(inst)
    await there
    inst.discard(third)
    assert await inst.submit(pipe, greedy([3], inst.fork(third)))[0] == reference([*STEM, 3])
    inst.close()
    await engines.stop()


@pytest.mark.parametrize("slow", ["passes", "pages", "writing", "none"])
@pytest.mark.parametrize("instances", [1, 2])
async def test_of_two_saves_of_one_name_the_one_asked_for_last_is_kept(engines: Engines, slow: str, instances: int) -> None:
    """Though the first is ready later: its passes, its pages or its write take longer."""
    engine = engines.start()
    opens = [engine.open_instance(f"i{k}", "ann") for k in range(instances)]
    inst, other = opens[0], opens[-1]
    first, second = inst.working_set(), other.working_set()
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    await other.submit(other.pipeline(), PassSpec([1, 2, 3], [second]))[0]
    if slow != "passes":
        await inst.submit(inst.pipeline(), PassSpec(STEM, [first]))[0]
    put, names = engine.saved._store.put, engine.saved._names

    async def late(tenant: str, name: str, snapshot: Snapshot) -> None:
        if slow == "writing" and snapshot.length == 37:
            await asyncio.sleep(0.02)
        await put(tenant, name, snapshot)

    engine.saved._store.put = late  # type: ignore[method-assign]
    runner.hold = slow == "passes"
    runner.delay = 0.02 if slow == "pages" else 0.0
    if slow == "passes":
        inst.submit(inst.pipeline(), PassSpec(STEM, [first]))
        await settle()
    one = save(inst, first)
    await settle(2)  # it reads its pages, or writes
    runner.delay = 0.0
    two = save(other, second)
    assert await two == 3
    runner.hold = False
    runner.release()
    assert await one == 37, "as if it had been kept and replaced"
    engine.saved._store.put = put  # type: ignore[method-assign]
    assert not names
    again, there = opened(inst)
    assert await there == 3
    assert await inst.submit(inst.pipeline(), greedy([4], again))[0] == reference([1, 2, 3, 4])
    assert await save(inst, first) == 37, "a later one"
    assert await opened(inst)[1] == 37
    for each in opens:
        each.close()
    await engines.stop()


async def test_where_the_last_save_of_a_name_fails_the_one_before_it_is_kept(engines: Engines) -> None:
    engine = engines.start()
    inst = engine.open_instance("a")
    ws, failed = await prefilled(inst), inst.working_set()
    one = save(inst, ws)
    inst.truncate(failed, 9)  # past the end
    with pytest.raises(InvalidState):
        await save(inst, failed)
    inst.drop(failed)
    with pytest.raises(InvalidState, match="dropped"):
        save(inst, failed)
    assert await one == 37 and await opened(inst)[1] == 37
    assert not engine.saved._names
    inst.close()
    await engines.stop()


async def test_later_writes_and_saves_change_nothing_of_an_earlier_one(engines: Engines) -> None:
    engine = engines.start()
    inst, pipe = (made := engine.open_instance("a")), made.pipeline()
    ws = await prefilled(inst)
    first = save(inst, ws, "first")
    more = inst.submit(pipe, greedy([3], ws))[0]
    second = save(inst, ws, "second")
    inst.drop(ws)
    assert (await first, await more, await second) == (37, reference([*STEM, 3]), 38)
    a, b = opened(inst, "first")[0], opened(inst, "second")[0]
    assert await inst.submit(pipe, greedy([9], a))[0] == reference([*STEM, 9])
    assert await inst.submit(pipe, greedy([9], b))[0] == reference([*STEM, 3, 9])
    assert await save(inst, b, "first") == 39, "the name is taken over"
    assert await opened(inst, "first")[1] == 39
    inst.close()
    await engines.stop()


async def test_names_belong_to_a_tenant_and_are_plain(engines: Engines) -> None:
    engine = engines.start()
    ann, bob = engine.open_instance("a", "ann"), engine.open_instance("b", "bob")
    ws = await prefilled(ann)
    await save(ann, ws, "Chat-1.2_x")
    mine, there = opened(bob, "Chat-1.2_x")
    with pytest.raises(UnknownSavedSet, match=r"no working set is saved as 'Chat-1\.2_x'"):
        await there
    with pytest.raises(UnknownSavedSet):
        await bob.submit(bob.pipeline(), greedy([1], mine))[0]
    for name in ("", ".x", "../x", "a/b", "a b", "x" * 101, "ä", "a\n"):
        with pytest.raises(InvalidState, match="cannot be named"):
            ann.save(ws, name, lambda n, error: None)
        with pytest.raises(InvalidState, match="cannot be named"):
            ann.open(name, lambda n, error: None)
    ann.close()
    bob.close()
    await engines.stop()


async def test_an_empty_set_and_one_of_unknown_ids(engines: Engines) -> None:
    engine = engines.start()
    inst, pipe = (made := engine.open_instance("a")), made.pipeline()
    assert await save(inst, inst.working_set()) == 0
    assert await inst.submit(pipe, greedy([3], opened(inst)[0]))[0] == reference([3])
    ws = inst.working_set()
    await inst.submit(pipe, PassSpec(STEM, [ws], Geometry(window=8)))[0]
    await save(inst, ws)
    assert await inst.submit(pipe, greedy([3], opened(inst)[0], geometry=Geometry(window=8)))[0] == reference([*STEM, 3], 8)
    inst.close()
    await engines.stop()


async def test_a_paused_set_is_saved_and_a_set_without_room_is_computed_again(engines: Engines) -> None:
    engine, small = engines.start(), engines.start(pages=5)
    inst = engine.open_instance("a")
    ws = await prefilled(inst)
    ws.pause()
    assert await save(inst, ws, "paused") == 37
    assert await inst.submit(inst.pipeline(), greedy([3], opened(inst, "paused")[0]))[0] == reference([*STEM, 3])
    busy, waits = small.open_instance("busy"), small.open_instance("waits")
    held = busy.working_set()
    await busy.submit(busy.pipeline(), PassSpec(list(range(45)), [held]))[0]
    ws = await prefilled(inst)
    await save(inst, ws, "whole")
    inst.close()
    again, there = opened(waits, "whole")
    assert await there == 37 and again.paused
    out = waits.submit(waits.pipeline(), greedy([3], again))[0]
    await settle()
    assert not out.done()
    busy.close()
    assert await out == reference([*STEM, 3])
    waits.close()
    await engines.stop()


async def test_no_room_is_told_with_numbers(engines: Engines) -> None:
    engine = engines.start(pages=4)
    inst, pipe = (made := engine.open_instance("a")), made.pipeline()
    ws = inst.working_set()
    await inst.submit(pipe, PassSpec(STEM, [ws], Geometry(window=8)))[0]  # no recipe
    await save(inst, ws)
    with pytest.raises(OutOfPages, match="needs 3 KV pages, 1 are free"):
        await opened(inst)[1]
    bounded = engine.open_instance("b", limits=InstanceLimits(pages=2))
    inst.close()
    with pytest.raises(OutOfPages, match="needs 3 KV pages, 2 are free"):
        await opened(bounded)[1]
    bounded.close()
    small = engines.start(pages=2, context=32).open_instance("c")  # as a model's runner has it: the pool bounds the context
    with pytest.raises(OutOfPages, match="needs 3 KV pages, 2 are free"):
        await opened(small)[1]
    small.close()
    await engines.stop()


async def test_a_failed_set_is_not_saved(engines: Engines) -> None:
    engine = engines.start()
    runner: Any = engine.runner
    inst, pipe = (made := engine.open_instance("a")), made.pipeline()
    ws = await prefilled(inst)
    runner.fail_results = lambda batch: DeviceError("injected")
    inst.submit(pipe, PassSpec([1], [ws]))
    with pytest.raises(PassFailed, match="injected"):
        await save(inst, ws)
    runner.fail_results = lambda batch: None
    ws, runner.fail_read = await prefilled(inst), DeviceError("no read")
    with pytest.raises(PassFailed, match="no read"):
        await save(inst, ws)
    with pytest.raises(UnknownSavedSet):
        await opened(inst)[1]
    inst.close()
    await engines.stop()


async def test_a_fork_whose_parent_fails_while_it_is_read_is_not_saved() -> None:
    runner = FakeRunner(delay=0.01)
    engine = Engine(runner)
    engine.start()
    inst, pipe = (made := engine.open_instance("a")), made.pipeline()
    ws = await prefilled(inst)
    runner.fail_results = lambda batch: DeviceError("injected")
    inst.submit(pipe, PassSpec([1], [ws]))
    fork = inst.fork(ws, pipe)
    with pytest.raises(PassFailed, match="injected"):
        await save(inst, fork)
    inst.close()
    await engine.stop()


@pytest.mark.parametrize("end", ["close", "drop", "stop"])
async def test_ending_in_the_middle(engines: Engines, end: str) -> None:
    engine = engines.start()
    runner: Any = engine.runner
    inst = engine.open_instance("a")
    ws = await prefilled(inst)
    await save(inst, ws)
    runner.delay = 0.01
    heard: list[Any] = []
    inst.save(ws, "y", lambda n, error: heard.append(n or error))
    again = inst.open("x", lambda n, error: heard.append(n or error))
    if end == "drop":
        inst.drop(ws)
        inst.drop(again)
        while len(heard) < 2:
            await asyncio.sleep(0.001)
        assert not inst.working_sets and inst.busy == 0
    elif end == "close":
        inst.close()
        assert engine.pool.used == 0
        while len(heard) < 2:
            await asyncio.sleep(0.001)
    inst.close()
    await engines.stop()


async def test_too_many_at_once_are_refused(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines.start()
    inst = engine.open_instance("a")
    ws = await prefilled(inst)
    saves = [save(inst, ws, f"s{k}") for k in range(AT_ONCE + 1)]
    late, there = opened(inst, "s0")
    assert await asyncio.gather(*saves[:-1]) == [37] * AT_ONCE
    for refused in (saves[-1], there, inst.submit(inst.pipeline(), greedy([1], late))[0]):
        with pytest.raises(BudgetExceeded, match="8 saves and opens go on"):
            await refused
    monkeypatch.setattr("pie_core.engine.saved_sets.READING_CAP", 500)
    saves = [save(inst, ws, f"s{k}") for k in range(2)]
    assert await saves[0] == 37
    with pytest.raises(BudgetExceeded, match="saves of 384 bytes go on, the most is 500"):
        await saves[1]
    inst.close()
    await engines.stop()


# --- the stores


def snapshot(kv: bytes = b"kv" * 64, length: int = 3) -> Snapshot:
    return Snapshot(length, 2, (-1,), (1, 2, -1), 2, kv)


async def test_memory_lets_the_longest_unused_go() -> None:
    store = MemoryStore(cap=1600)
    for name in "abc":
        await store.put("t", name, snapshot())
    await store.put("t", "b", snapshot(b""))  # smaller now
    await store.get("t", "a")
    await store.put("t", "d", snapshot(bytes(400)))
    with pytest.raises(UnknownSavedSet):
        await store.get("t", "c")
    assert (await store.get("t", "a")) == snapshot()
    with pytest.raises(SavedSetsFull, match=r"takes 2280 bytes.*may have 1600"):
        await store.put("t", "e", snapshot(bytes(2000)))


async def test_files_are_whole_checked_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "sets"
    store = FileStore(folder, "model a")
    await store.put("ann", "x", snapshot())
    assert await FileStore(folder, "model a").get("ann", "x") == snapshot()
    (file,) = folder.iterdir()
    assert file == store.path("ann", "x") and b"ann" not in file.read_bytes() and "x" not in file.stem
    assert folder.stat().st_mode & 0o77 == 0 and file.stat().st_mode & 0o77 == 0
    with pytest.raises(SavedSetMismatch, match=r"saved from another model: model a, this one is model b"):
        await FileStore(folder, "model b").get("ann", "x")
    good = file.read_bytes()
    for bad in (good[:-1], good[:50], b"", good[:60] + bytes([good[60] ^ 1]) + good[61:], good[:-40] + bytes(40)):
        file.write_bytes(bad)
        with pytest.raises(SavedSetDamaged, match="damaged: save it again"):
            await store.get("ann", "x")
    file.write_bytes(good)
    file.rename(store.path("bob", "x"))
    with pytest.raises(UnknownSavedSet):
        await store.get("bob", "x")
    with pytest.raises(UnknownSavedSet):
        await store.get("ann", "x")


async def test_files_let_the_longest_unused_go(tmp_path: Path) -> None:
    import os

    store = FileStore(tmp_path, "m", cap=2000)
    for k, name in enumerate("abc"):
        await store.put("t", name, snapshot(bytes(400)))
        os.utime(store.path("t", name), (k, k))
    assert (await store.get("t", "a")).length == 3  # used now
    await store.put("t", "d", snapshot(bytes(700)))
    kept = [name for name in "abcd" if store.path("t", name).exists()]
    assert "a" in kept and "d" in kept and "b" not in kept
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) <= 2000
    with pytest.raises(SavedSetsFull, match="may have 2000"):
        await store.put("t", "e", snapshot(bytes(3000)))
    assert not list(tmp_path.glob("*.part"))


async def test_a_folder_that_cannot_be_written_or_read_is_told(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SavedSetsFull, match="could not be written"):
        await FileStore(blocked / "sets", "m").put("t", "x", snapshot())
    store = FileStore(tmp_path, "m")
    store.path("t", "x").mkdir()
    with pytest.raises(SavedSetsFull, match="could not be written"):
        await store.put("t", "x", snapshot())
    with pytest.raises(SavedSetDamaged, match="cannot be read"):
        await store.get("t", "x")
    assert not list(tmp_path.glob("*.part"))


async def test_a_set_of_another_layout_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    await store.put("", "x", snapshot(bytes(100)))
    await store.put("", "long", Snapshot(999, 999, None, (1,) * 999, 999, b""))
    await store.put("", "nothing", snapshot(b""))
    engine = Engine(FakeRunner(), sets=store)
    engine.start()
    inst = engine.open_instance("a")
    for name in ("x", "long", "nothing"):
        with pytest.raises(SavedSetMismatch, match="from another model"):
            await opened(inst, name)[1]
    inst.close()
    await engine.stop()


async def test_a_fault_of_the_store_reaches_whoever_waits(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStore):
        async def put(self, tenant: str, name: str, snapshot: Snapshot) -> None:
            raise KeyError("secret")

    engine = Engine(FakeRunner(), sets=Broken())
    engine.start()
    inst = engine.open_instance("a")
    with pytest.raises(EngineError, match="failed: KeyError"):
        await save(inst, inst.working_set())
    assert "saving or opening a working set failed" in caplog.text
    inst.close()
    await engine.stop()


async def test_opened_pages_are_not_offered_to_others(engines: Engines) -> None:
    engine = engines.start()
    inst = engine.open_instance("a")
    await save(inst, await prefilled(inst))
    inst.close()
    engine.cache.clear()
    inst = engine.open_instance("a")
    again, _ = opened(inst)
    await inst.submit(inst.pipeline(), greedy([3], again))[0]
    assert len(engine.cache) == 0
    assert await decode(inst, [*STEM, 3], 1) == [reference([*STEM, 3])]
    assert BUFFERED.mode == "buffered"
    inst.close()
    await engines.stop()
