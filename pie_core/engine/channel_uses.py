"""What a pass does with channels: checked against roles and the program at submit, and reserved where the host writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pie_core.engine.channel import Channel
from pie_core.engine.errors import InvalidPass, InvalidState
from pie_core.engine.forward import ChannelUse, Pass, PassSpec
from pie_core.engine.pipeline import ForkEntry, Pipeline
from pie_core.engine.program_info import ProgramInfo

if TYPE_CHECKING:
    from pie_core.engine.instance import Instance
    from pie_core.engine.waiting_edit import WaitingEdit


def channel_uses(
    instance: Instance, pipe: Pipeline, spec: PassSpec, info: ProgramInfo | None, params: tuple[int, ...]
) -> tuple[list[ChannelUse], list[ChannelUse], ChannelUse | None]:
    """(each channel once, in the program's order, the one that feeds the tokens). Raises InvalidPass, ChannelError."""
    n_channels, n_params = (len(info.channels), info.params) if info is not None else (0, 0)
    if len(spec.channels) != n_channels or len(params) != n_params:
        raise InvalidPass(
            f"the program has {n_channels} channels and {n_params} parameters, the pass gives {len(spec.channels)} and {len(params)}"
        )
    for k, word in enumerate(params):
        if type(word) is not int or not 0 <= word < 1 << 32:
            raise InvalidPass(f"params[{k}] = {word!r} is not a 32-bit word")
    embed = None
    uses: list[ChannelUse] = []
    lane_uses: list[ChannelUse] = []
    if isinstance(spec.tokens, Channel):
        embed = ChannelUse(spec.tokens, uses_front=True, takes=True, puts=False)
        uses.append(embed)
    if info is not None:
        for k, (channel, chan, effect) in enumerate(zip(spec.channels, info.channels, info.effects, strict=True)):
            if (channel.dtype, channel.shape) != (chan.dtype, chan.shape):
                raise InvalidPass(f"channels[{k}] is a {channel.describe()}, the program expects {chan.dtype}{list(chan.shape)}")
            if channel.host == "writer" and k in info.masks_read:
                raise InvalidPass(
                    f"channels[{k}]: a mask from a host-written channel must be taken, not read, or the next pass would use it again: "
                    "take it and put one for each pass, or keep a constant mask in a seeded channel"
                )
            if embed is not None and channel is embed.channel:
                if effect.uses_cell:
                    raise InvalidPass(f"channels[{k}]: its cell feeds the pass's tokens, so the program may only put into it")
                use, embed.puts = embed, bool(effect.puts)
            elif any(channel is other.channel for other in lane_uses):
                raise InvalidPass(f"channels[{k}]: the same channel twice; a program has one entry for each")
            else:
                use = ChannelUse(channel, uses_front=effect.uses_cell, takes=bool(effect.takes), puts=bool(effect.puts))
                uses.append(use)
            lane_uses.append(use)
    for use in uses:
        _check_role(instance, use, pipe)
    return uses, lane_uses, embed


def _check_role(instance: Instance, use: ChannelUse, pipe: Pipeline) -> None:
    channel = use.channel
    if channel.closed or channel.dropped or channel not in instance.channels:
        raise InvalidState("the channel is closed or was dropped, or belongs to another instance")
    if use.uses_front and (channel.host == "reader" or channel.stops is not None):
        raise InvalidPass(f"a pass cannot take from a {channel.describe()} that the host reads: use a second channel")
    if use.puts and channel.host == "writer":
        raise InvalidPass(f"a pass cannot put into a host-written {channel.describe()}: use a second channel")
    if use.puts and channel.stops not in (None, pipe):
        raise InvalidPass("the channel ends another pipeline (stop_when), and only passes of that one may put into it")
    other = channel.pipe
    if channel.host == "writer" and other is not None and other is not pipe and (other.queue or not (other.closed or other.stopped)):
        raise InvalidPass(f"a host-written {channel.describe()} has one consumer, but two pipelines take from it: use one each")


def reserve_cells(uses: list[ChannelUse]) -> None:
    """Reserve the host-written cells of an accepted pass. Raises ChannelEmpty, and then nothing is reserved."""
    written = [use for use in uses if use.channel.host == "writer" and use.uses_front]
    for use in written:
        use.channel.reserve(take=False)  # raises before anything is taken
    for use in written:
        if use.takes:
            use.channel.reserve(take=True)


def waits_for_its_own(entry: Pass | ForkEntry | WaitingEdit) -> bool:
    """Whether an entry waits for a cell, a room in a ring or a working set that only its own instance can bring."""
    if isinstance(entry, ForkEntry):
        return not entry.ready()
    if not isinstance(entry, Pass):
        return False  # pages: others may bring them
    if any(not part.ws.born or not part.ws.order.may_run(part.ticket) or not part.ws.next_is(entry) for part in entry.parts):
        return True
    for use in entry.uses:
        channel = use.channel
        if channel.poison is not None:
            return False
        if (use.uses_front and channel.tail <= channel.head) or (use.puts and not use.takes and not channel.room()):
            return True
    return False
