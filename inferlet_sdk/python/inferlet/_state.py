"""Working sets (one sequence's state in the model) and how a pass extends and sees them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import _host
from ._call import asks
from ._channel import Channel
from ._loop import HostFuture
from ._output import Output
from ._values import _short, check_int, is_list
from .errors import UsageError

if TYPE_CHECKING:
    from ._forward import Pipeline

_MAX_TOKENS = 1 << 31
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")  # as pie_core/engine/saved_sets.py has it


Rows = Sequence[Sequence[bool]] | Sequence[Sequence[int]]


class StateGeometry:
    """How a pass changes its working sets and what its tokens attend to; made by `folding` or `buffered`.

    `window` (tokens, None: all) bounds attention, the first `sinks` stay visible. `mask` hides more: a row for each token of the pass,
    True where it sees the stored token of that place; the pass's own tokens come last, and a token sees itself and nothing behind it.
    Rows of ints are packed: 32 tokens each, the lowest bit first. `tree` makes the tokens a tree: the parent of each is an index in
    the buffer, or -1 for the last frozen token; a token sees what is frozen and its ancestors. With either, a pass has one working set.
    """

    __slots__ = ("_json", "mode", "sinks", "tokens", "window")

    def __init__(self, mode: str, window: int | None, sinks: int, mask: Rows | None = None, tree: Sequence[int] | None = None) -> None:
        if not isinstance(mode, str) or mode not in ("folding", "buffered"):
            raise UsageError(f"StateGeometry: mode is {_short(mode)}; use StateGeometry.folding() or StateGeometry.buffered()")
        self.mode = mode
        self.window = 0 if window is None else check_int("StateGeometry: window", window, 1, _MAX_TOKENS)
        self.sinks = check_int("StateGeometry: sinks", sinks, 0, _MAX_TOKENS)
        if self.sinks and not self.window:
            raise UsageError(f"StateGeometry: sinks is {sinks} without a window; pass window= as well")
        self.tokens: int | None = None  # of the pass, where mask or tree fixes them
        more = ""
        if mask is not None:
            words, width = _pack(mask)
            self.tokens = len(words)
            more = f',"mask":{words},"width":{width or "null"}'
        if tree is not None:
            parents = _parents(tree)
            if self.tokens not in (None, len(parents)):
                raise UsageError(f"StateGeometry: mask has {self.tokens} rows and tree {len(parents)} entries; give both one a token")
            self.tokens = len(parents)
            more += f',"tree":{parents}'
        self._json = f'{{"mode":"{mode}","window":{self.window},"sinks":{self.sinks}{more}}}'

    @classmethod
    def folding(
        cls, *, window: int | None = None, sinks: int = 0, mask: Rows | None = None, tree: Sequence[int] | None = None
    ) -> StateGeometry:
        """Append the pass's tokens and freeze them; a tree must be a chain."""
        if window is None and not sinks and mask is None and tree is None:
            return FOLDING
        return cls("folding", window, sinks, mask, tree)

    @classmethod
    def buffered(
        cls, *, window: int | None = None, sinks: int = 0, mask: Rows | None = None, tree: Sequence[int] | None = None
    ) -> StateGeometry:
        """Append the pass's tokens to the writable buffer, until `ws.commit` freezes or `ws.discard` drops them."""
        if window is None and not sinks and mask is None and tree is None:
            return BUFFERED
        return cls("buffered", window, sinks, mask, tree)

    def __repr__(self) -> str:
        more = f", for {self.tokens} tokens" if self.tokens is not None else ""
        return f"StateGeometry.{self.mode}(window={self.window or None}, sinks={self.sinks}{more})"


def _pack(mask: Any) -> tuple[list[list[int]], int]:
    """(words of each row, entries of a row given as bools, else 0)."""
    if not isinstance(mask, (list, tuple)) or not mask or not all(isinstance(row, (list, tuple)) and row for row in mask):
        raise UsageError(f"StateGeometry: mask is {_short(mask)}; use a list of rows, one for each token, of bools or of packed ints")
    size = len(mask[0])
    kinds = {type(entry) for row in mask for entry in row}
    for k, row in enumerate(mask):
        if len(row) != size:
            raise UsageError(f"StateGeometry: mask[{k}] has {len(row)} entries and mask[0] has {size}; all rows must be equally long")
    if kinds == {bool}:
        words = -(-size // 32)
        bits = [int("".join("1" if seen else "0" for seen in reversed(row)), 2) for row in mask]
        return [[b >> 32 * w & 0xFFFFFFFF for w in range(words)] for b in bits], size
    if kinds != {int}:
        odd = next(((k, entry) for k, row in enumerate(mask) for entry in row if type(entry) not in (bool, int)), None)
        held = f"mask[{odd[0]}] has {_short(odd[1])}" if odd else "mask mixes bools and ints"
        raise UsageError(f"StateGeometry: {held}; use bools, or ints that pack 32 tokens each")
    for k, row in enumerate(mask):
        for word in row:
            check_int(f"StateGeometry: mask[{k}]", word, 0, 2**32 - 1)
    return [list(row) for row in mask], 0


def _parents(tree: Any) -> list[int]:
    if not is_list(tree) or not len(tree):
        raise UsageError(f"StateGeometry: tree is {_short(tree)}; use the parent of each token: an index in the buffer, or -1")
    return [check_int(f"StateGeometry: tree[{k}]", parent, -1, _MAX_TOKENS) for k, parent in enumerate(tree)]


FOLDING = StateGeometry("folding", None, 0)
BUFFERED = StateGeometry("buffered", None, 0)


class WorkingSet:
    """One sequence's state inside the model: a frozen prefix and a writable buffer. Freed when the object goes away, or by `drop()`.

    What earlier passes of the same user computed for the same first tokens is not computed again, where it is still cached. A set made
    with `reuse=False`, and its forks, neither takes anything from that cache nor leaves anything in it.
    """

    __slots__ = ("__weakref__", "_dropped", "id")

    def __init__(self, *, reuse: bool = True) -> None:
        self._dropped = True
        if not isinstance(reuse, bool):
            raise UsageError(f"WorkingSet: reuse is {_short(reuse)}; use True or False")
        self.id = _host.new_id()
        more = "" if reuse else ',"reuse":false'
        _host.call("ws.new", f'{{"ws":{self.id}{more}}}')
        self._dropped = False

    def fork(self, pipe: Pipeline | None = None, *, buffer: bool = False) -> WorkingSet:
        """A new working set that shares this one's frozen prefix, in O(1); `buffer=True` takes the buffer along.

        Ordered after every pass submitted on this set so far, and after all that `pipe` has accepted.
        """
        from ._forward import Pipeline

        self._check("WorkingSet.fork")
        if pipe is not None and not isinstance(pipe, Pipeline):
            raise UsageError(f"WorkingSet.fork: pipe is {_short(pipe)}; use the Pipeline whose passes the fork must include")
        if not isinstance(buffer, bool):
            raise UsageError(f"WorkingSet.fork: buffer is {_short(buffer)}; use True or False")
        child = WorkingSet.__new__(WorkingSet)
        child._dropped = True
        child.id = _host.new_id()
        _host.call_with("ws.fork", ws=child.id, of=self.id, pipe=None if pipe is None else pipe.id, buffer=buffer)
        child._dropped = False
        return child

    def commit(self, n: int | Sequence[int] | Channel | Output) -> None:
        """Freeze buffered tokens: the first `n`; or a path of indices in the buffer, root to leaf of a tree, and drop all others.

        A count or a path that only the device knows comes through a Channel (its next value is taken) or an Output of a pass: later
        passes on this working set wait for it, nothing else does. A path in a vector ends before its first negative index.
        """
        self._check("WorkingSet.commit")
        if isinstance(n, Output):
            known = n.known()
            if known is None:
                _host.call("ws.commit", f'{{"ws":{self.id},"n":{{"out":{n.id}}}}}')
                return
            n = known
            if isinstance(n, list) and all(type(at) is int for at in n):  # a vector of the device may end early
                n = n[: next((k for k, at in enumerate(n) if at < 0), len(n))]
        if isinstance(n, Channel):
            if n.dtype not in ("i32", "u32") or len(n.shape) > 1:
                raise UsageError(
                    f"WorkingSet.commit: the channel holds {n.dtype}{list(n.shape)}; "
                    "use i32 or u32, of shape () for a count or (n,) for a path"
                )
            _host.call("ws.commit", f'{{"ws":{self.id},"n":{{"ch":{n.reader("commit")}}}}}')
        elif is_list(n):
            path = [check_int(f"WorkingSet.commit: path[{k}]", at, 0, _MAX_TOKENS) for k, at in enumerate(n)]
            _host.call("ws.commit", f'{{"ws":{self.id},"n":{path}}}')
        elif isinstance(n, int) and not isinstance(n, bool):
            self._edit("commit", n)
        else:
            raise UsageError(f"WorkingSet.commit: n is {_short(n)}; use a count, a list of indices, a Channel, or an output of a pass")

    def discard(self, n: int | None = None) -> None:
        """Drop the last `n` tokens of the buffer, or all that it still holds."""
        if n is None:
            self._check("WorkingSet.discard")
            _host.call("ws.discard", f'{{"ws":{self.id},"n":null}}')
        else:
            self._edit("discard", n)

    @asks("WorkingSet.save", "await ws.save(…)")
    async def save(self, name: str) -> int:
        """Keep this state under `name` (1 to 100 letters, digits, "_", "-", "."), as it is after what was submitted so far; its tokens.

        `WorkingSet.open(name)` finds it again, in this inferlet or a later one of the same user; on a server after a restart, too.
        """
        self._check("WorkingSet.save")
        fid = _host.new_id()
        _host.call_with("ws.save", ws=self.id, name=_name("WorkingSet.save", name), f=fid)
        n: int = await HostFuture(fid)
        return n

    @classmethod
    @asks("WorkingSet.open", "await WorkingSet.open(…)")
    async def open(cls, name: str) -> WorkingSet:
        """A new working set in the state that was saved as `name`. Raises UnknownSavedSet, SavedSetMismatch, SavedSetDamaged,
        OutOfPages."""
        _name("WorkingSet.open", name)
        ws = cls.__new__(cls)
        ws._dropped = True
        ws.id, fid = _host.new_id(), _host.new_id()
        _host.call_with("ws.open", ws=ws.id, name=name, f=fid)
        ws._dropped = False
        try:
            await HostFuture(fid)
        except BaseException:
            ws.drop()
            raise
        return ws

    def truncate(self, n: int) -> None:
        """Cut the sequence back to `n` tokens; a frozen prefix only back to what it held when it was made (0), opened or forked.

        A set on which a pass or an edit has failed is whole again once it is cut back to what it held before.
        """
        self._edit("truncate", n)

    @asks("WorkingSet.length", "await ws.length()")
    async def length(self) -> int:
        """Tokens in the frozen prefix and the buffer, after what was submitted so far."""
        self._check("WorkingSet.length")
        fid = _host.new_id()
        _host.call("ws.length", f'{{"ws":{self.id},"f":{fid}}}')
        n: int = await HostFuture(fid)
        return n

    @asks("WorkingSet.cached", "await ws.cached()")
    async def cached(self) -> int:
        """How many of its tokens came out of the cache instead of being computed, after what was submitted so far."""
        self._check("WorkingSet.cached")
        fid = _host.new_id()
        _host.call("ws.cached", f'{{"ws":{self.id},"f":{fid}}}')
        n: int = await HostFuture(fid)
        return n

    def drop(self) -> None:
        """Free the state now; passes already submitted still run."""
        if not self._dropped:
            self._dropped = True
            _host.call("ws.drop", f'{{"ws":{self.id}}}')

    def _edit(self, op: str, n: Any) -> None:
        self._check(f"WorkingSet.{op}")
        _host.call("ws." + op, f'{{"ws":{self.id},"n":{check_int(f"WorkingSet.{op}: n", n, 0, _MAX_TOKENS)}}}')

    def _check(self, what: str) -> None:
        if self._dropped:
            raise UsageError(f"{what}: this working set was dropped; fork it before dropping, or keep it")

    def __del__(self) -> None:
        if hasattr(self, "_dropped"):  # not where it was called with arguments that it does not have
            self.drop()


def _name(field: str, name: Any) -> str:
    if not isinstance(name, str):
        raise UsageError(f"{field}: name is {_short(name)}; use a text")
    if not _NAME.fullmatch(name):
        raise UsageError(f"{field}: name is {_short(name)}; use 1 to 100 letters, digits, '_', '-' and '.', not '.' first")
    return name


def check_sets(field: str, sets: Any) -> list[WorkingSet]:
    """A non-empty list of different, living working sets."""
    if not is_list(sets) or not len(sets):
        raise UsageError(f"{field} is {_short(sets)}; use a list of working sets, for example [ws]")
    for k, ws in enumerate(sets):
        if not isinstance(ws, WorkingSet):
            raise UsageError(f"{field}[{k}] is {_short(ws)}; use a WorkingSet")
        ws._check(f"{field}[{k}]")
        if ws in sets[:k]:
            raise UsageError(f"{field}[{k}] is in the list twice; a pass extends each working set once (fork it for a second branch)")
    return list(sets)
