"""Any order of fork, submit, edit, close and fault: right answers against plain token lists, and not a page lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from pie_core.device.protocol import DeviceError
from pie_core.engine.errors import EngineError, InstanceClosed
from pie_core.engine.forward import BUFFERED, FOLDING
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.working_set import WorkingSet
from tests.engine.fake_runner import FakeRunner, limits, reference
from tests.engine.support import greedy, settle


class Sequence_:
    """The naive model of a working set."""

    def __init__(self, inst: Instance, ws: WorkingSet, tokens: list[int], frozen: int) -> None:
        self.inst, self.ws, self.tokens, self.frozen = inst, ws, tokens, frozen
        self.points = {len(tokens)}
        self.dead = False  # dropped, closed, or a pass on it failed


class EngineMachine(RuleBasedStateMachine):
    """`pages` and `faults` are set by the two variants below."""

    pages = 256
    faults = False
    instances, sequences, pipes = Bundle("instances"), Bundle("sequences"), Bundle("pipes")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.runner = FakeRunner(limits(max_tokens=8, pages=self.pages, max_reads=6))
        self.engine = Engine(self.runner)
        self.open: list[Instance] = []
        self.known: list[Sequence_] = []
        self.pending: list[tuple[Any, int, Sequence_]] = []
        self.do(self.engine.start)

    def do(self, fn: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return fn()

        return self.loop.run_until_complete(call())

    def fork_of(self, seq: Sequence_, child: WorkingSet, buffer: bool) -> Sequence_:
        made = Sequence_(seq.inst, child, list(seq.tokens) if buffer else seq.tokens[: seq.frozen], seq.frozen)
        seq.points.add(len(made.tokens))
        self.known.append(made)
        return made

    @initialize(target=instances)
    def first(self) -> Instance:
        return self.open_instance()

    @rule(target=instances)
    def open_instance(self) -> Any:
        if len(self.open) >= 4:
            return multiple()
        inst = self.do(lambda: self.engine.open_instance("x"))
        self.open.append(inst)
        return inst

    @rule(target=sequences, inst=instances)
    def new_sequence(self, inst: Instance) -> Any:
        if inst.closed:
            return multiple()
        seq = Sequence_(inst, self.do(inst.working_set), [], 0)
        self.known.append(seq)
        return seq

    @rule(target=pipes, inst=instances)
    def new_pipe(self, inst: Instance) -> Any:
        return multiple() if inst.closed else self.do(inst.pipeline)

    @rule(seq=sequences, pipe=pipes, tokens=st.lists(st.integers(0, 20), min_size=1, max_size=20), buffered=st.booleans())
    def submit(self, seq: Sequence_, pipe: Pipeline, tokens: list[int], buffered: bool) -> None:
        if seq.dead or pipe.instance is not seq.inst or (not buffered and len(seq.tokens) > seq.frozen):
            return
        out = self.do(lambda: seq.inst.submit(pipe, greedy(tokens, seq.ws, geometry=BUFFERED if buffered else FOLDING))[0])
        # a pass of another pipeline may overtake: the model keeps to one pipeline a set at a time
        if seq.ws.shared:
            self.loop.run_until_complete(self.quiet(out))
        seq.tokens += tokens
        if not buffered:
            seq.frozen = len(seq.tokens)
        self.pending.append((out, reference(seq.tokens), seq))
        seq.ws.shared = False
        if seq.ws.pipe is not pipe:
            seq.ws.pipe = pipe

    async def quiet(self, out: Any) -> None:
        for _ in range(400):
            if out.done():
                return
            await asyncio.sleep(0)

    @rule(target=sequences, seq=sequences, buffer=st.booleans(), pipe=pipes, ordered=st.booleans())
    def fork(self, seq: Sequence_, buffer: bool, pipe: Pipeline, ordered: bool) -> Any:
        if seq.dead or (ordered and (pipe.instance is not seq.inst or (seq.ws.pipe is not None and seq.ws.pipe is not pipe))):
            return multiple()
        child = self.do(lambda: seq.inst.fork(seq.ws, pipe if ordered else None, buffer=buffer))
        return self.fork_of(seq, child, buffer)

    @rule(seq=sequences, n=st.integers(0, 8), verb=st.sampled_from(["commit", "discard"]))
    def edit(self, seq: Sequence_, n: int, verb: str) -> None:
        n = min(n, len(seq.tokens) - seq.frozen)
        if seq.dead:
            return
        self.do(lambda: getattr(seq.inst, verb)(seq.ws, n))
        if verb == "commit":
            seq.frozen += n
        else:
            del seq.tokens[len(seq.tokens) - n :]

    @rule(seq=sequences, pick=st.integers(0, 5))
    def truncate(self, seq: Sequence_, pick: int) -> None:
        points = sorted(p for p in seq.points if p <= len(seq.tokens))
        if seq.dead or not points:
            return
        n = points[pick % len(points)]
        self.do(lambda: seq.inst.truncate(seq.ws, n))
        del seq.tokens[n:]
        seq.frozen = min(seq.frozen, n)
        seq.points = {p for p in seq.points if p <= n}

    @rule(seq=consumes(sequences))
    def drop(self, seq: Sequence_) -> None:
        if not seq.dead:
            seq.dead = True
            self.do(lambda: seq.inst.drop(seq.ws))

    @rule(inst=consumes(instances))
    def close(self, inst: Instance) -> None:
        if inst.closed:
            return
        self.do(inst.close)
        self.open.remove(inst)
        for seq in self.known:
            seq.dead = seq.dead or seq.inst is inst

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
        """Every settled output is right, or failed for a reason that this variant has."""
        left = []
        for out, expected, seq in self.pending:
            if not out.done():
                left.append((out, expected, seq))
            elif out.exception() is None:
                assert out.result() == expected
            else:
                error = out.exception()
                assert isinstance(error, EngineError)
                assert isinstance(error, InstanceClosed) or self.faults, error
                self.lose(seq)
        self.pending = left

    def lose(self, seq: Sequence_) -> None:
        """A pass failed: what the set holds is no longer what the model says, nor what was forked from it."""
        for other in self.known:
            if other.inst is seq.inst and not other.dead and not other.inst.closed:
                other.dead = True
                self.do(lambda other=other: other.inst.drop(other.ws))

    @invariant()
    def pages_are_exact(self) -> None:
        held: dict[int, int] = {}
        for inst in self.open:
            for ws in inst.working_sets:
                for page in ws.pages:
                    held[page] = held.get(page, 0) + 1
        pool = self.engine.pool
        assert pool.used == len(held)
        assert all(pool.refs(page) == n for page, n in held.items())
        assert sum(inst.pages for inst in self.engine.instances) == len(held)

    def teardown(self) -> None:
        self.runner.fail_results = lambda batch: None
        self.loop.run_until_complete(settle(300))
        self.judge()
        for inst in list(self.open):
            self.do(inst.close)
        self.judge()
        self.loop.run_until_complete(self.engine.stop())
        assert self.engine.pool.used == 0
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class ScarceMachine(EngineMachine):
    """Few pages and a device that fails now and then."""

    pages = 10
    faults = True


_SETTINGS = settings(max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
TestEngine = EngineMachine.TestCase
TestEngine.settings = _SETTINGS
TestScarce = ScarceMachine.TestCase
TestScarce.settings = _SETTINGS
