"""Any order of fork, submit, edit, close, evict and fault: right answers and page contents against plain token lists, exact counts,
and not a page lost. Prompts repeat, so that pages are shared between sets, instances and pipelines; two tenants never meet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from pie_core.device.protocol import PAGE_TOKENS, DeviceError
from pie_core.engine import pausing
from pie_core.engine.errors import EngineError, InstanceClosed
from pie_core.engine.forward import BUFFERED, FOLDING
from pie_core.engine.instance import Instance
from pie_core.engine.loop import Engine
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.working_set import WorkingSet
from tests.engine.fake_runner import FakeRunner, limits, reference
from tests.engine.support import greedy, settle

MOST = 120  # tokens of a sequence: what always fits
STEMS = [[(k * p + 3) % 40 for p in range(60)] for k in (0, 3, 7)]  # what prompts begin with


class Sequence_:
    """The naive model of a working set."""

    def __init__(self, inst: Instance, ws: WorkingSet, tokens: list[int], frozen: int) -> None:
        self.inst, self.ws, self.tokens, self.frozen = inst, ws, tokens, frozen
        self.points = {len(tokens)}
        self.dead = False  # dropped, closed, or a pass on it failed


class EngineMachine(RuleBasedStateMachine):
    """`pages` and `faults` are set by the variants below."""

    pages = 256
    faults = False
    instances, sequences, pipes = Bundle("instances"), Bundle("sequences"), Bundle("pipes")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.runner = FakeRunner(limits(max_tokens=8, pages=self.pages, max_reads=6))
        self.engine = Engine(self.runner, deterministic=True)  # the same steps whenever it is replayed
        self.patience, pausing.PATIENCE = pausing.PATIENCE, 0.0
        self.open: list[Instance] = []
        self.known: list[Sequence_] = []
        self.pending: list[tuple[Any, int, Sequence_]] = []
        self.named: dict[bytes, list[Any]] = {}  # what each name stood for when it was first seen
        self.do(self.engine.start)

    def content(self, pages: list[int], tokens: int) -> list[Any]:
        return [self.runner.kv.get(pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS) for p in range(tokens)]

    def do(self, fn: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return fn()

        if self.loop.is_running():
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

    @rule(target=instances, tenant=st.sampled_from("aab"))
    def open_instance(self, tenant: str = "a") -> Any:
        if len(self.open) >= 4:
            return multiple()
        inst = self.do(lambda: self.engine.open_instance("x", tenant))
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
        if len(seq.tokens) + len(tokens) <= MOST:
            self.submit_to(seq, pipe, tokens, buffered)

    def submit_to(self, seq: Sequence_, pipe: Pipeline, tokens: list[int], buffered: bool, *, reuse: bool = True) -> None:
        if seq.dead or pipe.instance is not seq.inst or (not buffered and len(seq.tokens) > seq.frozen):
            return
        # a pass of another pipeline may overtake: the model keeps to one pipeline a set at a time
        if seq.ws.pipe is not None and seq.ws.pipe is not pipe and not self.loop.run_until_complete(self.quiet(seq)):
            return
        out = self.do(lambda: seq.inst.submit(pipe, greedy(tokens, seq.ws, geometry=BUFFERED if buffered else FOLDING, reuse=reuse))[0])
        seq.tokens += tokens
        if not buffered:
            seq.frozen = len(seq.tokens)
        self.pending.append((out, reference(seq.tokens), seq))

    async def quiet(self, seq: Sequence_) -> bool:
        """Whether nothing of the set is left to happen, after a while."""
        for _ in range(400):
            if seq.ws.born and seq.ws.order.idle:
                break
            await asyncio.sleep(0)
        self.judge()
        return seq.ws.order.idle and not seq.dead

    @rule(seq=sequences, pipe=pipes, stem=st.sampled_from(STEMS), n=st.integers(14, 50), reuse=st.integers(0, 9))
    def submit_stem(self, seq: Sequence_, pipe: Pipeline, stem: list[int], n: int, reuse: int) -> None:
        """A long prompt that others have too, or the next part of it."""
        at = len(seq.tokens) if seq.tokens == stem[: len(seq.tokens)] else 0
        if n > at and len(seq.tokens) + n - at <= MOST:
            self.submit_to(seq, pipe, stem[at:n], False, reuse=reuse > 0)

    @rule()
    def evict(self) -> None:
        self.do(self.engine.cache.clear)

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
            for revival in inst.revivals.values():
                for page in revival.copy.pages:
                    held[page] = held.get(page, 0) + 1
        pool = self.engine.pool
        assert pool.used == len(held)
        assert all(pool.refs(page) == n for page, n in held.items())
        for inst in self.engine.instances:
            sets = [*inst.working_sets, *(r.copy for r in inst.revivals.values())]
            mine = [page for ws in sets for page in ws.pages]
            assert inst.held == {page: mine.count(page) for page in mine}
        assert pool.shared == sum(1 for n in held.values() if n > 1)

    @invariant()
    def contents_are_right(self) -> None:
        for seq in self.known:
            ws = seq.ws
            if not seq.dead and ws.born and ws.order.idle and not ws.dropped and ws.error is None:
                assert (ws.length, ws.frozen) == (len(seq.tokens), seq.frozen)
                if not ws.paused and not any(not w.ended for w in ws.inherited):
                    assert self.content(ws.pages, ws.length) == [(token, p) for p, token in enumerate(seq.tokens)]

    @invariant()
    def named_pages_hold_what_their_names_say(self) -> None:
        cache, pool = self.engine.cache, self.engine.pool
        for name, page in cache._pages.items():
            content = self.content([page], PAGE_TOKENS)
            assert self.named.setdefault(name, content) == content
            assert pool.named(page) and cache._names[page] == name
        assert sum(pool.named(page) for page in range(pool.total)) == len(cache._pages)
        assert all(not work.ended for work in cache._claims.values())

    def teardown(self) -> None:
        pausing.PATIENCE = self.patience
        self.runner.fail_results = lambda batch: None
        self.loop.run_until_complete(settle(300))
        self.judge()
        for inst in list(self.open):
            self.do(inst.close)
        self.judge()
        self.loop.run_until_complete(self.engine.stop())
        assert self.engine.pool.used == 0 and self.engine.pool.unlent == self.pages
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


class ScarceMachine(EngineMachine):
    """Few pages and a device that fails now and then."""

    pages = 10
    faults = True


class TightMachine(EngineMachine):
    """Few pages: sets are paused and come back all the time; nothing may fail."""

    pages = 14


_SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
TestEngine = EngineMachine.TestCase
TestEngine.settings = _SETTINGS
TestTight = TightMachine.TestCase
TestTight.settings = _SETTINGS
TestScarce = ScarceMachine.TestCase
TestScarce.settings = _SETTINGS
