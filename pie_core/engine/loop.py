"""Engine: owns pages, arena and instances, and runs the step loop over a Runner."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pie_core.device.protocol import DeviceError, DeviceLost, KernelError, LimitError
from pie_core.engine.arena import Arena
from pie_core.engine.compile_turns import CompileTurns
from pie_core.engine.errors import ArenaFull, EngineError, EngineLost, EngineStopped, PassFailed, PassSkipped
from pie_core.engine.forward import SHORT_PASS, Pass
from pie_core.engine.instance import Instance, InstanceLimits
from pie_core.engine.linger import Linger
from pie_core.engine.metrics import Metrics, StepRecord
from pie_core.engine.pacing import Pace
from pie_core.engine.pages import PagePool
from pie_core.engine.pausing import Pressure
from pie_core.engine.pipeline import Pipeline
from pie_core.engine.predict import LONG_STEP, Guess, Predictor
from pie_core.engine.prefix_cache import PrefixCache
from pie_core.engine.program_info import ProgramInfo, ProgramInfos
from pie_core.engine.recurrent import StatePool
from pie_core.engine.reuse import prewarm
from pie_core.engine.runner import Runner, StepHandle
from pie_core.engine.saved_sets import MemoryStore, SavedSets, SetStore
from pie_core.engine.scheduler import Scheduler, Waiter
from pie_core.engine.settle import publish_pages, says_fault, settle_passes
from pie_core.engine.step import Step
from pie_core.engine.step_faults import fail_step, refuse_epilogues
from pie_core.engine.streams import Streams
from pie_core.eta.program import Program

_logger = logging.getLogger(__name__)

AHEAD = 2  # steps in flight at most: one runs, the next is enqueued
AHEAD_SECONDS = 0.03  # of work enqueued beyond that, where all it needs is on the device: newcomers come behind it


@dataclass(slots=True, eq=False)
class _Flight:
    """A step that was submitted and not read, and what is to be recorded of it."""

    step: Step
    submitted: float
    results: asyncio.Future[bytes | bytearray | memoryview]
    handle: StepHandle
    tokens: int  # rows, guessed ones included
    rows: tuple[int, int]  # decode, prefill
    fed: bool  # whether every pass took its tokens from the device
    waited: float
    pages: tuple[int, int, int, int]  # used, shared, cached, free


class Engine:
    """Everything runs on one asyncio loop; nothing here may be called from another thread.

    `start()` begins the step loop on the running loop, `await stop()` ends it and fails what is left. In between,
    `open_instance` gives out Instances. `predict`: run the expected next pass of a decode loop before it is submitted (see
    predict.py); by default where the host has a core to spare while the device computes, and behind steps that are long beside the work
    of an inferlet. Results are the same either way.
    `deterministic`: steps are cut by fixed sizes instead of by measured time. With a runner that is deterministic too, the same
    passes with the same seeds give the same bits alone and in any batch. `sets`: where saved working sets are kept; by default in
    memory, for as long as the process lives. `ahead`: steps in flight of loops that feed themselves (2 to `limits.ahead`); by default as
    many as take a moment.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        predict: bool | None = None,
        deterministic: bool = False,
        sets: SetStore | None = None,
        ahead: int | None = None,
    ) -> None:
        self.runner = runner
        self.limits = runner.limits
        self.pool = PagePool(self.limits.pages)
        self.cache = PrefixCache(self.pool)
        self.states = StatePool(self.limits.state_slots) if self.limits.state_slots else None
        self.arena = Arena(self.limits.arena_words, self.limits.arena_start, self._grow_arena)
        self.metrics = Metrics()
        self.instances: dict[Instance, None] = {}
        self.deterministic = deterministic or self.limits.deterministic
        self._ahead = max(AHEAD, self.limits.ahead if ahead is None else ahead)
        self._ahead_s = AHEAD_SECONDS if ahead is None and not self.deterministic else float("inf")
        self._step_s = 0.0  # that the last step took
        self.pace = Pace(self.limits.max_tokens, self.limits.mixed_prefill, enabled=not self.deterministic)
        self.streams = Streams()
        self.scheduler = Scheduler(self.limits, self.pool, self.cache, runner.copy_page, self._prefill_rows, states=self.states)
        guess = (self.limits.spare_core if predict is None else predict) and self.states is None
        self._guess_long = predict is None and not guess and self.states is None
        self.predictor = Predictor(self.limits, self.pool, self.metrics, enabled=guess)
        self.pressure = Pressure(self.scheduler, self.pool, self.predictor, self.metrics, self.instances)
        self.saved = SavedSets(self, sets or MemoryStore())
        self.lost: EngineError | None = None
        self._infos = ProgramInfos(self.limits)
        self.turns = CompileTurns(self)
        self._linger = Linger(self.metrics)
        self._flights: deque[_Flight] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Future[None] | None = None  # of the step loop, once it was started
        self._turning = False  # a turn of it is on its way
        self._timer: asyncio.TimerHandle | None = None  # ends the linger
        self._dirty = False  # something happened since the last fill
        self._wait = 0.0  # seconds of linger that the last fill found
        self._stopping = False
        self._opened = 0
        self.accepted = 0
        self._number = 0
        self._landed_at = 0.0  # when the last step was read

    # --- life

    def start(self) -> None:
        """Begin the step loop on the running event loop. Raises RuntimeError when it was started before."""
        if self._over is not None:
            raise RuntimeError("the engine was started before; make a new one")
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        self._look_soon()

    async def stop(self) -> None:
        """End the loop after the steps in flight, and close every instance. Twice is harmless."""
        self._stopping = True
        self.poke()
        if self._over is not None:
            await self._over
        cause = self.lost or EngineStopped("the engine was stopped")
        self._end(cause)
        await self.saved.close(cause)

    def open_instance(self, name: str, tenant: str = "", limits: InstanceLimits | None = None, *, reuse: bool = True) -> Instance:
        """What one request owns. Instances of one `tenant` share pages of equal prefixes, unless `reuse` is off. Raises EngineLost,
        EngineStopped."""
        self.check_alive()
        self._opened += 1
        instance = Instance(self, name, tenant, limits or InstanceLimits(), self._opened, reuse=reuse)
        self.instances[instance] = None
        return instance

    def now(self) -> float:
        """The loop's clock, seconds."""
        return self.event_loop().time()

    def accept(self) -> int:
        """The next number in the order of acceptance."""
        self.accepted += 1
        return self.accepted

    def check_alive(self) -> None:
        """Raises EngineLost or EngineStopped when no pass can run any more."""
        if self.lost is not None:
            raise self.lost.again()
        if self._stopping:
            raise EngineStopped("the engine was stopped")

    def status(self) -> dict[str, int | float]:
        """Counters and what is held now."""
        return {
            **self.metrics.snapshot(),
            "pages_used": self.pool.used,
            "pages_free": self.pool.free,
            "pages_shared": self.pool.shared,
            "pages_cached": self.pool.idle,
            "evicted": self.pool.evicted,
            "arena_words_used": self.arena.used,
            "instances": len(self.instances),
            "in_flight": len(self._flights),
            **({"state_slots_used": self.states.used, "state_slots_free": self.states.free} if self.states is not None else {}),
        }

    def timeline(self, since: int = -1) -> dict[str, object]:
        """The last steps as JSON values: {"columns", "steps", "most", "now"}; those with a number over `since`."""
        return {**self.metrics.export(since), "now": self.now()}

    async def prewarm(self, ids: Sequence[int], tenant: str | None = "") -> int:
        """Compute the full pages of `ids` for later passes of `tenant` that begin with them, or, with None, for those of every tenant; how
        many tokens are there now (none of a model with recurrent state, whose prefixes are not shared). They stay until the pool needs
        the room. Raises InvalidPass, EngineError."""
        instance = self.open_instance("prewarm", tenant or "")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def sink(n: int | None, error: EngineError | None) -> None:
            if done.done():  # cancelled
                return
            if n is not None:
                done.set_result(n)
            elif error is not None:
                done.set_exception(error)

        try:
            prewarm(instance, ids, sink, everyone=tenant is None)
            return await done
        finally:
            instance.close()

    # --- called by instances and pipelines

    def poke(self) -> None:
        """Something changed: the loop looks again, once everything that is ready now has had its turn."""
        self._dirty = True
        if not self._turning:
            self._look_soon()

    def returned(self, pipe: Pipeline) -> None:
        """`pipe` submitted something."""
        self._linger.returned(pipe, self.now())

    def forget_return(self, pipe: Pipeline) -> None:
        """`pipe` will not submit any more."""
        self._linger.forget(pipe)
        self.streams.forget(pipe)
        self.predictor.forget(pipe)
        self.poke()

    def adopt(self, guess: Guess, work: Pass) -> None:
        """A pass was submitted that runs, or has run, as `guess`."""
        self.returned(work.pipe)
        results = self.predictor.adopt(guess, work)
        if results is not None:
            settle_passes([work], results, self.metrics)
            self._answer([work], self.now())
            self.poke()

    def closed_instance(self, instance: Instance) -> None:
        """`instance` has freed everything."""
        self.instances.pop(instance, None)
        self.scheduler.instances.pop(instance, None)
        self.poke()

    def knows(self, program: Program) -> bool:
        """Whether `program_info` answers at once, without compiling."""
        return self._infos.known(program)

    def program_info(self, program: Program) -> ProgramInfo:
        """The program as the engine needs it, its kernel compiled. Raises InvalidPass, PassFailed; a program that cannot run is refused by
        the same error again, at once."""
        info = self._infos.find(program)
        if info is None:
            began = time.perf_counter()
            try:
                info = self._infos.describe(program)
                info.work, info.first_work, info.size = self.runner.prepare(program) or (0, 0, 1)
            except DeviceError as error:
                refusal = PassFailed(f"this device does not take the epilogue: {error}")
                if isinstance(error, KernelError | LimitError):
                    self._infos.refuse(program, refusal)
                raise refusal from error
            finally:
                self.turns.spend(time.perf_counter() - began)
            self._infos.keep(info)
        return info

    def idle(self) -> bool:
        """Whether nothing is on its way: no step, no turn of the loop, and nobody who was just answered and may come back at once."""
        return not self._flights and not self._turning and not self._linger.expected

    def event_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that everything here runs on."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _grow_arena(self, words: int) -> None:
        """Let the device have an arena of so many words. Raises ArenaFull, EngineLost."""
        try:
            self.runner.grow_arena(words)
        except DeviceLost as error:
            raise EngineLost(f"the device was lost: {error}") from error
        except DeviceError as error:
            raise ArenaFull(
                f"the device memory for channels cannot grow from {self.arena.there} to {words} words: {type(error).__name__}: {error}; "
                "use smaller cells or a smaller capacity, let go of channels, or try again when other inferlets have ended",
                words=words,
                total=self.arena.there,
            ) from error

    def skipped(self) -> PassSkipped:
        """The error of a pass submitted to a pipeline that has stopped."""
        return PassSkipped("the pipeline had stopped before this pass was submitted")

    # --- the step loop

    def _look_soon(self) -> None:
        if self._loop is not None and self._over is not None:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Settle what was read and submit what can be, until something has to happen first. Callbacks instead of a task: a task's waits
        would double what a step costs the host's event loop."""
        self._turning = False
        assert self._loop is not None and self._over is not None
        if self._over.done():
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        flights = self._flights
        try:
            while flights or not self._stopping:
                if flights and flights[0].results.done():
                    self._settle(flights.popleft())
                    if flights and self._dirty and not self._stopping and self._deep() and not self._failed(flights[0]):
                        self._fill()  # before more is settled: the device goes on meanwhile
                    elif self._linger.expected and not flights and not self.predictor.enabled:
                        self._look_soon()  # who was answered goes on first, beside what is still to do here
                        return
                    continue
                if not self._stopping and self._dirty and self._fill():
                    continue
                if self._wait > 0:  # asking again then might find the linger over, with nobody to go on
                    self._timer = self._loop.call_later(self._wait, self._rung)
                elif self.idle():
                    self.turns.rested()
                return
        except Exception as error:
            # a fault of the engine itself: nothing may wait for ever on a loop that is gone
            _logger.exception("the step loop failed")
            lost = EngineLost(f"the engine failed: {type(error).__name__}: {error}")
            self._lose(lost)
            for flight in flights:
                flight.results.cancel()
                for work in flight.step.passes:
                    work.abandon(lost)  # those that their pipeline has let go of already
            flights.clear()
        self._over.set_result(None)

    def _failed(self, flight: _Flight) -> bool:
        """Whether a step was read that failed, in whole or in part: what goes on behind its passes would run in vain."""
        results = flight.results
        return results.done() and (results.exception() is not None or says_fault(flight.step, memoryview(results.result())))

    def _rung(self) -> None:
        self._timer = None
        self._dirty = True
        if not self._turning:
            self._turn()

    def _fill(self) -> bool:
        """Submit a step if there is work and this is the moment. False: nothing to do until something happens."""
        self._wait = 0.0
        if len(self._flights) >= AHEAD and not self._deep():
            return False
        guesses = self._guesses()
        if not guesses:
            if not self.scheduler.instances:
                return False
            self._wait = self._linger.wait(self.now())
            if self._wait > 0 or (self._flights and not self._worth_running_ahead()):
                return False
        self._dirty = False
        granted: set[Waiter] = set()
        scheduler = self.scheduler
        while True:
            if guesses and not scheduler.instances and not scheduler.waiting:
                step = Step(self._number, self.limits)  # nothing is queued
            else:
                step = scheduler.fill(self._number)
            if guesses and not self.scheduler.waiting:
                self.predictor.fill(step, guesses)
                guesses = []
            if step.batch.rows:
                self._submit(step)
                if self.scheduler.waiting:
                    self.pressure.relieve(self.now(), granted, halted=False)
                return True
            if self.scheduler.changed:
                continue
            again, self._wait = self.pressure.relieve(self.now(), granted, halted=not self._flights)
            if not again:
                return False

    def _guesses(self) -> list[Guess]:
        """The passes that all pipelines are expected to submit that would be waited for; else none. Only on an idle device (a busy one
        gains nothing), never when pages are short, and not beside a prefill, which takes all the room and can wait a moment."""
        scheduler = self.scheduler
        if not self.predictor.candidates or self._flights or scheduler.waiting or (scheduler.instances and scheduler.prefill_waits()):
            return []
        return self.predictor.guesses(self._linger.expected, self._number, self.now())

    def _worth_running_ahead(self) -> bool:
        """Whether the pipelines of the step in flight have their next passes here already. If some will only come back with
        its results, going ahead without them would split the batch for good; the device is busy anyway."""
        step = self._flights[-1].step
        if not step.decode_tokens and self.streams.away(self.now()):
            return False  # a stream comes back soon, and two steps of prefill in front of it are one too many
        if any(guess.live and not guess.pipe.silent for guess in step.guesses):
            return False
        return all(work.pipe.queue or work.pipe.closed or work.pipe.silent or work.pipe.instance.closed for work in step.passes)

    def _deep(self) -> bool:
        """Whether a third step, or a fourth, may be in flight: what is there waits for nothing on the host, and is over soon."""
        flights = self._flights
        return len(flights) < self._ahead and all(flight.fed for flight in flights) and len(flights) * self._step_s < self._ahead_s

    def _submit(self, step: Step) -> None:
        now = self.now()
        metrics = self.metrics
        self._number += 1
        longest = 0.0
        for work in step.touched:
            if work.accepted_at:
                waited = now - work.accepted_at
                metrics.waited(waited)
                longest = max(longest, waited)
                work.accepted_at = 0.0
        metrics.decode_tokens += step.decode_tokens
        metrics.prefill_tokens += step.n_tokens - step.decode_tokens
        metrics.reused_tokens += step.reused_tokens
        metrics.read_backs += 1
        metrics.read_back_bytes += 4 * max(1, step.batch.results_words)
        for work in step.passes:
            pipe = work.pipe
            if pipe.landed and len(pipe.flying) == 1:
                metrics.host_waits += 1
        try:
            handle = self.runner.submit(step.batch)
        except Exception as error:  # whatever a runner raises fails this step, not the loop
            self._fail(step, error)
            return
        self.turns.stepped()
        for work in step.passes:
            if work.uses:
                work.release_cells()
        if step.batch.refused:
            refuse_epilogues(step, step.batch.refused, self.predictor)
        results = asyncio.ensure_future(handle.results())
        results.add_done_callback(self._landed)
        free = self.pool.free
        pages = (self.pool.total - free, self.pool.shared, self.pool.idle, free)
        prefill = step.n_tokens - step.decode_tokens
        tokens = step.batch.n_tokens
        fed = not step.guesses and all(work.embed is not None for work in step.touched)
        self._flights.append(_Flight(step, now, results, handle, tokens, (tokens - prefill, prefill), fed, longest, pages))
        self._dirty = True  # maybe the next step can go right behind it

    def _prefill_rows(self, decode: int) -> int:
        """Rows of prefill for a step that holds `decode` rows already."""
        return self.pace.prefill_rows(decode, self.streams.count(self.now()))

    def _landed(self, _: asyncio.Future[Any]) -> None:
        self.poke()

    def _settle(self, flight: _Flight) -> None:
        step = flight.step
        metrics = self.metrics
        error = flight.results.exception()
        if error is not None:
            self._record(flight, self.now(), failed=True)
            self._fail(step, error)
            return
        results = memoryview(flight.results.result())
        try:
            publish_pages(step, results)
            settle_passes(step.passes, results, metrics)
        except Exception:
            self._flights.appendleft(flight)  # not over: its passes are told with those of the others
            raise
        self.predictor.landed(step, results)
        now = self.now()
        metrics.steps += 1
        busy = self._record(flight, now, failed=False)
        self.pace.ran(*flight.rows, busy)
        self._linger.stepped(busy)
        self._answer(step.passes, now)

    def _record(self, flight: _Flight, now: float, *, failed: bool) -> float:
        """Put a step that was read into the timeline; the seconds for which it kept the device busy."""
        step, metrics = flight.step, self.metrics
        busy = now - max(flight.submitted, self._landed_at)
        self._landed_at = now
        metrics.busy_s += busy
        self._step_s = busy
        if self._guess_long:
            self.predictor.enabled = busy >= LONG_STEP
        device, epilogue = flight.handle.times() or (None, None)
        decode, prefill = flight.rows
        touched = step.touched
        instances = len({work.instance for work in touched}) if len(touched) > 1 else len(touched)
        metrics.timeline.append(
            StepRecord(
                step.number, flight.submitted, now, busy, device, epilogue, flight.tokens, decode, prefill, step.reused_tokens,
                len(step.passes), len(step.guesses), instances, len(step.batch.epilogues), flight.waited, *flight.pages,
                len(self.scheduler.waiting), failed,
            )
        )  # fmt: skip
        return busy

    def _answer(self, passes: list[Pass], now: float) -> None:
        for work in passes:
            pipe = work.pipe
            for part in work.parts:
                part.ws.used_at = now
            if not pipe.closed and work.size <= SHORT_PASS:
                self.streams.answered(pipe, now)
            if not pipe.queue and not pipe.flying and not pipe.stopped:
                self._linger.answered(pipe, now)
                self.predictor.answered(work)
        self._dirty = True

    def _fail(self, step: Step, error: BaseException) -> None:
        """A step did not run, or was not read: its passes end; with a lost device, everything does."""
        self.metrics.failed_steps += 1
        if isinstance(error, DeviceLost):
            self._lose(EngineLost(f"the device was lost: {error}"))
            return
        cause = fail_step(step, error, self.metrics)
        self.predictor.failed(step, cause)
        self._answer(step.passes, self.now())

    def _lose(self, cause: EngineLost) -> None:
        self.lost = cause
        self._end(cause)

    def _end(self, cause: EngineError) -> None:
        for instance in list(self.instances):
            instance.close(cause)
