"""Any order of loops that feed themselves, stops, closes, faults and host-fed passes beside them: every outcome is what a plain list of
tokens says, what a stopped loop left behind included, and not a page or word is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from pie_core.device.protocol import DeviceError
from pie_core.engine.errors import EngineError, InstanceClosed, PassFailed, PassSkipped
from pie_core.engine.instance import Instance
from pie_core.engine.pipeline import Pipeline
from tests.engine.fake_runner import FakeRunner, generate, limits, reference
from tests.engine.support import greedy, settle
from tests.engine.test_runahead import Loop
from tests.engine.virtual_time import VirtualLoop
from tests.engine.watched import Watched

MOST = 40  # passes of a loop


class Known:
    """A loop and the model of it: the tokens it gives, the pass that says stop, and what it was asked for."""

    def __init__(self, inst: Instance, first: int, stop_at: int, capacity: int) -> None:
        self.tokens = generate([first], MOST)
        target = self.tokens[stop_at]
        self.end = self.tokens.index(target) + 1  # passes that run
        self.loop = Loop(inst, first, target, capacity=capacity)
        self.inst, self.first = inst, first
        self.futures: list[asyncio.Future[Any]] = []
        self.resumed: Pipeline | None = None

    def want(self, k: int) -> Any:
        return self.tokens[k] if k < self.end else PassSkipped


class RunAheadMachine(RuleBasedStateMachine):
    """`faults` is set by the variant below."""

    faults = False
    instances, loops = Bundle("instances"), Bundle("loops")

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.runner = FakeRunner(limits(max_tokens=8, max_reads=6))
        self.engine = Watched(self.runner, deterministic=True, ahead=5)
        self.open: list[Instance] = []
        self.known: list[Known] = []
        self.hosts: list[tuple[asyncio.Future[Any], int, Instance]] = []
        self.broken = False
        self.do(self.engine.start)

    def do(self, fn: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return fn()

        return self.loop.run_until_complete(call())

    @initialize(target=instances)
    def first(self) -> Instance:
        return self.open_instance()

    @rule(target=instances)
    def open_instance(self) -> Any:
        if len(self.open) >= 3:
            return multiple()
        inst = self.do(lambda: self.engine.open_instance("x"))
        self.open.append(inst)
        return inst

    @rule(target=loops, inst=instances, first=st.integers(0, 88), stop_at=st.integers(0, 9), capacity=st.integers(1, 3))
    def new_loop(self, inst: Instance, first: int, stop_at: int, capacity: int) -> Any:
        if inst.closed:
            return multiple()
        known = self.do(lambda: Known(inst, first, stop_at, capacity))
        self.known.append(known)
        return known

    @rule(known=loops, n=st.integers(1, 9))
    def submit(self, known: Known, n: int) -> None:
        if not known.inst.closed and not known.loop.pipe.closed and len(known.futures) + n <= MOST:
            self.do(lambda: known.futures.extend(known.loop.submit(n)))

    @rule(inst=instances, token=st.integers(0, 20), n=st.integers(1, 20))
    def host_fed(self, inst: Instance, token: int, n: int) -> None:
        """A pass beside the loops: one token, or a prompt of several steps."""
        if not inst.closed:
            ids = [token] * n
            out = self.do(lambda: inst.submit(inst.pipeline(), greedy(ids, inst.working_set()))[0])
            self.hosts.append((out, reference(ids), inst))

    @rule(turns=st.integers(1, 12))
    def go(self, turns: int) -> None:
        self.loop.run_until_complete(settle(turns))

    @rule()
    def hold(self) -> None:
        self.runner.hold = True

    @rule()
    def release(self) -> None:
        self.runner.hold = False
        self.do(self.runner.release)

    @rule(known=loops)
    def close_pipe(self, known: Known) -> None:
        if not known.inst.closed:
            self.do(lambda: known.inst.close_pipeline(known.loop.pipe))

    @rule(known=loops, behind=st.integers(1, 6))
    def go_on_elsewhere(self, known: Known, behind: int) -> None:
        """Behind its stop, with passes in flight behind that, a loop goes on in another pipeline from the token that it fed last."""
        if known.inst.closed or self.faults or known.resumed is not None or known.loop.pipe.closed:
            return
        self.hold()
        missing = max(0, known.end + behind - len(known.futures))
        self.do(lambda: known.futures.extend(known.loop.submit(missing)))
        self.go(20)
        self.release()
        self.loop.run_until_complete(asyncio.wait(known.futures))
        known.resumed = self.do(known.inst.pipeline)
        assert known.loop.ws.length == known.end

        def resume() -> Any:
            known.loop.stop = None
            return known.loop.submit(2, known.resumed)

        out = self.do(resume)
        got = self.loop.run_until_complete(asyncio.gather(*out))
        assert got == known.tokens[known.end : known.end + 2]

    @rule(inst=instances)
    def close(self, inst: Instance) -> None:
        self.do(inst.close)

    @rule()
    def fail_the_next_step(self) -> None:
        if not self.faults:
            return
        self.broken = True
        fired: list[int] = []

        def fail(_: Any) -> Exception | None:
            if fired:
                return None
            fired.append(1)
            return DeviceError("it broke")

        self.runner.fail_results = fail

    @invariant()
    def nobody_is_forgotten(self) -> None:
        self.do(self.engine.check_asleep)

    @invariant()
    def settled_ones_are_right(self) -> None:
        for known in self.known:
            for k, future in enumerate(known.futures):
                if future.done():
                    self.judge(future, known.want(k), known.inst)
        for out, want, inst in self.hosts:
            if out.done():
                self.judge(out, want, inst)

    def judge(self, future: asyncio.Future[Any], want: Any, inst: Instance) -> None:
        error = future.exception()
        got = type(error) if error is not None else future.result()
        allowed = [want]
        if inst.closed:
            allowed.append(InstanceClosed)
        if self.broken:
            allowed.append(PassFailed)
        assert got in allowed, f"{got} is none of {allowed}"

    def teardown(self) -> None:
        async def end() -> None:
            self.runner.hold = False
            self.runner.release()
            waiting = [f for known in self.known for f in known.futures] + [out for out, _, _ in self.hosts]
            # what waits for a cell that only a failed or closed loop would have put is told so at the close
            if waiting and not self.broken:
                assert not (await asyncio.wait(waiting, timeout=30))[1], "everything that was submitted ends"
            self.settled_ones_are_right()
            for inst in self.open:
                inst.close()
            await self.engine.stop()
            assert all(f.done() for f in waiting)

        self.loop.run_until_complete(end())
        self.loop.close()
        assert self.engine.pool.used == 0 and self.engine.arena.used == 0
        assert not isinstance(self.engine.lost, EngineError)


class FaultyMachine(RunAheadMachine):
    """A device that fails a step now and then."""

    faults = True


SETTINGS = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)
TestRunAhead = RunAheadMachine.TestCase
TestRunAhead.settings = SETTINGS
TestFaults = FaultyMachine.TestCase
TestFaults.settings = SETTINGS
