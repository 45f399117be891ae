"""Expected passes: branch prediction for decode loops.

A loop that feeds each pass the token which the last one returned leaves the device idle between a read-back and its next submit. When a
pipeline has done so a few times, its next pass is submitted at once as a `Guess`, with the token just read. A real pass that equals the
guess in everything that was read or written adopts it; anything else drops it.

A guess changes no state: working sets, channels, counters and budgets stay as they are until it is adopted, so nothing has to be undone.
What it writes on the device lies where nothing looks, and is overwritten before anything does, because the device is an ordered queue:
- KV of one token behind the length, in a partial page that only this set holds or in a page lent by the pool. A token behind the length
  is visible to nobody until some pass writes that slot, in a later step. A set that is forked, cut or dropped meanwhile shares, copies or
  frees the page in operations enqueued after the guess; whoever gets the page next writes each slot before it reads it. The pool takes a
  lent page back whenever it runs short, so that lending is never seen in its counts.
- Cells at the tails of rings: the slot is free (there is room, or the spare one of a ring whose front is taken), fronts are only read.
  The next real put, or the next owner of the arena words, writes the slot in a later step.
No real pass of the same step can touch these: nobody has anything outstanding on the set, and the channels have one pipeline, this one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.linger import LONGEST

if TYPE_CHECKING:
    from pie_core.engine.errors import EngineError
    from pie_core.engine.forward import ChannelUse, Geometry, Pass
    from pie_core.engine.instance import Instance
    from pie_core.engine.metrics import Metrics
    from pie_core.engine.pages import PagePool
    from pie_core.engine.pipeline import Pipeline
    from pie_core.engine.program_info import ProgramInfo
    from pie_core.engine.runner import RunnerLimits
    from pie_core.engine.step import Step
    from pie_core.engine.working_set import WorkingSet

SEEN = 2  # times in a row that the pattern must have been seen
REST = 8  # passes without guesses after one was dropped
LONG_STEP = 0.02  # seconds; beside such a step an inferlet's turn is nothing, even where the device computes on every core
LATE = 4 * LONGEST  # seconds; who claims later must show the pattern again


class Habit:
    """What a pipeline did lately. `last`: its last pass, answered, with nothing submitted since; `streak`: passes in a row that
    followed the pattern; `rest`: passes to go before the next guess; `guess`: what is expected of it and not claimed."""

    __slots__ = ("guess", "last", "rest", "streak")

    def __init__(self) -> None:
        self.last: Pass | None = None
        self.streak = 0
        self.rest = 0
        self.guess: Guess | None = None


class Guess:
    """The pass that `pipe` is expected to submit after `last`, in a submitted step. To a Step it looks like a Pass of one token.

    `lane_uses` are its own: cells that a real pass would get. `results` is the step's results region once it was read.
    """

    __slots__ = (
        "frozen",
        "heads",
        "info",
        "lane_uses",
        "last",
        "last_step",
        "length",
        "live",
        "out_words",
        "page",
        "pages",
        "params",
        "pipe",
        "reads",
        "results",
        "status_word",
        "step",
        "tails",
        "token",
        "ws",
    )

    def __init__(self, last: Pass, info: ProgramInfo, token: int, uses: list[ChannelUse]) -> None:
        self.last = last
        self.pipe: Pipeline = last.pipe
        self.ws: WorkingSet = last.parts[0].ws
        self.info = info
        self.params = last.params
        self.token = token
        self.reads = last.reads
        self.length = self.ws.length
        self.frozen = self.ws.frozen
        self.last_step = self.ws.last_step
        self.pages = list(self.ws.pages)
        self.page: int | None = None  # lent for the token, when the last page is full
        self.lane_uses = uses
        self.heads = [use.channel.head for use in uses] if uses else []
        self.tails = [use.channel.tail for use in uses] if uses else []
        self.live = True  # neither adopted nor dropped
        self.step: Step | None = None
        self.results: memoryview | None = None
        self.status_word = -1
        self.out_words: list[int] = []

    @property
    def geometry(self) -> Geometry:
        """How the token is seen."""
        return self.last.geometry


class Predictor:
    """Watches what pipelines submit and are answered; guesses, and settles what becomes of the guesses. Off: it never guesses."""

    __slots__ = ("_limits", "_metrics", "_pool", "candidates", "enabled")

    def __init__(self, limits: RunnerLimits, pool: PagePool, metrics: Metrics, *, enabled: bool) -> None:
        self._limits = limits
        self._pool = pool
        self._metrics = metrics
        self.enabled = enabled
        self.candidates: dict[Pipeline, None] = {}  # answered in the last step, and of a habit

    # --- what pipelines do

    def answered(self, work: Pass) -> None:
        """The last pass of its pipeline got its results, and nothing of the pipeline is queued or in flight."""
        pipe = work.pipe
        habit = pipe.habit
        if not self.enabled or pipe.closed:
            habit.last = None
            return
        habit.last = work if work.token is not None else None
        if habit.streak >= SEEN and not habit.rest and habit.last is not None:
            self.candidates[pipe] = None

    def claim(self, work: Pass, now: float) -> Guess | None:
        """A pass is accepted: the guess that it is, or None. Guesses that it refutes are dropped."""
        pipe = work.pipe
        habit = pipe.habit
        guess = habit.guess
        if guess is not None:
            if self._is(guess, work):
                habit.last = None
                if now - pipe.answered_at > LATE:
                    habit.streak = 0
                return guess
            self.drop(guess)
        for part in work.parts:
            if part.ws.guess is not None:
                self.drop(part.ws.guess)
        if habit.rest:
            habit.rest -= 1
        last, habit.last = habit.last, None
        habit.streak = habit.streak + 1 if last is not None and follows(last, work) else 0
        self.candidates.pop(pipe, None)
        return None

    def drop(self, guess: Guess | None) -> None:
        """Forget a guess, if there is one: something else happened to its pipeline or working set."""
        if guess is None or not guess.live:
            return
        self._detach(guess)
        guess.step = None
        if guess.page is not None:
            self._pool.take_back(guess.page)
        habit = guess.pipe.habit
        habit.streak, habit.rest = 0, REST
        self._metrics.dropped += 1

    def forget(self, pipe: Pipeline) -> None:
        """`pipe` will not submit any more."""
        self.candidates.pop(pipe, None)
        pipe.habit.last = None
        self.drop(pipe.habit.guess)

    # --- what the engine does

    def guesses(self, expected: set[Pipeline], number: int, now: float) -> list[Guess]:
        """What the candidates will do in step `number`, if nobody else is expected back soon; else nothing."""
        candidates = self.candidates
        if not expected <= candidates.keys():
            return []
        self.candidates = {}
        made: list[Guess] = []
        for pipe in candidates:
            guess = self._guess(pipe, number) if now - pipe.answered_at <= LONGEST else None
            if guess is not None:
                made.append(guess)
            elif pipe in expected:
                return []
        return made

    def fill(self, step: Step, guesses: list[Guess]) -> None:
        """Add guesses to a step that has everything else in it already; one of a silent pipeline does not hold up others."""
        for guess in guesses:
            if not (guess.pipe.silent and step.n_tokens) and step.fits(guess, len(guess.pages) + 1):
                self._place(guess, step)
        self._metrics.predicted += len(step.guesses)

    def adopt(self, guess: Guess, work: Pass) -> memoryview | None:
        """Let `work` be the pass that runs as `guess` (see `claim`); the results of its step if they are here already."""
        self._detach(guess)
        step, ws, part = guess.step, guess.ws, work.parts[0]
        assert step is not None  # it was submitted
        if guess.page is not None:
            self._pool.hand_over(guess.page, work.instance)
            ws.pages.append(guess.page)
        for use, cells in zip(work.uses, guess.lane_uses, strict=True):
            use.take_cell, use.put_cell, use.copy = cells.take_cell, cells.put_cell, cells.copy
        work.status_word, work.out_words = guess.status_word, guess.out_words
        part.undo = (ws.length, ws.frozen)
        ws.written_by(work)
        step.adopt(work)
        work.accepted_at = 0.0
        work.pipe.flying.append(work)
        guess.step = None
        metrics = self._metrics
        metrics.adopted += 1
        metrics.decode_tokens += 1
        return guess.results

    def landed(self, step: Step, results: memoryview) -> None:
        """The step was read: keep its results for guesses that nobody claimed yet."""
        for guess in step.guesses:
            if guess.live:
                guess.results = results

    def failed(self, step: Step, cause: EngineError) -> None:
        """The step failed, and with it every set that it wrote to."""
        for guess in step.guesses:
            if guess.live:
                guess.ws.fail(cause, "the device failed a step that writes to this working set")
                self.drop(guess)

    # --- inside

    def _detach(self, guess: Guess) -> None:
        guess.live = False
        guess.ws.guess = None
        guess.pipe.habit.guess = None

    def _guess(self, pipe: Pipeline, number: int) -> Guess | None:
        """The expected pass of `pipe`, if it is allowed and would be ready for step `number`."""
        last, limits = pipe.habit.last, self._limits
        if last is None or last.info is None or pipe.habit.guess is not None or pipe.queue or pipe.flying or pipe.stop_channel is not None:
            return None
        token, ws = last.token, last.parts[0].ws
        length = ws.length
        if token is None or not 0 <= token < limits.vocab:
            return None
        if ws.leaving or ws.paused or ws.pipe is not pipe or length >= limits.context or not ws.steady():
            return None
        if len(ws.pages) != -(-length // PAGE_TOKENS) or not self._page(ws, last.instance):
            return None
        if length != ws.frozen and last.geometry.mode == "folding":
            return None
        uses: list[ChannelUse] = []
        for use in last.lane_uses:
            channel = use.channel
            if not channel.predictable(pipe) or (use.uses_front and not channel.full_for(number)):
                return None
            if use.puts and not use.takes and not channel.room():
                return None
            mine = use.again()
            if use.uses_front:
                mine.take_cell = channel.head
            if use.puts:
                mine.put_cell = channel.tail
            uses.append(mine)
        return Guess(last, last.info, token, uses)

    def _page(self, ws: WorkingSet, owner: Instance) -> bool:
        """Whether there is a place for one more token: in a partial page of its own, or a page that is not missed."""
        if ws.length % PAGE_TOKENS:
            return not ws.tail_is_kept()
        return self._pool.unlent > self._pool.total >> 3 and owner.pages < owner.max_pages

    def _place(self, guess: Guess, step: Step) -> None:
        ws, pool = guess.ws, self._pool
        if guess.length % PAGE_TOKENS == 0:
            if pool.unlent <= pool.total >> 3:  # the step has taken some
                return
            guess.page = pool.lend(partial(self.drop, guess))
        step.guess(guess)
        guess.step = step
        ws.guess = guess.pipe.habit.guess = guess

    def _is(self, guess: Guess, work: Pass) -> bool:
        """Whether `work` would read and write, from the state as it is now, exactly what the guess does."""
        pipe, ws, owner = guess.pipe, guess.ws, work.instance
        if not follows(guess.last, work) or pipe.queue or pipe.flying or pipe.stop_channel is not None:
            return False
        if ws.length != guess.length or ws.frozen != guess.frozen or ws.last_step != guess.last_step or ws.pages != guess.pages:
            return False
        if not ws.steady() or ws.pipe is not pipe:
            return False
        if owner.pages >= owner.max_pages if guess.page is not None else ws.tail_is_kept():
            return False
        for use, head, tail in zip(guess.lane_uses, guess.heads, guess.tails, strict=True):
            channel = use.channel
            if not channel.predictable(pipe) or channel.tail != tail or (use.uses_front and channel.head != head):
                return False
        return True


def follows(last: Pass, work: Pass) -> bool:
    """Whether `work` is one token, the one that `last` returned, and otherwise `last` over again: set, geometry, read-outs, program,
    parameters and channels."""
    if work.remaining != 1 or len(work.parts) != 1 or len(last.parts) != 1 or work.embed is not None or last.embed is not None:
        return False
    part, before = work.parts[0], last.parts[0]
    if part.ws is not before.ws or part.ids is None or part.ids[0] != last.token:
        return False
    if work.info is not last.info or work.params != last.params or work.geometry != last.geometry or work.geometry.shaped:
        return False
    if before.reads != (before.n - 1,) * len(part.reads):
        return False
    return not work.lane_uses or all(a.channel is b.channel for a, b in zip(work.lane_uses, last.lane_uses, strict=True))
