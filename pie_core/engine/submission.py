"""How a pass is accepted: everything that can be refused at once is checked, then it takes its place behind what came before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pie_core.engine.channel_uses import channel_uses, reserve_cells
from pie_core.engine.errors import BudgetExceeded, InstanceClosed, InvalidPass, PipelineClosed
from pie_core.engine.forward import ChannelUse, Part, Pass, PassSink, PassSpec, check_parts
from pie_core.engine.program_info import ProgramInfo
from pie_core.engine.recurrent import check_recurrent
from pie_core.engine.runner import RunnerLimits
from pie_core.engine.set_requests import check_owned
from pie_core.engine.set_tokens import pages_for
from pie_core.engine.slack import may_shift

if TYPE_CHECKING:
    from pie_core.engine.instance import Instance
    from pie_core.engine.pipeline import Pipeline
    from pie_core.engine.working_set import WorkingSet


def accept(instance: Instance, pipe: Pipeline, spec: PassSpec, sink: PassSink) -> Pass:
    """Take a pass from its author; `sink` hears of its end. Raises InvalidPass, InvalidState, ChannelError, BudgetExceeded, EngineLost."""
    engine = instance.engine
    engine.check_alive()
    if instance.closed:
        raise InstanceClosed(f"instance {instance.name!r} is closed")
    if pipe.closed:
        raise PipelineClosed("submit: the pipeline is closed; make a new one")
    outstanding = instance.outstanding - len(instance.revivals)  # those that compute a paused set again are nobody's doing
    if outstanding >= instance.limits.outstanding:
        raise BudgetExceeded(f"{outstanding} passes are outstanding, the most is {instance.limits.outstanding}: await some first")
    if engine.states is not None:
        check_recurrent(spec)
    parts = check_parts(spec, engine.limits)
    for part in parts:
        check_owned(instance, part.ws)
    info = engine.program_info(spec.program) if spec.program is not None else None
    params = tuple(spec.params)
    uses, lane_uses, embed = channel_uses(instance, pipe, spec, info, params)
    if info is not None:
        check_rows(info, parts)
        if lane_uses:
            check_results(info, lane_uses, engine.limits)
    work = Pass(
        instance,
        pipe,
        parts=parts,
        geometry=spec.geometry,
        info=info,
        params=params,
        uses=uses,
        lane_uses=lane_uses,
        embed=embed,
        sink=sink,
        seq=engine.accept(),
        accepted_at=engine.now(),
        reuse=instance.reuse and spec.reuse,
    )
    reserve_cells(uses)
    guess = engine.predictor.claim(work, work.accepted_at)
    # nothing below can refuse
    instance.outstanding += 1
    for part in parts:
        part.ws.used_at = work.accepted_at
        if part.ws.pipe is not pipe:
            part.ws.shared = part.ws.shared or part.ws.pipe is not None
            part.ws.pipe = pipe
        if (part.ws.order.early and not goes_ahead(work, part)) or any(fork.pipe is not pipe for fork in part.ws.forks):
            part.ws.order.barrier()
        part.ticket = part.ws.order.enter()
        part.ws.line.append(work)
    if embed is not None:
        embed.channel.feeds = True
    for use in uses:
        channel = use.channel
        channel.users += 1
        if use.puts:
            channel.expect()
        if channel.host == "writer":
            use.ticket = channel.order.enter()
        if channel.pipe is not pipe:
            channel.shared = channel.shared or channel.pipe is not None
            channel.pipe = pipe
    if pipe.stopped:
        work.undo(engine.skipped())
        return work
    if guess is not None:
        engine.adopt(guess, work)
    else:
        instance.enqueue(pipe, work)
    return work


def check_rows(info: ProgramInfo, parts: Sequence[Part]) -> None:
    """Raises InvalidPass where a program and the read-outs of its pass differ."""
    rows = len(parts[0].reads) if len(parts) == 1 else sum(len(p.reads) for p in parts)
    if rows < info.rows:
        raise InvalidPass(f"program: it looks at read-out {info.rows - 1}, the pass has {rows}: read more positions")
    if info.exact is not None and info.exact != rows:
        raise InvalidPass(f"program: outputs() was traced for {info.exact} read-outs, the pass has {rows}: trace it for this pass")


def check_results(info: ProgramInfo, uses: Sequence[ChannelUse], limits: RunnerLimits) -> None:
    """Raises InvalidPass where one step has no room for what a pass brings to the host: outputs, and copies of what it puts into channels
    that the host reads, or that may feed tokens later. What stays on the device, read or put, is of any size."""
    copied = sum(use.channel.cell_words for use in uses if use.puts and use.channel.may_be_read_back(limits.max_tokens))
    if info.result_words + copied > limits.results_words:
        raise InvalidPass(
            f"program: its results take {info.result_words + copied} words, {copied} of them what it puts into channels that the host "
            f"reads; one step has {limits.results_words}: return less, put less into those (a reduction), or split the pass"
        )


def goes_ahead(work: Pass, part: Part) -> bool:
    """Whether a pass may run on a set whose length the host knows only an upper bound of. Where the bound itself might not fit the
    context, the pages or the step, the pass waits for the counts, since it fails by the true length only."""
    ws, instance = part.ws, work.instance
    if not may_shift(ws, work.geometry, len(work.parts)) or ws.shared:
        return False
    engine, owner_pages = instance.engine, min(instance.engine.pool.total, instance.max_pages)
    queued = queued_tokens(work.pipe, ws)
    most = ws.length + queued + part.n
    if most > engine.limits.context or pages_for(most) > owner_pages:
        return False
    if ws.state is not None:  # the buffer is replayed in the step of the pass
        flying = sum(p.n for other in work.pipe.flying for p in other.parts if p.ws is ws)
        if ws.buffered + flying + queued + part.n > engine.limits.max_tokens:
            return False
    if instance.max_pages < engine.pool.total:
        entries = [entry for pipe in instance.active for entry in pipe.queue if isinstance(entry, Pass)]
        growth = sum(pages_for(p.n) + 1 for entry in (*entries, work) for p in entry.parts)
        return instance.pages + instance.set_aside() + growth <= instance.max_pages
    return True


def queued_tokens(pipe: Pipeline, ws: WorkingSet) -> int:
    """Tokens that passes in the queue of `pipe` will add to `ws`."""
    return sum(p.n - p.done for entry in pipe.queue if isinstance(entry, Pass) for p in entry.parts if p.ws is ws)
