"""Says in words what an inferlet's passes wait for, once nothing but the inferlet itself could bring it."""

from __future__ import annotations

from pie_core.engine.errors import EngineError
from pie_core.engine.forward import Pass
from pie_core.engine.instance import Instance


class Deadlock(EngineError):
    """Nothing can bring what the inferlet waits for."""


NOBODY_SENDS = "receive() waits for a message, and whoever started this run sends none"


def blocked(instance: Instance) -> str | None:
    """What the first pass that cannot run waits for; None where no pass waits."""
    entries = [pipe.queue[0] for pipe in instance.active]
    for entry in entries:
        if not isinstance(entry, Pass):
            continue
        for use in entry.uses:
            channel = use.channel
            if use.uses_front and channel.tail <= channel.head:
                return f"a pass waits for a value in the {channel.describe()}, which nothing can put"
            if use.puts and not use.takes and not channel.room():
                cells = f"{channel.capacity} cell{'s are' if channel.capacity > 1 else ' is'} full"
                return f"a pass waits to put into the {channel.describe()}, whose {cells} and which nothing takes"
    return "a pass waits for a working set that is not there yet" if entries else None


def deadlock(awaited: str, why: str | None) -> Deadlock:
    """The error of who awaits `awaited` although it cannot come. `why`: what `blocked` says."""
    return Deadlock(f"{awaited} cannot come: {why or 'no pass, message or timer will bring it'}")
