"""Any order of masks, trees, commits by count, path and device, edits, forks, saves, opens, faults and ends: what each token sees and what
each slot holds equal a plain model, counts of pages are exact, and not a page is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pie_core.device.protocol import PAGE_TOKENS, DeviceError
from pie_core.engine.errors import EngineError, InstanceClosed, UnknownSavedSet
from pie_core.engine.forward import Geometry, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.working_set import WorkingSet
from pie_core.eta import channel
from tests.engine.fake_runner import FakeRunner, answer, limits
from tests.engine.support import argmax, settle, spec, traced
from tests.engine.virtual_time import VirtualLoop
from tests.engine.watched import Watched

MOST = 100  # tokens of a sequence: what always fits
CELL = 12  # entries of a path that the device says
Slot = tuple[int, int]  # token, position
PICK = st.integers(0, 1000)


def fork_of(parents: list[int]) -> list[int] | None:
    """None where each token follows the one before: that is no tree."""
    return None if parents == list(range(-1, len(parents) - 1)) else parents


class Sequence_:
    """The naive model of a working set: what each place holds, and the parents in the buffer where it is a tree."""

    def __init__(self, inst: Instance, ws: WorkingSet) -> None:
        self.inst, self.ws = inst, ws
        self.slots: list[Slot] = []
        self.frozen = 0
        self.parents: list[int] | None = None
        self.points = {0}
        self.dead = False
        self.pipe: Pipeline | None = None

    def like(self, other: Sequence_, length: int) -> Sequence_:
        self.slots, self.frozen = other.slots[:length], other.frozen
        self.parents = list(other.parents) if other.parents is not None and length > other.frozen else None
        self.points = {self.frozen, length}
        return self

    def tree(self) -> list[int]:
        return self.parents if self.parents is not None else list(range(-1, len(self.slots) - self.frozen - 1))

    def path(self, node: int) -> list[int]:
        """Root to node."""
        nodes, tree = [node], self.tree()
        while tree[nodes[0]] >= 0:
            nodes.insert(0, tree[nodes[0]])
        return nodes

    def cut(self, length: int) -> None:
        del self.slots[length:]
        self.frozen = min(self.frozen, length)
        if self.parents is not None:
            self.parents = fork_of(self.parents[: length - self.frozen])
        self.points = {p for p in self.points if p <= length}

    def counts(self) -> list[int]:
        """The counts that can be committed."""
        tree = self.tree()
        good = [n for n in range(len(tree) + 1) if all(p == k - 1 if k < n else p >= n - 1 for k, p in enumerate(tree))]
        return sorted({0, *good})

    def commit(self, what: int | list[int]) -> None:
        if isinstance(what, int):
            if self.parents is not None:
                self.parents = fork_of([p - what for p in self.parents[what:]])
            self.frozen += what
        else:
            kept = [self.slots[self.frozen + k] for k in what]
            self.slots = [*self.slots[: self.frozen], *kept]
            self.frozen, self.parents = len(self.slots), None
            self.points = {p for p in self.points if p <= self.frozen}


class TreeMachine(RuleBasedStateMachine):
    """`pages` and `faults` are set by the variants below."""

    pages = 256
    faults = False

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.runner = FakeRunner(limits(max_tokens=8, pages=self.pages, max_reads=6, mask_words=128, arena_words=1 << 16))
        self.engine = Watched(self.runner, deterministic=True)
        self.open: list[Instance] = []
        self.known: list[Sequence_] = []
        self.pending: list[tuple[Any, int, Sequence_]] = []
        self.saving: list[tuple[list[Any], str, Sequence_]] = []
        self.saved: dict[str, Sequence_] = {}
        self.do(self.engine.start)

    def do(self, fn: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return fn()

        return fn() if self.loop.is_running() else self.loop.run_until_complete(call())

    def inst(self, which: int) -> Instance:
        """One of up to three instances."""
        while len(self.open) <= which % 3:
            self.open.append(self.do(lambda: self.engine.open_instance("x")))
        return self.open[which % 3]

    def living(self, at: int) -> Sequence_:
        """A sequence that was not dropped, there is always one."""
        alive = [seq for seq in self.known if not seq.dead]
        return alive[at % len(alive)] if alive else self.fresh(at)

    @rule(which=PICK)
    def new_sequence(self, which: int) -> None:
        self.fresh(which)

    def fresh(self, which: int) -> Sequence_:
        inst = self.inst(which)
        return self.add(Sequence_(inst, self.do(inst.working_set)))

    def add(self, seq: Sequence_) -> Sequence_:
        self.known.append(seq)
        return seq

    def pipe_of(self, seq: Sequence_, *, another: bool = False) -> Pipeline:
        """The pipeline that the set was used by, or another one."""
        if another or seq.pipe is None:
            seq.pipe = self.do(seq.inst.pipeline)
        return seq.pipe

    @rule(at=PICK, n=st.integers(1, 12), shape=st.sampled_from(["plain", "mask", "tree", "both", "tree"]), luck=st.integers(0, 1 << 30),
          says=st.sampled_from(["", "", "count", "path", "drafts", "drafts"]))  # fmt: skip
    def submit(self, at: int, n: int, shape: str, luck: int, says: str) -> None:
        seq, dice = self.living(at), random.Random(luck)  # what is drawn must not depend on time
        tree, mask = shape in ("tree", "both") or seq.parents is not None, shape in ("mask", "both")
        buffered = dice.random() < 0.5 or tree or bool(says)
        if len(seq.slots) + n > MOST:
            return
        pipe = self.pipe_of(seq, another=dice.random() < 0.3)
        if not buffered and len(seq.slots) > seq.frozen:
            self.do(lambda: seq.inst.discard(seq.ws))
            seq.cut(seq.frozen)
        tokens = [dice.randrange(20) for _ in range(n)]
        before, held = len(seq.slots), len(seq.slots) - seq.frozen
        parents = [dice.randrange(max(-1, held + k - 4), held + k) for k in range(n)] if tree else None
        rows = (
            [[p == before + k or (p < before + k and dice.random() < 0.6) for p in range(before + n)] for k in range(n)] if mask else None
        )
        geometry = Geometry.check("buffered" if buffered else "folding", mask=rows, tree=parents)
        if parents is not None:
            seq.parents = [*seq.tree(), *parents]
        for k in range(n):
            path = seq.path(held + k) if tree else []
            seq.slots.append((tokens[k], seq.frozen + len(path) - 1 if tree else before + k))
        if seq.parents is not None:
            seq.parents = fork_of(seq.parents)
        if not buffered:
            seq.frozen = len(seq.slots)
        seen = [*range(seq.frozen), *(seq.frozen + k for k in path)] if tree else range(before + n)
        expected = answer([seq.slots[p] for p in seen if rows is None or rows[-1][p]])
        inst, ws = seq.inst, seq.ws
        if not says:
            t = traced(argmax)
            work = PassSpec(tokens, [ws], geometry, program=t.program, params=t.params)
            self.pending.append((self.do(lambda: inst.submit(pipe, work)[0]), expected, seq))
            return
        what: Any = dice.choice(seq.counts()) if says != "path" else dice.choice([[], seq.path(held + dice.randrange(n))])
        if says == "path":
            what = what[:CELL]
        self.pending.append((self.do(lambda: self.device_commit(pipe, tokens, ws, geometry, what, drops=says == "drafts")), expected, seq))
        seq.commit(what)
        if says == "drafts":
            seq.cut(seq.frozen)

    def device_commit(
        self, pipe: Pipeline, tokens: list[int], ws: WorkingSet, geometry: Geometry, what: int | list[int], *, drops: bool
    ) -> Any:
        """A pass whose epilogue says what to commit, the commit, and (`drops`) the end of the rest."""
        inst = pipe.instance
        path = isinstance(what, list)
        words = [*what, *[0xFFFFFFFF] * (CELL - len(what))] if isinstance(what, list) else [what]
        shape = (CELL,) if path else ()
        source = inst.channel("i32", shape, 1, seed=words)
        says = inst.channel("i32", shape, 1, host="reader")

        def fn() -> Any:
            channel.put(says, channel.take(source))
            return argmax()

        out = inst.submit(pipe, spec(tokens, [ws], fn, geometry))[0]
        inst.commit(ws, says)
        if drops:
            inst.discard(ws)
        return out

    @rule(at=PICK, pick=st.integers(0, 50), path=st.booleans())
    def commit(self, at: int, pick: int, path: bool) -> None:
        seq = self.living(at)
        held = len(seq.slots) - seq.frozen
        counts = seq.counts()
        what: int | list[int] = (seq.path(pick % held) if held else []) if path else counts[pick % len(counts)]
        self.do(lambda: seq.inst.commit(seq.ws, what))
        seq.commit(what)

    @rule(at=PICK, n=st.integers(0, 8), whole=st.sampled_from([False, False, True]))
    def discard(self, at: int, n: int, whole: bool) -> None:
        seq = self.living(at)
        n = min(n, len(seq.slots) - seq.frozen)
        self.do(lambda: seq.inst.discard(seq.ws, None if whole else n))
        seq.cut(seq.frozen if whole else len(seq.slots) - n)

    @rule(at=PICK, pick=st.integers(-8, 8))
    def truncate(self, at: int, pick: int) -> None:
        seq = self.living(at)
        places = sorted({*(p for p in seq.points if p <= len(seq.slots)), *range(seq.frozen, len(seq.slots) + 1)})
        self.do(lambda: seq.inst.truncate(seq.ws, places[pick % len(places)]))
        seq.cut(places[pick % len(places)])

    @rule(at=PICK, buffer=st.booleans(), ordered=st.booleans())
    def fork(self, at: int, buffer: bool, ordered: bool) -> None:
        seq = self.living(at)
        pipe = self.pipe_of(seq)
        child = self.do(lambda: seq.inst.fork(seq.ws, pipe if ordered else None, buffer=buffer))
        length = len(seq.slots) if buffer else seq.frozen
        seq.points |= {seq.frozen, length}
        self.add(Sequence_(seq.inst, child).like(seq, length))

    @rule(at=PICK)
    def save(self, at: int) -> None:
        seq = self.living(at)
        name, heard = f"set{len(self.saving) + len(self.saved)}", []
        self.do(lambda: seq.inst.save(seq.ws, name, lambda n, error: heard.append(error or n)))
        self.saving.append((heard, name, Sequence_(seq.inst, seq.ws).like(seq, len(seq.slots))))

    @rule(at=PICK)
    def length(self, at: int) -> None:
        seq = self.living(at)
        out = self.loop.create_future()
        self.do(lambda: seq.inst.length(seq.ws, lambda n, error: out.set_exception(error) if error else out.set_result(n)))
        self.pending.append((out, len(seq.slots), seq))

    @rule(which=PICK, pick=st.integers(0, 50))
    def reopen(self, which: int, pick: int) -> None:
        inst = self.inst(which)
        self.judge()
        if not self.saved:
            return
        name = sorted(self.saved)[pick % len(self.saved)]
        kept = self.saved[name]
        heard: list[Any] = []
        ws = self.do(lambda: inst.open(name, lambda n, error: heard.append(error or n)))
        self.add(Sequence_(inst, ws).like(kept, len(kept.slots)))

    @rule(which=PICK)
    def open_nothing(self, which: int) -> None:
        inst = self.inst(which)
        heard: list[Any] = []
        ws = self.do(lambda: inst.open("nothing", lambda n, error: heard.append(error)))
        self.loop.run_until_complete(settle(5))
        assert isinstance(heard[0], UnknownSavedSet)
        self.do(lambda: inst.drop(ws))

    @rule(at=PICK, luck=st.integers(0, 4))
    def drop(self, at: int, luck: int) -> None:
        seq = self.living(at)
        if luck == 0:
            seq.dead = True
            self.do(lambda: seq.inst.drop(seq.ws))

    @rule(which=PICK, luck=st.integers(0, 9))
    def close(self, which: int, luck: int) -> None:
        inst = self.inst(which)
        if luck == 0:
            self.do(inst.close)
            self.open.remove(inst)
            for seq in self.known:
                seq.dead = seq.dead or seq.inst is inst
            assert all(out.done() for out, _, seq in self.pending if seq.inst is inst)

    @rule(times=st.integers(1, 12))
    def run(self, times: int) -> None:
        self.loop.run_until_complete(settle(times))
        self.judge()

    @rule()
    def fault(self) -> None:
        if self.faults:
            at = len(self.runner.batches) + 1
            self.runner.fail_results = lambda batch: DeviceError("injected") if len(self.runner.batches) == at else None

    def judge(self) -> None:
        """Every settled output and save is right, or failed for a reason that this variant has."""
        pending, self.pending = self.pending, []
        for out, expected, seq in pending:
            if not out.done():
                self.pending.append((out, expected, seq))
            elif out.exception() is None:
                assert out.result() == expected
            else:
                self.excuse(out.exception())
                self.lose(seq)
        saving, self.saving = self.saving, []
        for heard, name, kept in saving:
            if not heard:
                self.saving.append((heard, name, kept))
            elif isinstance(heard[0], Exception):
                self.excuse(heard[0])
                self.saved.pop(name, None)
            else:
                assert heard[0] == len(kept.slots)
                self.saved[name] = kept

    def excuse(self, error: Any) -> None:
        assert isinstance(error, EngineError)
        assert isinstance(error, InstanceClosed) or self.faults, error

    def lose(self, seq: Sequence_) -> None:
        """A pass failed: what the set holds is no longer what the model says, nor what was forked from it."""
        for other in self.known:
            if other.inst is seq.inst and not other.dead and not other.inst.closed:
                other.dead = True
                self.do(lambda other=other: other.inst.drop(other.ws))

    @invariant()
    def nobody_is_forgotten(self) -> None:
        self.do(self.engine.check_asleep)

    @invariant()
    def pages_are_exact(self) -> None:
        held: dict[int, int] = {}
        for inst in self.open:
            mine = [page for ws in (*inst.working_sets, *(r.copy for r in inst.revivals.values())) for page in ws.pages]
            assert inst.held == {page: mine.count(page) for page in mine}
            for page in mine:
                held[page] = held.get(page, 0) + 1
        assert self.engine.pool.used == len(held)
        assert all(self.engine.pool.refs(page) == n for page, n in held.items())

    @invariant()
    def contents_are_right(self) -> None:
        for seq in self.known:
            ws = seq.ws
            if not seq.dead and ws.born and ws.order.idle and not ws.dropped and ws.error is None:
                assert (ws.length, ws.frozen, ws.parents) == (len(seq.slots), seq.frozen, seq.parents)
                assert ws.fork_points == seq.points
                if not ws.paused and all(w.ended for w in ws.inherited):
                    slots = [ws.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in range(ws.length)]
                    assert [self.runner.kv.get(slot) for slot in slots] == seq.slots

    def teardown(self) -> None:
        self.runner.fail_results = lambda batch: None
        for _ in range(1000):
            self.loop.run_until_complete(settle(10))
            self.judge()
            if not self.pending and not self.saving:
                break
            self.loop.run_until_complete(asyncio.sleep(0.001))  # by the loop's own clock
        assert not self.pending and not self.saving, "everything that was submitted ends"
        for inst in list(self.open):
            self.do(inst.close)
        self.judge()
        self.loop.run_until_complete(self.engine.stop())
        assert self.engine.pool.used == 0 and self.engine.pool.unlent == self.pages
        assert self.engine.arena.used == 0
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class FaultyTreeMachine(TreeMachine):
    """Few pages and a device that fails now and then."""

    pages = 24
    faults = True


_SETTINGS = settings(max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
TestTrees = TreeMachine.TestCase
TestTrees.settings = _SETTINGS
TestFaultyTrees = FaultyTreeMachine.TestCase
TestFaultyTrees.settings = _SETTINGS
