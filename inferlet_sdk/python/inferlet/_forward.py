"""Forward passes, their outputs, and the pipelines that run them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from . import _host, _programs
from ._channel import Channel
from ._loop import loop
from ._output import NoOutputs, Output, Outputs
from ._state import FOLDING, StateGeometry, WorkingSet, check_sets
from ._values import _short, check_int, check_tokens, is_list
from .errors import AlreadySubmitted, PipelineClosed, UnsupportedStage, UsageError


class ForwardPass:
    """One run of the model: what goes in (`embed`), which state it extends (`state`), what comes out (`read`, `epilogue`). Used once."""

    __slots__ = (
        "_cell", "_chans", "_end", "_fed", "_geometry", "_outs", "_params", "_prog", "_reads", "_rows", "_sets", "_stages", "_tokens",
        "_traced_rows", "submitted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.submitted = False
        self._tokens: str | None = None  # as JSON
        self._rows: list[int] = []  # tokens of each list
        self._cell = 0  # tokens in a channel's cell, divided evenly among the working sets
        self._sets: list[WorkingSet] = []
        self._geometry: StateGeometry | None = None
        self._reads: list[list[int]] | None = None
        self._prog = 0
        self._params: tuple[int, ...] = ()
        self._chans: tuple[Channel, ...] = ()
        self._fed: Channel | None = None  # what the tokens come from: it must be there when the pass is submitted
        self._outs: tuple[Output, ...] = ()
        self._end: weakref.ref[Output] | None = None  # of a pass without outputs
        self._traced_rows: int | None = None  # read-outs that the epilogue was told
        self._stages: list[str] = []  # given besides the epilogue

    def embed(self, tokens: Sequence[int] | Sequence[Sequence[int]] | Channel) -> None:
        """What goes in: token ids; a list of id lists, one for each working set; or a Channel whose cell the device reads itself."""
        self._open("embed", self._tokens)
        if isinstance(tokens, Channel):
            if tokens.dtype not in ("i32", "u32") or len(tokens.shape) > 1:
                raise UsageError(
                    f"ForwardPass.embed: the channel holds {tokens.dtype}{list(tokens.shape)}; use i32 or u32 of shape () or (n,)"
                )
            self._tokens = f'{{"ch":{tokens.declare()}}}'
            self._fed = tokens
            self._cell = tokens.shape[0] if tokens.shape else 1
            return
        nested = is_list(tokens) and len(tokens) > 0 and is_list(tokens[0])
        if nested:
            lists = [check_tokens(f"ForwardPass.embed: tokens[{k}]", t) for k, t in enumerate(tokens)]
        else:
            lists = [check_tokens("ForwardPass.embed: tokens", tokens)]
        self._rows = [len(t) for t in lists]
        if 0 in self._rows:
            which = f"tokens[{self._rows.index(0)}]" if nested else "tokens"
            raise UsageError(f"ForwardPass.embed: {which} is empty; feed at least one token (chat.prefix() may be [])")
        self._tokens = str(lists if nested else lists[0])

    def state(self, working_sets: Sequence[WorkingSet], geometry: StateGeometry = FOLDING) -> None:
        """The working sets that the pass extends, one for each token list, and how; the default is StateGeometry.folding()."""
        self._open("state", self._geometry)
        self._sets = check_sets("ForwardPass.state: working_sets", working_sets)
        if not isinstance(geometry, StateGeometry):
            raise UsageError(f"ForwardPass.state: geometry is {_short(geometry)}; use StateGeometry.folding() or StateGeometry.buffered()")
        if self._reads is None and self._traced_rows not in (None, len(self._sets)):
            raise UsageError(
                f"ForwardPass.state: the epilogue was traced for {self._traced_rows} read-outs and there are {len(self._sets)} "
                "working sets; call state() before epilogue()"
            )
        self._geometry = geometry

    def read(self, positions: Sequence[int] | Sequence[Sequence[int]]) -> None:
        """Which tokens of this pass are read out, counted from its first (negative: from its last); a list for each working set.

        Default: the last token of each working set. `intrinsics.output(i, name)` counts the read-outs of all lists in order.
        """
        self._open("read", self._reads)
        if self._prog:
            raise UsageError("ForwardPass.read: the epilogue was traced for the read-outs before this call; call read() before epilogue()")
        if not is_list(positions) or not len(positions):
            raise UsageError(f"ForwardPass.read: positions is {_short(positions)}; use a list of token positions, for example [0, -1]")
        groups: Sequence[Any] = positions if is_list(positions[0]) else [positions]
        for k, group in enumerate(groups):
            if not is_list(group):
                raise UsageError(f"ForwardPass.read: positions[{k}] is {_short(group)}; use either positions or lists of them")
        self._reads = [[check_int("ForwardPass.read: position", p, -(2**31), 2**31) for p in group] for group in groups]

    def epilogue(self, fn: Callable[[], Any]) -> Any:
        """Trace `fn` now and run it as a kernel behind the pass. Gives one awaitable Output for a tensor, a tuple of them for several;
        for none an empty one, whose `await` waits for the pass and raises why it failed.

        `read` comes first, and so does `state` where `fn` uses `intrinsics.outputs(name)`, which has a row for each read-out.
        """
        self._open("epilogue", self._prog or None)
        self._traced_rows = sum(map(len, self._reads)) if self._reads is not None else len(self._sets) or None
        self._prog, self._params, self._chans, outs, single = _programs.lower(fn, self._traced_rows)
        if single:
            out = Output(_host.new_id(), self)
            self._outs = (out,)
            return out
        if not outs:
            nothing = NoOutputs()
            nothing.end = Output(_host.new_id(), self)
            self._end = weakref.ref(nothing.end)
            return nothing
        self._outs = Outputs([Output(_host.new_id(), self) for _ in range(outs)])
        return self._outs

    def prologue(self, fn: Callable[[], Any]) -> None:
        """Trace and verify `fn` as the stage before the pass (`intrinsics.tokens`, `positions`). It does not run yet: submit refuses."""
        self._stage("prologue", fn)

    def on_attn_proj(self, fn: Callable[[], Any]) -> None:
        """Trace and verify `fn` as the stage behind each layer's projections (`intrinsics.query`, `key`, `value`, `positions`, `layer`).
        It does not run yet: submit refuses."""
        self._stage("on_attn_proj", fn)

    def on_attn(self, fn: Callable[[], Any]) -> None:
        """Trace and verify `fn` as the stage behind each layer's attention (`intrinsics.query`, `attention`, `positions`, `layer`).
        It does not run yet: submit refuses."""
        self._stage("on_attn", fn)

    def _stage(self, stage: str, fn: Callable[[], Any]) -> None:
        self._open(stage, stage if stage in self._stages else None)
        tokens = self._cell or sum(self._rows)
        if not tokens:
            raise UsageError(f"ForwardPass.{stage}: the number of tokens is not known; call embed() first")
        _programs.check_stage(stage, fn, tokens)
        self._stages.append(stage)

    def payload(self, pipe: int) -> str:
        """The JSON of the submit op; raises UsageError for what is missing or does not fit together."""
        if self.submitted:
            raise AlreadySubmitted("Pipeline.submit: this ForwardPass was submitted before; make a new one for each pass")
        if self._tokens is None:
            raise UsageError("Pipeline.submit: the pass has no tokens; call fwd.embed(tokens)")
        geometry = self._geometry
        if geometry is None:
            raise UsageError("Pipeline.submit: the pass has no state; call fwd.state([ws], StateGeometry.folding())")
        sets = len(self._sets)
        if self._cell:
            if self._cell % sets:
                raise UsageError(
                    f"Pipeline.submit: the channel's cell has {self._cell} tokens, which do not divide among {sets} working sets"
                )
            self._rows = [self._cell // sets] * sets
        elif len(self._rows) != sets:
            raise UsageError(f"Pipeline.submit: {len(self._rows)} token lists for {sets} working sets; give embed one list for each")
        if geometry.tokens is not None and (sets, self._rows[0]) != (1, geometry.tokens):
            raise UsageError(
                f"Pipeline.submit: the geometry has a mask or tree for {geometry.tokens} tokens of one working set; "
                f"this pass has {self._rows} tokens"
            )
        if self._stages:
            raise UnsupportedStage(f"Pipeline.submit: this pass has the stage {self._stages[0]}; only the epilogue runs yet, leave it out")
        for ws in self._sets:
            ws._check("Pipeline.submit")
        reads = "null" if self._reads is None else str(self._positions(self._reads))
        chans = [ch.declare() for ch in self._chans]
        end = self._end() if self._end is not None else None
        if end is not None:
            self._outs = (end,)
        return (
            f'{{"pipe":{pipe},"tokens":{self._tokens},"ws":{[ws.id for ws in self._sets]},"geo":{geometry._json},"reads":{reads},'
            f'"prog":{self._prog or "null"},"params":{list(self._params)},"chans":{chans},"outs":{[out.id for out in self._outs]}}}'
        )

    def _positions(self, reads: list[list[int]]) -> list[list[int]]:
        if len(reads) != len(self._rows):
            raise UsageError(f"ForwardPass.read: {len(reads)} lists of positions for {len(self._rows)} token lists; give one for each")
        for positions, n in zip(reads, self._rows, strict=True):
            for k, p in enumerate(positions):
                if not -n <= p < n:
                    raise UsageError(f"ForwardPass.read: position {p} is outside the {n} tokens of this pass; use {-n} to {n - 1}")
                positions[k] = p % n
        return reads

    def accepted(self) -> None:
        """The host took the pass: its outputs will settle."""
        self.submitted = True
        for out in self._outs:
            loop.unawaited[out.id] = out
        self._outs = ()  # an output that nobody keeps is gone, and so are programs and channels
        self._prog, self._chans, self._fed = 0, (), None

    def _open(self, what: str, present: object) -> None:
        if self.submitted:
            raise AlreadySubmitted(f"ForwardPass.{what}: this pass was submitted; make a new ForwardPass for the next one")
        if present is not None:
            raise UsageError(f"ForwardPass.{what}: called twice on one pass; make a new ForwardPass")


class Pipeline:
    """An order of passes: what is submitted to one pipeline runs in order; different pipelines promise each other nothing."""

    __slots__ = ("__weakref__", "_closed", "id")

    def __init__(self) -> None:
        self._closed = True
        self.id = _host.new_id()
        _host.call("pipe.new", f'{{"pipe":{self.id}}}')
        self._closed = False

    def submit(self, fwd: ForwardPass) -> None:
        """Hand the pass over; returns at once. What can be checked now raises here; the engine's errors come by the outputs."""
        if not isinstance(fwd, ForwardPass):
            raise UsageError(f"Pipeline.submit: got {_short(fwd)}; use a ForwardPass")
        if self._closed:
            raise PipelineClosed("Pipeline.submit: this pipeline was closed; make a new one")
        _host.call("submit", fwd.payload(self.id))
        fwd.accepted()

    def stop_when(self, channel: Channel) -> None:
        """End the pipeline at the first true that a pass puts into `channel` (bool, scalar); later passes are skipped whole."""
        if not isinstance(channel, Channel) or channel.dtype != "bool" or channel.shape:
            raise UsageError(f"Pipeline.stop_when: channel is {_short(channel)}; use Channel('bool', ())")
        if self._closed:
            raise PipelineClosed("Pipeline.stop_when: this pipeline was closed; make a new one")
        _host.call("pipe.stop_when", f'{{"pipe":{self.id},"ch":{channel.declare()}}}')

    def close(self) -> None:
        """No more submits; passes already accepted still run and their outputs can be awaited."""
        if not self._closed:
            self._closed = True
            _host.call("pipe.close", f'{{"pipe":{self.id}}}')

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):  # not where it was called with arguments that it does not have
            self.close()
