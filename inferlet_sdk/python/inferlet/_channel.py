"""Channels: rings of cells that carry values between passes, and between passes and the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pie_core.eta import channel as _in_trace
from pie_core.eta import is_tracing

from . import _host
from ._call import Call, Told
from ._loop import HostFuture
from ._mailbox import Mailbox
from ._refusals import COMPARED, USED, refuse
from ._room import with_room
from ._values import DTYPES, _short, check_int, decode, infer_dtype, is_list, shape_of, to_words
from .errors import UsageError

Role = Literal["reader", "writer"]
_MAX_CAPACITY = 4096
_MAX_CELL = 1 << 20  # elements
_TAKE, _READ = Told("Channel.take", "await ch.take()"), Told("Channel.read", "await ch.read()")


class Channel:
    """A ring of `capacity` cells of `dtype` (f32, i32, u32, bool) and `shape`; freed when the object goes away.

    Inside an epilogue `take`, `read` and `put` work on tensors. Outside, the program is one end: the writer (`put`, `set`) or the
    reader (`await take()`, `await read()`). Which end it is shows at its first use; where a pass is submitted first, say it with `host=`.
    """

    __slots__ = ("__weakref__", "_declared", "_id", "_mail", "_seed", "capacity", "dtype", "host", "is_counter", "shape")

    def __init__(self, dtype: str, shape: Sequence[int] = (), capacity: int = 1, *, host: Role | None = None) -> None:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise UsageError(f"Channel: dtype is {_short(dtype)}; use one of {', '.join(DTYPES)}")
        if not is_list(shape) or len(shape) > 4:
            raise UsageError(f"Channel: shape is {_short(shape)}; use a tuple of at most 4 extents, () for a scalar")
        if host is not None and (not isinstance(host, str) or host not in ("reader", "writer")):
            raise UsageError(f"Channel: host is {_short(host)}; use 'reader', 'writer' or nothing")
        self.dtype = dtype
        self.shape = tuple([check_int(f"Channel: shape[{k}]", n, 1, _MAX_CELL) for k, n in enumerate(shape)])
        size = 1
        for n in self.shape:
            size *= n
        if size > _MAX_CELL:
            raise UsageError(f"Channel: a cell of shape {list(self.shape)} has {size} elements; the most is {_MAX_CELL}")
        self.capacity = check_int("Channel: capacity", capacity, 1, _MAX_CAPACITY)
        self.host = host
        self.is_counter = False
        self._id = 0  # of the host's channel, once it is declared
        self._declared = False
        self._seed: list[int] | None = None
        self._mail: Mailbox | None = None

    @classmethod
    def of(cls, values: Any, dtype: str | None = None, capacity: int = 1) -> Channel:
        """A channel whose first cell holds `values`: a number, a bool, or lists of them (any sequence but text and bytes). Without `dtype`
        bools are bool, integers i32 or, where one needs it, u32, and where there is a float all are f32. A program that takes the cell
        must put the next one."""
        shape = shape_of("Channel.of: values", values)
        ch = cls(infer_dtype("Channel.of: values", values) if dtype is None else dtype, shape, capacity)
        ch._seed = to_words("Channel.of: values", values, ch.dtype, ch.shape)
        return ch

    @classmethod
    def counter(cls, seed: int) -> Channel:
        """Random state: each `take()` inside an epilogue gives the next one, so every pass draws new numbers. Same seed, same numbers."""
        ch = cls("u32", (2,))
        ch._seed = [check_int("Channel.counter: seed", seed, 0, 2**32 - 1), 0]
        ch.is_counter = True
        return ch

    def put(self, value: Any) -> None:
        """Append `value`. In an epilogue: a Tensor, from the device; of several puts of one pass only the last is there afterwards.
        Outside: numbers, from the program; raises ChannelFull."""
        if is_tracing():
            _in_trace.put(self, value)
        else:
            self._write("ch.put", value)

    def set(self, value: Any) -> None:
        """Replace the front cell by `value`, from the program."""
        if is_tracing():
            raise UsageError("Channel.set: an epilogue cannot set; use put")
        self._write("ch.set", value)

    def take(self) -> Any:
        """Consume the front cell. In an epilogue: its Tensor. Outside: awaitable, its value as numbers or nested lists."""
        if is_tracing():
            return _in_trace.take(self)
        self._become("reader", "take")
        return Call(self._taken(), _TAKE)

    def read(self) -> Any:
        """As `take`, but the cell stays."""
        if is_tracing():
            return _in_trace.read(self)
        self._become("reader", "read")
        return Call(self._peeked(), _READ)

    async def _taken(self) -> Any:
        if self._mail is None:
            ch = self.declare()
            self._mail = Mailbox(lambda fid: _host.call("ch.take", f'{{"ch":{ch},"f":{fid}}}'))
        return decode(await self._mail.get())

    async def _peeked(self) -> Any:
        fid = _host.new_id()
        _host.call("ch.read", f'{{"ch":{self.declare()},"f":{fid}}}')
        return decode(await HostFuture(fid))

    def _write(self, op: str, value: Any) -> None:
        self._become("writer", op[3:])
        words = to_words(f"Channel.{op[3:]}: value", value, self.dtype, self.shape)
        _host.call(op, f'{{"ch":{self.declare()},"words":{words}}}')

    def _become(self, role: Role, what: str) -> None:
        if self.host == role:
            return
        if self.host is not None:
            raise UsageError(f"Channel.{what}: the program is this channel's {self.host}; a channel has one reader and one writer")
        if self._seed is not None and role == "writer":
            raise UsageError(
                f"Channel.{what}: this channel was seeded and belongs to the passes; make another one to write from the program"
            )
        if self._declared:
            raise UsageError(f"Channel.{what}: passes already use this channel among themselves; make it with host={role!r} to {what} here")
        self.host = role

    def reader(self, what: str) -> int:
        """The host's id of this channel, whose values the program's side takes from now on."""
        self._become("reader", what)
        return self.declare()

    def declare(self) -> int:
        """The host's id of this channel, made known to the host first where it is not yet."""
        if not self._declared:
            ch = _host.new_id()
            fields = {"dtype": self.dtype, "shape": self.shape, "capacity": self.capacity, "seed": self._seed, "host": self.host}
            with_room(lambda: _host.call_with("ch.new", ch=ch, **fields))
            self._id, self._declared = ch, True
        return self._id

    def __del__(self) -> None:
        if getattr(self, "_declared", False):  # not where it was called with arguments that it does not have
            _host.call("ch.drop", f'{{"ch":{self._id}}}')  # what was submitted goes on

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Identity, which containers need; a comparison with anything that is no channel is meant for the value."""
        if isinstance(other, Channel) or other is None:
            return self is other
        raise _untaken(self, "==")

    def __format__(self, spec: str) -> str:
        if spec:
            raise _untaken(self, f"the format {spec!r}")
        return repr(self)

    def __repr__(self) -> str:
        return f"Channel({self.dtype!r}, {self.shape}, {self.capacity})"


def _untaken(self: object, what: str) -> UsageError:
    return UsageError(
        f"Channel: {what} needs a value, which a channel only holds; inside an epilogue .take() or .read() gives it, outside "
        "await ch.take() (whether there is a channel at all: ch is not None)"
    )


refuse(Channel, _untaken, COMPARED, USED)
