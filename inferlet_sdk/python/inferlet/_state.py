"""Working sets (one sequence's state in the model) and how a pass extends and sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _host
from ._loop import HostFuture
from ._values import _short, check_int
from .errors import UsageError

_MAX_TOKENS = 1 << 31


class StateGeometry:
    """How a pass changes its working sets and what its tokens attend to; made by `folding` or `buffered`."""

    __slots__ = ("_json", "mode", "sinks", "window")

    def __init__(self, mode: str, window: int | None, sinks: int) -> None:
        if mode not in ("folding", "buffered"):
            raise UsageError(f"StateGeometry: mode is {_short(mode)}; use StateGeometry.folding() or StateGeometry.buffered()")
        self.mode = mode
        self.window = 0 if window is None else check_int("StateGeometry: window", window, 1, _MAX_TOKENS)
        self.sinks = check_int("StateGeometry: sinks", sinks, 0, _MAX_TOKENS)
        if self.sinks and not self.window:
            raise UsageError(f"StateGeometry: sinks is {sinks} without a window; pass window= as well")
        self._json = f'{{"mode":"{mode}","window":{self.window},"sinks":{self.sinks}}}'

    @classmethod
    def folding(cls, *, window: int | None = None, sinks: int = 0) -> StateGeometry:
        """Append the pass's tokens and freeze them. `window` (tokens, None: all) bounds attention, the first `sinks` stay visible."""
        return FOLDING if window is None and not sinks else cls("folding", window, sinks)

    @classmethod
    def buffered(cls, *, window: int | None = None, sinks: int = 0) -> StateGeometry:
        """Append the pass's tokens to the writable buffer, until `ws.commit(n)` freezes or `ws.discard(n)` drops them."""
        return BUFFERED if window is None and not sinks else cls("buffered", window, sinks)

    def __repr__(self) -> str:
        return f"StateGeometry.{self.mode}(window={self.window or None}, sinks={self.sinks})"


FOLDING = StateGeometry("folding", None, 0)
BUFFERED = StateGeometry("buffered", None, 0)


class WorkingSet:
    """One sequence's state inside the model: a frozen prefix and a writable buffer. Freed when the object goes away, or by `drop()`."""

    __slots__ = ("__weakref__", "_dropped", "id")

    def __init__(self) -> None:
        self._dropped = True
        self.id = _host.new_id()
        _host.call("ws.new", f'{{"ws":{self.id}}}')
        self._dropped = False

    def fork(self, pipe: Any = None, *, buffer: bool = False) -> WorkingSet:
        """A new working set that shares this one's frozen prefix, in O(1); `buffer=True` takes the buffer along.

        Ordered after every pass that `pipe` has accepted; without a pipe, after the passes that are done.
        """
        self._check("fork")
        pid = getattr(pipe, "id", None)
        if pipe is not None and (not isinstance(pid, int) or isinstance(pipe, WorkingSet)):
            raise UsageError(f"WorkingSet.fork: pipe is {_short(pipe)}; use the Pipeline whose passes the fork must include")
        child = WorkingSet.__new__(WorkingSet)
        child._dropped = True
        child.id = _host.new_id()
        _host.call_with("ws.fork", ws=child.id, of=self.id, pipe=pid, buffer=bool(buffer))
        child._dropped = False
        return child

    def commit(self, n: int) -> None:
        """Freeze the first `n` tokens of the buffer."""
        self._edit("commit", n)

    def discard(self, n: int) -> None:
        """Drop the last `n` tokens of the buffer."""
        self._edit("discard", n)

    def truncate(self, n: int) -> None:
        """Cut the sequence back to `n` tokens; a frozen prefix only back to a fork point."""
        self._edit("truncate", n)

    async def length(self) -> int:
        """Tokens in the frozen prefix and the buffer, after what was submitted so far."""
        self._check("length")
        fid = _host.new_id()
        _host.call("ws.length", f'{{"ws":{self.id},"f":{fid}}}')
        n: int = await HostFuture(fid)
        return n

    def drop(self) -> None:
        """Free the state now; passes already submitted still run."""
        if not self._dropped:
            self._dropped = True
            _host.call("ws.drop", f'{{"ws":{self.id}}}')

    def _edit(self, op: str, n: int) -> None:
        self._check(op)
        _host.call("ws." + op, f'{{"ws":{self.id},"n":{check_int(f"WorkingSet.{op}: n", n, 0, _MAX_TOKENS)}}}')

    def _check(self, what: str) -> None:
        if self._dropped:
            raise UsageError(f"WorkingSet.{what}: this working set was dropped; fork it before dropping, or keep it")

    def __del__(self) -> None:
        self.drop()


def check_sets(field: str, sets: Any) -> list[WorkingSet]:
    """A non-empty list of different, living working sets."""
    if isinstance(sets, WorkingSet) or not isinstance(sets, Sequence) or not sets:
        raise UsageError(f"{field} is {_short(sets)}; use a list of working sets, for example [ws]")
    for k, ws in enumerate(sets):
        if not isinstance(ws, WorkingSet):
            raise UsageError(f"{field}[{k}] is {_short(ws)}; use a WorkingSet")
        ws._check("state")
        if ws in sets[:k]:
            raise UsageError(f"{field}[{k}] is in the list twice; a pass extends each working set once (fork it for a second branch)")
    return list(sets)
