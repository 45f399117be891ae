"""Settles the passes of a step that was read: decodes results, commits or poisons channels, stops pipelines."""

from __future__ import annotations

from pie_core.engine.errors import EngineError, PassFailed
from pie_core.engine.forward import ChannelUse, Pass
from pie_core.engine.metrics import Metrics
from pie_core.engine.step import Step
from pie_core.engine.values import Value, decode

_NAN_ROW = 1  # status word, bit 0


def settle_passes(passes: list[Pass], results: memoryview, metrics: Metrics) -> None:
    """End the passes of one step in lane order. `results`: the step's results region (bytes)."""
    words = results.cast("B").cast("I")
    for work in passes:
        metrics.passes += 1
        pipe = work.pipe
        if work.ended:  # cancelled, or its instance was closed, while the step was in flight
            metrics.skipped_passes += 1
            if pipe.flying and pipe.flying[0] is work:
                pipe.flying.popleft()
                pipe.retire()
            continue
        pipe.flying.popleft()
        pipe.landed = True
        stop = _says_stop(work, words)
        cause = _fault(work, words)
        if cause is None:
            _commit(work, words)
        else:
            metrics.failed_passes += 1
            work.fail(cause)
        if stop:  # whatever became of the pass: its gate is shut for those in flight behind it
            pipe.stop(cause)
        pipe.retire()


def says_fault(step: Step, results: memoryview) -> bool:
    """Whether the device has failed a pass of a step that was read and not settled."""
    words = results.cast("B").cast("I")
    return any(work.status_word >= 0 and words[work.status_word] for work in step.passes)


def publish_pages(step: Step, results: memoryview) -> None:
    """What the step wrote is on the device: others may share it, unless its pass is gone or not to be trusted. Before settling,
    which runs what waits for the passes."""
    words = results.cast("B").cast("I")
    bad = set()
    for work in step.passes:
        if work.status_word >= 0 and words[work.status_word]:
            bad.add(work)
        elif work.embed is not None and not work.ended:
            _learn(work, work.embed)
    for work, ws, length in step.written:
        if not work.ended and not ws.dropped and work not in bad and ws.failure(work.seq) is None:
            ws.publish(length)


def _learn(work: Pass, embed: ChannelUse) -> None:
    """The recipes of a pass whose tokens came from a channel, if the host knows the cell and the ids are ids."""
    ids = embed.channel.seen.pop(embed.take_cell, None)
    if ids is not None and max(ids) < work.instance.engine.limits.vocab:
        at = 0
        for part in work.parts:
            part.ws.recipe.fill(part.undo[0], ids[at : at + part.n].tolist())
            at += part.n


def _says_stop(work: Pass, words: memoryview) -> bool:
    """Whether the pass put true into its pipeline's stop channel, which the device has seen too."""
    stop = work.pipe.stop_channel
    return stop is not None and any(use.channel is stop and use.copy >= 0 and words[use.copy] for use in work.uses)


def _fault(work: Pass, words: memoryview) -> EngineError | None:
    for use in work.uses:
        if use.channel.poison is not None:
            cause = (use.channel.refusal(use.take_cell) if use.uses_front else None) or (
                use.channel.refusal(use.put_cell) if use.puts else None
            )
            if cause is not None:
                return cause
    for part in work.parts:
        if part.ws.error is not None or part.ws.inherited:
            cause = part.ws.failure(work.seq)
            if cause is not None:
                return cause
    status = words[work.status_word] if work.status_word >= 0 else 0
    if not status:
        return None
    if status & _NAN_ROW:
        fed = ", or a token id read from a channel is outside the vocabulary" if work.embed is not None else ""
        return PassFailed(f"a read-out row of the pass holds NaN: the model's numbers overflowed{fed}", status=status)
    return PassFailed(f"the device reported status {status:#x} for the pass", status=status)


def _commit(work: Pass, words: memoryview) -> None:
    info = work.info
    values: list[Value] = []
    if info is not None:
        for (dtype, shape, size), at in zip(info.outs, work.out_words, strict=True):
            values.append(decode(dtype, shape, words[at : at + size]))
        for use in work.uses:
            if use.copy >= 0:
                channel = use.channel
                if channel.feeds:
                    channel.see(use.put_cell, words[use.copy : use.copy + channel.cell_words].tobytes())
                if not channel.watched:
                    continue
                value = decode(channel.dtype, channel.shape, words[use.copy : use.copy + channel.cell_words])
                channel.deliver(value)
    if values and type(values[0]) is int:
        work.token = values[0]
    work.finish(values, None)
