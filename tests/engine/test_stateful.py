"""Any order of fork, submit, edit, close, evict and fault: right answers and page contents against plain token lists, exact counts,
and not a page lost. Prompts repeat, so that pages are shared between sets, instances and pipelines; a set is used through several
pipelines without a wait; two tenants never meet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pie_core.device.protocol import PAGE_TOKENS, DeviceError
from pie_core.engine import pausing
from pie_core.engine.errors import ContextLengthExceeded, EngineError, InstanceClosed
from pie_core.engine.forward import BUFFERED, FOLDING, PassSpec
from pie_core.engine.instance import Instance
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.working_set import WorkingSet
from tests.engine.fake_runner import FakeRunner, limits, reference
from tests.engine.support import greedy, settle
from tests.engine.virtual_time import VirtualLoop
from tests.engine.watched import Watched

MOST = 120  # tokens of a sequence: what always fits
TOO_LONG = limits().context + 1
VERBS = ["submit"] * 4 + ["stem"] * 4 + ["run"] * 4 + ["fork"] * 2 + ["commit", "discard", "truncate", "set"] * 2
VERBS += ["instance", "drop", "evict", "fault", "close", "overflow"]
STEMS = [[(k * p + 3) % 40 for p in range(60)] for k in (0, 3, 7)]  # what prompts begin with


class Sequence_:
    """The naive model of a working set."""

    def __init__(self, inst: Instance, ws: WorkingSet, tokens: list[int], frozen: int) -> None:
        self.inst, self.ws, self.tokens, self.frozen = inst, ws, tokens, frozen
        self.points = {frozen, len(tokens)}
        self.dead = False  # dropped, closed, or a pass on it failed
        self.broken = False  # a pass on it was too long: every use fails, until a truncate


class EngineMachine(RuleBasedStateMachine):
    """`pages` and `faults` are set by the variants below."""

    pages = 256
    faults = False
    submits = 0  # of all examples

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.runner = FakeRunner(limits(max_tokens=8, pages=self.pages, max_reads=6))
        self.engine = Watched(self.runner, deterministic=True)  # the same steps whenever it is replayed
        self.patience, pausing.PATIENCE = pausing.PATIENCE, 0.0
        self.open: list[Instance] = []
        self.known: list[Sequence_] = []
        self.pipes: dict[Instance, list[Pipeline]] = {}
        self.pending: list[tuple[Any, int | None, Sequence_]] = []  # None: it fails, like a pass that was too long
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
        if seq.broken:  # and for good
            self.pending.append((self.do(lambda: seq.inst.submit(self.pipes[seq.inst][0], greedy([1], child))[0]), None, made))
            made.dead = True
            self.do(lambda: seq.inst.drop(child))
            return made
        seq.points |= {seq.frozen, len(made.tokens)}
        self.known.append(made)
        return made

    @initialize()
    def first(self) -> None:
        self.open_instance("a")
        self.new_sequence(0)

    # One rule that draws what to do: rules of their own are switched off by turns, and drawn pairs of set and pipeline seldom fit.
    @rule(
        verb=st.sampled_from(VERBS), i=st.integers(0, 11), n=st.integers(0, 50), tenant=st.sampled_from("aab"), stem=st.sampled_from(STEMS),
        tokens=st.lists(st.integers(0, 20), min_size=1, max_size=20), flag=st.booleans(),
    )  # fmt: skip
    def act(self, verb: str, i: int, n: int, tenant: str, stem: list[int], tokens: list[int], flag: bool) -> None:  # noqa: PLR0917
        live = [s for s in self.known if not s.dead and not s.inst.closed]
        seq = live[i % len(live)] if live else None
        match verb:
            case "instance":
                self.open_instance(tenant)
            case "set":
                self.new_sequence(i)
            case "close" if self.open and n % 3 == 0:
                self.close(self.open[i % len(self.open)])
            case "evict":
                self.do(self.engine.cache.clear)
            case "fault" if self.faults:
                at = len(self.runner.batches) + 1
                self.runner.fail_results = lambda batch: DeviceError("injected") if len(self.runner.batches) == at else None
            case "run":
                self.loop.run_until_complete(settle(1 + n % 12))
                self.judge()
            case "submit" if seq and len(seq.tokens) + len(tokens) <= MOST:
                self.submit_to(seq, self.pipe(seq, n), tokens, flag, silent=n % 7 == 0)
            case "stem" if seq:
                at = len(seq.tokens) if seq.tokens == stem[: len(seq.tokens)] else 0
                if n > max(at, 13) and len(seq.tokens) + n - at <= MOST:
                    self.submit_to(seq, self.pipe(seq, n), stem[at:n], False, reuse=n % 10 > 0)
            case "overflow" if seq:
                self.submit_to(seq, self.pipe(seq, n), [1] * TOO_LONG, flag)
            case "fork" if seq and len(live) < 24:
                self.fork(seq, flag, n % 2 == 0, n)
            case "commit" | "discard" if seq:
                self.edit(seq, n % 9, verb)
            case "truncate" if seq:
                self.truncate(seq, n)
            case "drop" if seq and n % 2 == 0:
                seq.dead = True
                self.do(lambda: seq.inst.drop(seq.ws))

    def open_instance(self, tenant: str) -> None:
        if len(self.open) < 4:
            inst = self.do(lambda: self.engine.open_instance("x", tenant))
            self.open.append(inst)
            self.pipes[inst] = [self.do(inst.pipeline) for _ in range(2)]

    def new_sequence(self, i: int) -> None:
        if self.open:
            inst = self.open[i % len(self.open)]
            self.known.append(Sequence_(inst, self.do(inst.working_set), [], 0))

    def pipe(self, seq: Sequence_, n: int) -> Pipeline:
        return self.pipes[seq.inst][n % 3 == 0]

    def submit_to(
        self, seq: Sequence_, pipe: Pipeline, tokens: list[int], buffered: bool, *, reuse: bool = True, silent: bool = False
    ) -> None:
        if not buffered and len(seq.tokens) > seq.frozen:
            return
        self.submits += 1
        geometry = BUFFERED if buffered else FOLDING
        work = PassSpec(tokens, [seq.ws], geometry) if silent else greedy(tokens, seq.ws, geometry=geometry, reuse=reuse)
        out = self.do(lambda: seq.inst.submit(pipe, work)[0])
        seq.broken = seq.broken or len(tokens) == TOO_LONG
        if seq.broken:
            self.pending.append((out, None, seq))
            return
        seq.tokens += tokens
        if not buffered:
            seq.frozen = len(seq.tokens)
        self.pending.append((out, True if silent else reference(seq.tokens), seq))

    def fork(self, seq: Sequence_, buffer: bool, ordered: bool, pick: int) -> None:
        pipe = self.pipe(seq, pick)
        child = self.do(lambda: seq.inst.fork(seq.ws, pipe if ordered else None, buffer=buffer))
        self.fork_of(seq, child, buffer)

    def edit(self, seq: Sequence_, n: int, verb: str) -> None:
        n = min(n, len(seq.tokens) - seq.frozen)
        self.do(lambda: getattr(seq.inst, verb)(seq.ws, n))
        if seq.broken:
            return
        if verb == "commit":
            seq.frozen += n
        else:
            del seq.tokens[len(seq.tokens) - n :]

    def truncate(self, seq: Sequence_, pick: int) -> None:
        points = sorted(p for p in seq.points if p <= len(seq.tokens))
        if not points:  # a discard may have cut them all
            return
        n = points[pick % len(points)]
        self.do(lambda: seq.inst.truncate(seq.ws, n))
        seq.broken = False
        del seq.tokens[n:]
        seq.frozen = min(seq.frozen, n)
        seq.points = {p for p in seq.points if p <= n}

    def close(self, inst: Instance) -> None:
        self.do(inst.close)
        self.open.remove(inst)
        for seq in self.known:
            seq.dead = seq.dead or seq.inst is inst

    def judge(self) -> None:
        """Every settled output is right, or failed for a reason that this variant has."""
        left = []
        for out, expected, seq in self.pending:
            if not out.done():
                left.append((out, expected, seq))
            elif out.exception() is None:
                assert out.result() == expected
            elif expected is None and isinstance(out.exception(), ContextLengthExceeded):
                continue
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
    def nobody_is_forgotten(self) -> None:
        self.do(self.engine.check_asleep)

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
        for _ in range(1000):  # by the loop's own clock
            self.loop.run_until_complete(asyncio.sleep(0.001))
            self.judge()
            if not self.pending:
                break
        assert not self.pending, "everything that was submitted ends"
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
