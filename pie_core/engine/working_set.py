"""WorkingSet: one sequence's state, a frozen prefix and a writable buffer over shared KV pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.edit_order import EditOrder
from pie_core.engine.errors import EngineError, InvalidState
from pie_core.engine.pages import PageOwner, PagePool
from pie_core.engine.prefix_cache import PrefixCache
from pie_core.engine.recipe import Recipe
from pie_core.engine.recurrent import RecurrentState
from pie_core.engine.set_edits import SetEdits
from pie_core.engine.set_tokens import EVERYTHING, cut_spans, forget_rows, pages_for
from pie_core.engine.slack import Deferred

if TYPE_CHECKING:
    from pie_core.engine.forward import Pass
    from pie_core.engine.pipeline import ForkEntry, Pipeline
    from pie_core.engine.predict import Guess
    from pie_core.engine.set_requests import LateCommit

__all__ = ["EVERYTHING", "WorkingSet", "pages_for"]


PASS = "an earlier pass on this working set failed"
UNSEEN = "an earlier pass on this working set took tokens from a channel that no read-out has seen since, and now a later one failed"
EDIT = "an earlier edit of this working set failed"
FORKED = "this working set was forked from one on which a pass or an edit had failed"


class WorkingSet(SetEdits):
    """What a set holds (`SetTokens`), what authors may change of it (`SetEdits`), and its life: passes, forks, faults, pauses.

    Passes that were scheduled ahead and turn out cancelled give their tokens back when the step is read (`restore`). A paused set has
    given its pages back and is computed again before its next pass.
    Public operations are ordered after the passes accepted before them (`order`); a fault in one that nobody awaits is kept
    in `error` and raised by every later use, until `mend`.
    """

    __slots__ = (
        "_birth",
        "born",
        "dropped",
        "error",
        "fail_since",
        "failed",
        "forks",
        "guess",
        "inherited",
        "last_commit",
        "last_step",
        "leaving",
        "line",
        "number",
        "order",
        "pipe",
        "shared",
        "sound",
        "used_at",
        "writers",
        "writing",
    )

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        owner: PageOwner,
        root: bytes,
        number: int = 0,
        *,
        born: bool = True,
        state: RecurrentState | None = None,
        reuse: bool = True,
    ) -> None:
        super().__init__(pool, cache, owner, root, state=state, reuse=reuse)
        self.number = number  # grows with each set made
        self.order = EditOrder()
        self.used_at = 0.0  # when a pass was last accepted or answered
        self.born = born  # False: a fork that its pipeline has not reached yet
        self._birth = -1 if born else self.order.enter()  # operations wait for the fork to happen as they wait for passes
        self.leaving = False  # dropped by its owner, maybe still used by accepted passes
        self.dropped = False
        self.error: EngineError | None = None  # what failed first
        self.failed = ""  # what that was, in words
        self.fail_since = 0  # what was accepted before this number is not concerned
        self.sound: tuple[int, int] | None = None  # (length, frozen) that can still be gone back to
        self.line: deque[Pass] = deque()  # passes accepted and not wholly scheduled: the first one only may run, whatever their pipelines
        self.writers: list[Pass] = []  # passes scheduled on it, the last ones maybe in flight
        self.inherited: list[Pass] = []  # of the sets it was forked from, in flight at the fork: their failure is its own
        self.forks: list[ForkEntry] = []  # of it, in the queue of a pipeline
        self.writing = False  # a pass of several steps is under way, or an edit waits for pages
        self.last_step = -1
        self.last_commit: LateCommit | None = None  # the last one whose value is on its way
        self.guess: Guess | None = None  # writes behind the length (see predict.py)
        self.pipe: Pipeline | None = None  # the first pipeline that used it, and whether another one did too
        self.shared = False

    def steady(self) -> bool:
        """Whether nothing accepted is still to happen to the set, and nothing has failed."""
        return self.born and self.error is None and not self.inherited and self.order.idle

    # --- the order of passes

    def next_is(self, work: Pass) -> bool:
        """Whether `work` is next to extend the set: passes accepted before it are wholly scheduled, and no edit waits for pages."""
        line = self.line
        return (not line or line[0] is work) and (work.started or not self.writing)

    def out_of_line(self, work: Pass) -> None:
        """`work` is wholly scheduled, or never will be."""
        line = self.line
        if not line:
            return  # it computes a paused set again, and had this one for itself
        if line[0] is work:
            line.popleft()
        elif line[-1] is work:  # a pipeline that stops cancels the newest first
            line.pop()
        else:
            line.remove(work)

    # --- pausing

    def may_pause(self) -> bool:
        """Whether the pages can be given back now: nothing writes to them, and the recipe covers them, so that they can be computed
        again, or nobody may use them any more."""
        if self.paused or not self.length or self.leaving or self.dropped or not self.born or self.writing or self.guess is not None:
            return False
        if self.pending:
            return False
        if not all(w.ended for w in (*self.writers, *self.inherited)):
            return False
        if self.state is not None and self.buffered:
            return False  # computing it again folds every token
        self.failure(0)  # learns of what it inherited
        if self.error is None:
            return self.recipe.known >= self.length
        if self.fail_since and not self.order.idle:
            return False  # something that came before the failure may still use it
        return self.sound is None or self.recipe.known >= min(self.sound[0], self.length)

    def resume(self, again: WorkingSet) -> None:
        """Take the pages of `again`, which holds the same tokens, and maybe more than this set still has."""
        if self.state is not None and again.state is not None:
            if again.length != self.length:
                return  # cut meanwhile, and folded is folded: the next pass asks once more
            self.state.become(again.state)
        pages, again.pages = again.pages, []
        again.length = again.frozen = 0
        keep = pages_for(self.length)
        self.pages = pages[:keep]
        self.last_step = again.last_step
        self.named = min(again.named, self.length // PAGE_TOKENS)
        self.paused = False
        self._pool.release(pages[keep:], self._owner)

    def written_by(self, work: Pass) -> None:
        """`work` starts to extend the set."""
        writers = self.writers
        if len(writers) == 1 and writers[0].ended:
            writers[0] = work
        else:
            self.writers = [w for w in writers if not w.ended]
            self.writers.append(work)

    # --- commits by a count on the device (see slack.py)

    def settle_commit(self, commit: Deferred, n: int) -> None:
        """The count of a pending commit was read: the set is as long as it says, and so it was for the passes behind. Raises
        InvalidState for a count that the buffer did not have; nothing is corrected then."""
        assert self.slack is not None  # the commit is pending in it
        if not 0 <= n <= commit.limit:
            raise InvalidState(f"commit({n}): the buffer of the working set holds {commit.limit} tokens", buffered=commit.limit)
        start, end = commit.base + n, commit.base + commit.limit
        self.slack.settle(commit, end - start)
        if start == end:
            return
        self.forget(start, end)
        for writer in self.writers:
            for part in () if writer.ended else writer.parts:
                length, frozen = part.undo
                if part.ws is self and length >= end:  # it was scheduled behind the commit
                    part.undo = length - (end - start), frozen - (end - start)
                    if part.before is not None:
                        forget_rows(part.before, start, end)

    def cancel_commit(self, commit: Deferred) -> None:
        """The pass that counts was cancelled, with all that came behind it: the buffer is as it was."""
        if self.slack is not None and commit in self.slack.pending:
            self.slack.remove(commit)
            self.frozen = commit.base

    # --- forks, saved sets, faults

    def fork_into(self, child: WorkingSet, *, buffer: bool) -> None:
        """Let `child` share this prefix (and the buffer when asked). No device work: a partial page is copied at first write."""
        length = self.length if buffer else self.frozen
        child.paused, child.used_at = self.paused, self.used_at
        child.pages = self.pages[: pages_for(length)]
        child.recipe = self.recipe.copy(length)
        child.chain = self.chain[: length // PAGE_TOKENS]
        child.named, child.public = min(self.named, length // PAGE_TOKENS), self.public
        child.hits = cut_spans(self.hits, length)
        self._pool.share(child.pages, child._owner)
        if child.state is not None and self.state is not None:
            child.state.become(self.state, length)
        child.length, child.frozen = length, self.frozen
        child.unseen = self.unseen if self.unseen is not None and self.unseen[1] < length else None
        child.parents = list(self.parents) if buffer and self.parents is not None else None
        child.last_step = self.last_step  # a copy of the partial page must come after the step that writes the parent's tokens
        child.fork_points = {self.frozen, length}
        child.inherited = [w for w in (*self.inherited, *self.writers) if not w.ended]
        self.fork_points |= child.fork_points
        child.be_born()

    def reopen(self, pages: list[int] | None, length: int, frozen: int, parents: Sequence[int] | None, recipe: Recipe) -> None:
        """Be a set that was saved: with `pages` that hold it, or None: to be computed again from `recipe` before its next pass."""
        self.pages = pages or []
        self.paused = pages is None and length > 0
        self.length, self.frozen, self.recipe = length, frozen, recipe
        self.parents = list(parents) if parents is not None else None
        self.public = 0 if pages else self.public  # what a file says is not shared with others
        self.fork_points = {frozen, length}

    def be_born(self) -> None:
        """The fork has happened (or failed, see `error`): operations that waited for it run."""
        self.born = True
        self.order.leave(self._birth)

    def fail(self, cause: EngineError, what: str, since: int = 0, sound: tuple[int, int] | None = None) -> None:
        """Fail the uses of this set accepted as number `since` or later: `what` failed, because of `cause`. Of several, what was accepted
        first counts. `sound`: the (length, frozen) from before it, where they are whole and known."""
        if self.error is None or since < self.fail_since:
            self.error, self.failed, self.fail_since = cause.root().kept(), what, since
            known = sound is not None and (self.slack is None or not self.slack.pending or sound[0] <= self.slack.base)
            self.sound = sound if known else None  # behind a count on its way lengths are upper bounds

    def blame_unseen(self, cause: EngineError, seq: int) -> EngineError:
        """Fail from the first pass on whose ids nobody has seen: a read-out behind it is bad (`cause`). Gives what pass `seq` is told."""
        if self.unseen is None:
            return cause
        since, *sound = self.unseen
        self.fail(cause, UNSEEN, since, (sound[0], sound[1]))
        return self.failure(seq) or cause

    def fail_as(self, parent: WorkingSet) -> None:
        """Fail, since the set that this one is to be forked from has failed."""
        assert parent.error is not None  # `failure`
        self.fail(parent.error, FORKED)

    def failure(self, seq: int) -> EngineError | None:
        """Why what was accepted as number `seq` cannot use the set."""
        if self.inherited:
            for writer in self.inherited:
                if writer.failure is not None:
                    self.fail(writer.failure, FORKED)
            self.inherited = [w for w in self.inherited if not w.ended]
        if self.error is None or seq < self.fail_since:
            return None
        fork = "go on from a fork made before it, or " if self.fail_since else ""
        back = f"truncate({self.sound[0]}) to go back to before it" if self.sound is not None else "start a new working set"
        return self.error.told_later(self.failed, fork + back)

    def mend(self, length: int) -> None:
        """Cut a failed set back to `length` tokens from before the failure: it is whole then. Where that cannot be, it stays failed."""
        if self.sound is None or length > min(self.sound[0], self.length):
            return
        frozen = self.sound[1]
        folded = self.state is not None and length < self.state.at
        if (length < frozen and length not in self.fork_points) or ((self.paused or folded) and self.recipe.known < length):
            return
        self.restore(length, min(frozen, length))
        self.error = self.sound = None

    def drop(self) -> None:
        """Free every page. Twice is harmless."""
        self.dropped = True
        if self.slack is not None:
            self.slack.clear()
        pages, self.pages = self.pages, []
        self.length = self.frozen = 0
        if self.state is not None:
            self.state.clear()
        self._pool.release(pages, self._owner)

    def let_go(self) -> None:
        """Nothing accepted needs the dropped set any more: forget the passes that it was in, which hold it, so that it is freed at once
        and not when the garbage collector looks for cycles."""
        self.line.clear()
        self.writers, self.inherited = [], []
        self.forks.clear()
        self.last_commit = self.pipe = None
