"""Any order of submit, fork, edit, cut, drop, close, save and fault with recurrent state: right answers and states against plain token
lists, slots counted exactly, and none lost. One rule draws every operation, so that each example is full of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pie_core.device.protocol import DeviceError
from pie_core.engine import pausing
from pie_core.engine.errors import EngineError, InstanceClosed, OutOfPages, OutOfSlots, PassFailed
from pie_core.engine.forward import BUFFERED, FOLDING, Pass
from pie_core.engine.instance import Instance
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.working_set import WorkingSet
from tests.engine.fake_runner import reference
from tests.engine.recurrent_runner import RecurrentRunner, recurrent_limits
from tests.engine.support import greedy, settle
from tests.engine.virtual_time import VirtualLoop
from tests.engine.watched import Watched

STEP = 24  # tokens: a whole buffer fits
MOST = 120  # tokens of a sequence
SETS = 12  # alive at once
OPS = {"submit": 6, "draft": 8, "commit": 5, "discard": 2, "fork": 4, "truncate": 2, "drop": 1, "close": 1, "run": 6, "fault": 1}


class Sequence_:
    """The naive model of a working set, and the one pipeline that uses it."""

    def __init__(self, pipe: Pipeline, ws: WorkingSet, tokens: list[int], frozen: int) -> None:
        self.pipe, self.ws, self.tokens, self.frozen = pipe, ws, tokens, frozen
        self.points = {len(tokens)}

    @property
    def inst(self) -> Instance:
        return self.pipe.instance


class RecurrentMachine(RuleBasedStateMachine):
    """Slots enough for everything."""

    slots, pages = 256, 512
    faults = False
    drafts = True
    seen: ClassVar[Counter[str]] = Counter()  # what all examples together did

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.runner = RecurrentRunner(recurrent_limits(self.slots, max_tokens=STEP, pages=self.pages, max_reads=6))
        self.engine = Watched(self.runner, deterministic=True)
        self.patience, pausing.PATIENCE = pausing.PATIENCE, 0.0
        self.live: list[Sequence_] = []
        self.pending: list[tuple[Any, int, Sequence_]] = []
        self.do(self.engine.start)
        self.open = [self.opened() for _ in range(2)]

    def do(self, fn: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return fn()

        return self.loop.run_until_complete(call())

    def opened(self) -> Instance:
        inst = self.do(lambda: self.engine.open_instance("x"))
        for _ in range(2):
            self.live.append(Sequence_(self.do(inst.pipeline), self.do(inst.working_set), [], 0))
        return inst

    @rule(
        name=st.sampled_from([name for name, weight in OPS.items() for _ in range(weight)]),
        which=st.integers(0, 99),
        n=st.integers(0, 20),
        yes=st.booleans(),
        token=st.integers(0, 40),
    )
    def act(self, name: str, which: int, n: int, yes: bool, token: int) -> None:
        seq = self.live[which % len(self.live)]
        self.seen[name] += 1
        getattr(self, name)(seq, n, yes, token)

    def submit(self, seq: Sequence_, n: int, yes: bool, token: int) -> None:
        """A folding pass, sometimes longer than a step."""
        n = 1 + (n if yes else n % 3) * (3 if token % 4 == 0 else 1)
        if len(seq.tokens) == seq.frozen:
            self.extend(seq, n, token, FOLDING)

    def draft(self, seq: Sequence_, n: int, _: bool, token: int) -> None:
        n = 1 + n % 7
        if self.drafts and len(seq.tokens) - seq.frozen + n <= STEP:
            self.extend(seq, n, token, BUFFERED)

    def extend(self, seq: Sequence_, n: int, token: int, geometry: Any) -> None:
        if len(seq.tokens) + n > MOST:
            return
        tokens = [(token + 7 * k) % 80 for k in range(n)]
        out = self.do(lambda: seq.inst.submit(seq.pipe, greedy(tokens, seq.ws, geometry=geometry))[0])
        seq.tokens += tokens
        if geometry is FOLDING:
            seq.frozen = len(seq.tokens)
        self.pending.append((out, reference(seq.tokens), seq))

    def commit(self, seq: Sequence_, n: int, _: bool, __: int) -> None:
        n = n % (len(seq.tokens) - seq.frozen + 1)
        self.do(lambda: seq.inst.commit(seq.ws, n))
        seq.frozen += n

    def discard(self, seq: Sequence_, n: int, yes: bool, _: int) -> None:
        n = len(seq.tokens) - seq.frozen if yes else n % (len(seq.tokens) - seq.frozen + 1)
        self.do(lambda: seq.inst.discard(seq.ws, n))
        del seq.tokens[len(seq.tokens) - n :]

    def fork(self, seq: Sequence_, n: int, yes: bool, _: int) -> None:
        if len(self.live) >= SETS:
            return
        child = self.do(lambda: seq.inst.fork(seq.ws, seq.pipe if n % 2 else None, buffer=yes))
        made = Sequence_(
            seq.pipe if n % 3 else self.do(seq.inst.pipeline), child, list(seq.tokens if yes else seq.tokens[: seq.frozen]), seq.frozen
        )
        seq.points.add(len(made.tokens))
        self.live.append(made)

    def truncate(self, seq: Sequence_, n: int, _: bool, __: int) -> None:
        points = sorted(p for p in seq.points | {seq.frozen} if p <= len(seq.tokens))
        at = points[n % len(points)]
        self.do(lambda: seq.inst.truncate(seq.ws, at))
        del seq.tokens[at:]
        seq.frozen = min(seq.frozen, at)
        seq.points = {p for p in seq.points if p <= at}

    def drop(self, seq: Sequence_, _: int, __: bool, ___: int) -> None:
        if len(self.live) > 2:
            self.live.remove(seq)
            self.do(lambda: seq.inst.drop(seq.ws))

    def close(self, seq: Sequence_, n: int, _: bool, __: int) -> None:
        if n % 3 == 0:
            self.end(seq.inst)

    def end(self, inst: Instance) -> None:
        self.do(inst.close)
        self.open.remove(inst)
        self.live = [seq for seq in self.live if seq.inst is not inst]
        self.open.append(self.opened())

    def run(self, _: Sequence_, n: int, yes: bool, __: int) -> None:
        self.loop.run_until_complete(settle(1 + (n if yes else 60)))
        self.judge()

    def fault(self, _: Sequence_, __: int, ___: bool, ____: int) -> None:
        if self.faults:
            at = len(self.runner.batches) + 1
            self.runner.fail_results = lambda batch: DeviceError("injected") if len(self.runner.batches) == at else None

    def judge(self) -> None:
        """Every settled output is right, or failed for a reason that this variant has."""
        left = []
        for out, expected, seq in self.pending:
            if not out.done():
                left.append((out, expected, seq))
                continue
            error = out.exception()
            if error is None:
                assert out.result() == expected
                self.seen["right"] += 1
            else:
                assert isinstance(error, EngineError)
                assert isinstance(error, InstanceClosed) or (self.faults and isinstance(error, (PassFailed, OutOfSlots, OutOfPages))), error
                self.seen[type(error).__name__] += 1
                if seq in self.live:  # what was forked from it has failed too
                    self.end(seq.inst)
        self.pending = left

    @invariant()
    def nobody_is_forgotten(self) -> None:
        self.do(self.engine.check_asleep)

    @invariant()
    def slots_are_exact(self) -> None:
        pool, held = self.engine.states, []
        assert pool is not None
        for inst in self.open:
            sets = [*inst.working_sets, *(revival.copy for revival in inst.revivals.values())]
            held += [ws.state for ws in sets if ws.state is not None]
            passes = [work for pipe in inst.pipelines for work in (*pipe.flying, *pipe.queue) if isinstance(work, Pass)]
            held += [part.before for work in passes for part in work.parts if part.before is not None]
        slots = [state.slot for state in held if state.slot is not None]
        assert pool.used == len(set(slots)) and pool.free == pool.total - pool.used
        assert all(pool.refs(slot) == slots.count(slot) for slot in slots)

    @invariant()
    def states_are_right(self) -> None:
        for seq in self.live:
            ws, state = seq.ws, seq.ws.state
            if not ws.born or not ws.order.idle or ws.error is not None or any(not w.ended for w in ws.inherited):
                continue
            assert state is not None and (ws.length, ws.frozen) == (len(seq.tokens), seq.frozen)
            replay = [token for token, _, _ in state.replay]
            if ws.paused:
                assert (state.slot, state.at, replay) == (None, 0, [])
                continue
            assert state.at <= ws.frozen and replay == seq.tokens[state.at :]
            folded = self.runner.states[state.slot] if state.slot is not None else ()
            assert folded == tuple((token, p) for p, token in enumerate(seq.tokens[: state.at]))

    async def finish(self) -> None:
        """Let everything end that will, and lingers run out."""
        outs = [out for out, _, seq in self.pending if not seq.inst.closed]
        if outs:
            await asyncio.wait(outs, timeout=5)
        waiting = {seq.inst for out, _, seq in self.pending if not out.done()}
        if self.faults and waiting:  # for slots of somebody who is silent and may still give them back
            for inst in self.open:
                if inst not in waiting:
                    inst.close()
            await asyncio.wait([out for out, _, _ in self.pending], timeout=5)

    def teardown(self) -> None:
        pausing.PATIENCE = self.patience
        self.runner.fail_results = lambda batch: None
        self.loop.run_until_complete(self.finish())
        self.judge()
        assert not self.pending, "a pass never ended"
        self.seen["replayed"] += self.runner.replayed
        self.seen["paused"] += self.engine.metrics.paused
        for inst in list(self.open):
            self.do(inst.close)
        self.loop.run_until_complete(self.engine.stop())
        assert self.engine.pool.used == 0
        assert self.engine.states is not None and self.engine.states.used == 0
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class ScarceMachine(RecurrentMachine):
    """Few slots, few pages, and a device that fails now and then."""

    slots, pages = 6, 30
    faults = True


class TightMachine(RecurrentMachine):
    """Slots that only pausing makes enough, without buffers, which cannot be paused: nothing may fail."""

    slots = 5
    drafts = False


_SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
TestRecurrent = RecurrentMachine.TestCase
TestRecurrent.settings = _SETTINGS
TestScarce = ScarceMachine.TestCase
TestScarce.settings = _SETTINGS
TestTight = TightMachine.TestCase
TestTight.settings = _SETTINGS
