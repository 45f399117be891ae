"""GuestPort: `host.call` in the guest's thread. Answers synchronous ops, checks the others and posts them; never blocks, never raises."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from math import prod
from typing import Any

from pie_core.engine.errors import EngineError
from pie_core.engine.geometry import Geometry, check_shape
from pie_core.engine.pass_checks import check_ids, check_reads, check_tokens
from pie_core.engine.runner import RunnerLimits
from pie_core.engine.saved_sets import check_name
from pie_core.engine.working_set import WorkingSet
from pie_core.eta.errors import ProgramError
from pie_core.eta.program import Program
from pie_core.host.again import HARMLESS, Again
from pie_core.host.budget import Budget, Refusal, over
from pie_core.host.ops import OPS, Payload, parse
from pie_core.host.services import Services
from pie_core.host.set_edits import EDITS, readable
from pie_core.host.table import FUTURE, ChannelEntry, PipeEntry, ProgramEntry, SetEntry, Table
from pie_core.text.stream import TextError

Post = tuple[str, Payload]
CLOSED = 1 << 14  # pipelines of which a port knows that they were closed; of those before them it knows nothing
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False).encode
_log = logging.getLogger(__name__)


class GuestPort:
    """One inferlet's way into the host. `call` belongs to the guest's thread; `take_posts`, `carried_out` and the counters named
    `settled_*` belong to the engine's loop. `wake` is called from the guest's thread, once until the posts are taken."""

    def __init__(self, services: Services, limits: RunnerLimits, budget: Budget, wake: Callable[[], None]) -> None:
        self._services = services
        self._limits = limits
        self._budget = budget
        self._wake = wake
        self._woken = False
        self.held = False  # posts wait for the end of the guest's step: whoever drives the guest takes them then, or calls `flush`
        self._posts: deque[Post] = deque()
        self._posted = 0
        self._submitted = 0
        self._futures = 0
        self._sent = 0
        self._logged = 0
        self._closed: OrderedDict[int, None] = OrderedDict()  # ids of closed pipelines, the last ones
        self._again = Again(limits.vocab)
        self.table = Table(budget)
        self.carried_out = 0  # of what was posted
        self.answers = True  # a refusal is heard at the call; else what only the engine knows is told by a later use
        self.working_set: Callable[[int], WorkingSet | None] = lambda key: None  # the engine's, once there is an executor
        self.settled_passes = 0
        self.settled_futures = 0
        self.read_bytes = 0  # of what was sent, how much the client has read

    def call(self, op: str, payload: str) -> str:
        """Run one op. The answer is JSON text, "" for nothing, or {"error": {...}}."""
        try:
            if op == "submit":
                steady = self._again.find(payload)
                if steady is not None:
                    self._accept(steady["outs"])
                    self._post(op, steady)
                    return ""
            fields = parse(op, payload)
            kind = OPS[op].kind
            if kind == "future":
                self._announce(op, fields)
            answer = HANDLERS[op](self, fields)
            if kind != "sync":
                self._post(op, fields)
                if op == "submit":
                    if fields.pop("steady"):
                        self._again.keep(payload, fields)
                elif kind == "posted" and op not in HARMLESS:
                    self._again.forget()
            return answer
        except Refusal as refusal:
            return refusal.json()
        except EngineError as error:
            return Refusal(error.type_name, error.message, error.fields).json()
        except TextError as error:
            return Refusal(type(error).__name__, str(error), {"too_long": True} if error.too_long else None).json()
        except Exception as error:  # the boundary to the guest: whatever is wrong on this side must not trap it
            _log.exception("host op %r failed", op[:40])
            return Refusal("HostError", f"{op[:40]}: the host failed: {type(error).__name__}").json()

    def take_posts(self) -> deque[Post]:
        """What was posted since, in order; `take` from the left until empty. Called on the engine's loop after a wake."""
        self._woken = False
        return self._posts

    def flush(self) -> None:
        """Posts wait no longer, since the step does not end soon. In the guest's thread."""
        self.held = False
        if self._posts and not self._woken:
            self._woken = True
            self._wake()

    def close(self) -> None:
        """Nobody takes posts any more: let go of whom they woke. On the engine's loop; a step that still runs may go on calling."""
        self._wake = _nobody

    def _post(self, op: str, fields: Payload) -> None:
        self._posts.append((op, fields))
        self._posted += 1
        if not self._woken and not self.held:
            self._woken = True
            self._wake()

    def settled_set(self, key: int) -> WorkingSet | None:
        """The engine's working set, where nothing that was posted is still to happen to it."""
        if not self.answers or self.carried_out != self._posted:
            return None
        ws = self.working_set(key)
        return ws if ws is not None and ws.steady() and not ws.dropped else None

    def most(self, entry: SetEntry) -> int | None:
        """Tokens that a set holds at most, which nobody has submitted a pass to since they were counted."""
        return entry.most[0] if entry.most is not None and entry.most[1] == self._submitted else None

    def _announce(self, op: str, fields: Payload) -> None:
        waiting = self._futures - self.settled_futures
        if waiting >= self._budget.futures:
            raise over("futures in flight", waiting, self._budget.futures, "await some first")
        self.table.fresh(op, fields["f"])

    def _future(self, op: str, fields: Payload) -> str:
        self.table.add(op, fields["f"], FUTURE)
        self._futures += 1
        return ""

    # --- answered here

    def _encode(self, p: Payload) -> str:
        return str(self._services.tokenizer.encode(p["text"]))

    def _decode(self, p: Payload) -> str:
        return _dumps(self._services.tokenizer.decode(p["ids"]))

    def _bytes(self, p: Payload) -> str:
        token_bytes = self._services.tokenizer.token_bytes
        return _dumps([token_bytes(token).hex() for token in p["ids"]])

    def _chat_render(self, p: Payload) -> str:
        return str(self._services.chat.encode(p["messages"], cue=p["cue"], tools=p["tools"]))

    def _chat_text(self, p: Payload) -> str:
        return _dumps(self._services.chat.text(p["messages"], cue=p["cue"], tools=p["tools"]))

    def _chat_role(self, p: Payload) -> str:
        return str(self._services.chat.role(p["role"], p["content"]))

    def _chat_cue(self, p: Payload) -> str:
        return str(self._services.chat.cue())

    def _chat_seal(self, p: Payload) -> str:
        return str(self._services.chat.seal())

    def _log(self, p: Payload) -> str:
        self._logged += len(p["text"])
        if self._logged > self._budget.log_bytes:
            raise over("characters printed and logged", self._logged, self._budget.log_bytes, "print() and log() less")
        self._post("log", p)  # in order with what else happens
        return ""

    def _time(self, p: Payload) -> str:
        return f'{{"wall":{time.time()!r},"mono":{time.monotonic()!r}}}'

    def _random(self, p: Payload) -> str:
        return f'"{os.urandom(p["n"]).hex()}"'

    # --- posted

    def _ws_new(self, p: Payload) -> str:
        self.table.add("ws.new", p["ws"], SetEntry(0, (0, self._submitted)))
        return ""

    def _ws_drop(self, p: Payload) -> str:
        self.table.get("ws.drop", p["ws"], SetEntry)
        self.table.remove(p["ws"])
        return ""

    def _ws_fork(self, p: Payload) -> str:
        parent = self.table.get("ws.fork", p["of"], SetEntry)
        if p["pipe"] in self._closed:
            p["pipe"] = None  # what it accepted is accepted: the fork is ordered after all passes of the working set
        if p["pipe"] is not None:
            self.table.get("ws.fork", p["pipe"], PipeEntry)
        most = parent.most
        if (ws := self.settled_set(p["of"])) is not None:
            most = ws.length if p["buffer"] else ws.frozen, self._submitted
        self.table.add("ws.fork", p["ws"], SetEntry(parent.buffered if p["buffer"] else 0, most))
        return ""

    def _pipe_new(self, p: Payload) -> str:
        self.table.add("pipe.new", p["pipe"], PipeEntry())
        return ""

    def _pipe_close(self, p: Payload) -> str:
        self.table.get("pipe.close", p["pipe"], PipeEntry)
        self.table.remove(p["pipe"])
        self._closed[p["pipe"]] = None
        if len(self._closed) > CLOSED:
            self._closed.popitem(last=False)
        return ""

    def _pipe_stop_when(self, p: Payload) -> str:
        pipe, channel = self.table.get("pipe.stop_when", p["pipe"], PipeEntry), self.table.get("pipe.stop_when", p["ch"], ChannelEntry)
        if channel.dtype != "bool" or channel.cell_words != 1:
            raise Refusal("UsageError", f"pipe.stop_when: the channel is {channel.dtype}{list(channel.shape)}; one bool is needed")
        if channel.host == "writer" or channel.puts or channel.put_by_pass:
            raise Refusal("UsageError", "pipe.stop_when: call it before the first submit that puts, on a channel that only passes write")
        if pipe.stops or channel.stops:
            raise Refusal("UsageError", "pipe.stop_when: the pipeline has a stop channel, or the channel ends another pipeline")
        pipe.stops = channel.stops = True
        return ""

    def _ch_new(self, p: Payload) -> str:
        shape = tuple(p["shape"])
        if 0 in shape:
            raise Refusal("UsageError", f"ch.new: shape {list(shape)} has an empty extent")
        words = prod(shape)
        total = self.table.cell_words + words * (p["capacity"] + 1)
        if total > self._budget.cell_words:
            raise over("words of channel cells", total, self._budget.cell_words,
                       "cells have a word an element, rings capacity + 1: use smaller ones, or let go of channels")  # fmt: skip
        if p["seed"] is not None and len(p["seed"]) != words:
            raise Refusal("UsageError", f"ch.new: the seed has {len(p['seed'])} words, a cell of shape {list(shape)} has {words}")
        entry = ChannelEntry(p["dtype"], shape, words, p["capacity"], host=p["host"], seeded=p["seed"] is not None)
        self.table.add("ch.new", p["ch"], entry)
        self.table.cell_words = total
        return ""

    def _ch_drop(self, p: Payload) -> str:
        self.table.get("ch.drop", p["ch"], ChannelEntry)
        self.table.remove(p["ch"])
        return ""

    def _ch_put(self, p: Payload) -> str:
        entry = self._written("ch.put", p)
        held = entry.puts - entry.consumed
        if held >= entry.capacity:
            raise Refusal("ChannelFull", f"ch.put: the ring holds {held} of {entry.capacity} cells; await a pass that takes one",
                          {"capacity": entry.capacity})  # fmt: skip
        entry.puts += 1
        return ""

    def _ch_set(self, p: Payload) -> str:
        entry = self._written("ch.set", p)
        if entry.puts <= entry.reserved - entry.returned:
            entry.puts += 1
        return ""

    def _written(self, op: str, p: Payload) -> ChannelEntry:
        entry = self.table.get(op, p["ch"], ChannelEntry)
        if entry.host != "writer":
            raise Refusal("ChannelError", f'{op}: the channel is not host-written; create it with host="writer"')
        if len(p["words"]) != entry.cell_words:
            raise Refusal("ChannelError", f"{op}: {len(p['words'])} words for a cell of {entry.cell_words}")
        return entry

    def _program(self, p: Payload) -> str:
        self.table.fresh("program", p["prog"])
        try:
            program = Program.parse(p["text"])
        except ProgramError as error:
            raise Refusal("ProgramError", str(error)) from None
        limits = self._limits
        for name, width in (("logits", limits.vocab), ("hidden", limits.hidden)):
            got = program.width(name)
            if got not in (None, width):
                raise Refusal("ProgramError", f"program: output {name!r} has {got} elements, this model's has {width}")
        self.table.add("program", p["prog"], ProgramEntry(program))
        p["program"] = program  # verified here, so the engine need not parse it again
        return ""

    def _program_drop(self, p: Payload) -> str:
        self.table.get("program.drop", p["prog"], ProgramEntry)
        self.table.remove(p["prog"])
        return ""

    def _submit(self, p: Payload) -> str:
        table = self.table
        if p["pipe"] in self._closed:
            raise Refusal("PipelineClosed", "submit: the pipeline is closed; make a new one")
        table.get("submit", p["pipe"], PipeEntry)
        self._room_for_a_pass()
        sets = [table.get("submit", key, SetEntry) for key in p["ws"]]
        if not sets or len(set(p["ws"])) != len(sets):
            raise Refusal("InvalidPass", "submit: ws must name at least one working set, each once")
        p["geo"] = geometry = Geometry.check(**p["geo"])
        tokens: Any = p["tokens"]
        if isinstance(tokens, dict):
            tokens = table.get("submit", tokens["ch"], ChannelEntry)
        _, counts = check_tokens(tokens, len(sets), self._limits)
        check_shape(geometry, counts)
        reads = check_reads(p["reads"], counts, p["prog"] is not None, self._limits)
        uses = self._channel_uses(p, tokens, sum(map(len, reads)))
        self._accept(p["outs"])
        # nothing below refuses
        for entry, takes in uses:
            entry.reserved += takes
        p["written"] = [entry for entry, takes in uses if takes]  # here: by the time that it is carried out, they may have been dropped
        p["steady"] = not uses and geometry.mode == "folding"
        if geometry.mode == "buffered":
            for held, count in zip(sets, counts, strict=True):
                if held.buffered is not None:
                    held.buffered += count
        return ""

    def _accept(self, outs: list[int]) -> None:
        """Enter the futures of a pass that is right otherwise. Refuses a used-up budget and ids that are taken."""
        self._room_for_a_pass()
        table = self.table
        for key in outs:
            table.fresh("submit", key)
        if len(outs) > 1 and len(set(outs)) != len(outs):
            raise Refusal("UsageError", "submit: outs names a future twice")
        for key in outs:
            table.add("submit", key, FUTURE)
        self._submitted += 1

    def _room_for_a_pass(self) -> None:
        in_flight = self._submitted - self.settled_passes
        if in_flight >= self._budget.outstanding:
            raise over("passes outstanding", in_flight, self._budget.outstanding, "await some first")

    def _channel_uses(self, p: Payload, tokens: Any, rows: int) -> list[tuple[ChannelEntry, int]]:
        """(host-written channel, cells taken). Refuses what does not fit the program, and a cell that is not there yet."""
        table = self.table
        channels = [table.get("submit", key, ChannelEntry) for key in p["chans"]]
        uses: list[tuple[ChannelEntry, int]] = []
        if isinstance(tokens, ChannelEntry):
            uses.append((tokens, 1))
        program = table.get("submit", p["prog"], ProgramEntry).program if p["prog"] is not None else None
        wanted = (len(program.chans), len(program.params), len(program.outs)) if program is not None else (0, 0, 0)
        outs = len(p["outs"])
        given = (len(channels), len(p["params"]), outs if wanted[2] else max(0, outs - 1))  # of none, one may tell the end of the pass
        if wanted != given:
            need, got = ("{} channels, {} parameters and {} outputs".format(*counts) for counts in (wanted, given))
            raise Refusal("InvalidPass", f"submit: the program has {need}; chans, params and outs give {got}")
        if program is not None:
            if rows < program.reads:
                raise Refusal("InvalidPass", f"submit: the program looks at {program.reads} read-outs, the pass has {rows}: read more")
            if program.rows is not None and program.rows != rows:
                raise Refusal("InvalidPass", f"submit: outputs() was traced for {program.rows} read-outs, the pass has {rows}")
            for k, (entry, chan, effect) in enumerate(zip(channels, program.chans, program.effects, strict=True)):
                if (entry.dtype, entry.shape) != (chan.dtype, tuple(chan.shape)):
                    got = f"{entry.dtype}{list(entry.shape)}"
                    raise Refusal("InvalidPass", f"submit: chans[{k}] is {got}, the program expects {chan.dtype}{list(chan.shape)}")
                if effect.uses_cell and (entry.host == "reader" or entry.stops):
                    raise Refusal("InvalidPass", f"submit: chans[{k}]: a pass cannot take from a channel that the host reads")
                if effect.puts:
                    if entry.host == "writer":
                        raise Refusal("InvalidPass", f"submit: chans[{k}]: a pass cannot put into a host-written channel")
                    entry.put_by_pass = True
                if effect.uses_cell:
                    uses.append((entry, effect.takes))
        written = [(entry, takes) for entry, takes in uses if entry.host == "writer"]
        for entry, _ in written:
            if entry.puts <= entry.reserved - entry.returned:
                raise Refusal("ChannelEmpty", "submit: every cell put so far into the host-written channel is spoken for: put one first")
        return written

    def _send(self, p: Payload) -> str:
        size = len(_dumps(p["value"]))
        unread = self._sent + size - self.read_bytes
        if unread > self._budget.unread_bytes:
            raise over("bytes sent and not read", unread, self._budget.unread_bytes, "the client reads too slowly: send less")
        if self._sent + size > self._budget.output_bytes:
            raise over("bytes sent", self._sent + size, self._budget.output_bytes, "send less")
        self._sent += size
        p["size"] = size
        return ""

    # --- futures

    def _ch_take(self, p: Payload) -> str:
        return self._receive_from("ch.take", p)

    def _ch_read(self, p: Payload) -> str:
        return self._receive_from("ch.read", p)

    def _receive_from(self, op: str, p: Payload) -> str:
        readable(self.table, op, p["ch"])
        return self._future(op, p)

    def _sleep(self, p: Payload) -> str:
        return self._future("sleep", p)

    def _receive(self, p: Payload) -> str:
        return self._future("receive", p)

    def _ws_length(self, p: Payload) -> str:
        self.table.get("ws.length", p["ws"], SetEntry)
        return self._future("ws.length", p)

    def _ws_cached(self, p: Payload) -> str:
        self.table.get("ws.cached", p["ws"], SetEntry)
        return self._future("ws.cached", p)

    def _prewarm(self, p: Payload) -> str:
        if p["ids"]:
            check_ids("prewarm: ids", p["ids"], self._limits.vocab)
        self._room_for_a_pass()
        self._submitted += 1
        return self._future("prewarm", p)

    def _ws_save(self, p: Payload) -> str:
        self.table.get("ws.save", p["ws"], SetEntry)
        check_name(p["name"])
        return self._future("ws.save", p)

    def _ws_open(self, p: Payload) -> str:
        check_name(p["name"])
        if p["f"] == p["ws"]:
            raise Refusal("UsageError", f"ws.open: ws and f are both {p['f']}; ids are unique within the instance")
        self.table.add("ws.open", p["ws"], SetEntry(None))
        return self._future("ws.open", p)


def _nobody() -> None:
    """Wakes nobody."""


# By op, for all ports: functions, since bound methods that a port kept would be a cycle for each inferlet.
HANDLERS: dict[str, Callable[[GuestPort, Payload], str]] = {
    name: handler for name in OPS if (handler := getattr(GuestPort, f"_{name.replace('.', '_')}", None)) is not None
} | EDITS
