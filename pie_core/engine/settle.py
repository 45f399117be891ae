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
        failed = work.status_word >= 0 and words[work.status_word] != 0
        if work.embed is not None and not work.ended:
            _learn(work, work.embed, failed)
        elif not failed and any(part.ws.unseen is not None for part in work.parts) and _vouches(work):
            for part in work.parts:
                part.ws.unseen = None
        if failed or work.fault is not None:
            bad.add(work)
    for work, ws, length in step.written:
        if not work.ended and not ws.dropped and work not in bad and ws.failure(work.seq) is None:
            ws.publish(length)


def _learn(work: Pass, embed: ChannelUse, failed: bool) -> None:
    """Which tokens a pass took from a channel, if the host knows the cell: they are its sets' recipes, unless it failed, or one of them is
    the pass's fault. Where it does not know, somebody has to have seen the numbers that came of them (`WorkingSet.unseen`)."""
    ids = embed.channel.seen.pop(embed.take_cell, None)
    if ids is None:
        seen = _vouches(work)
        for part in () if failed else work.parts:
            if seen:
                part.ws.unseen = None
            elif part.ws.unseen is None:
                part.ws.unseen = (work.seq, *part.undo)
        return
    vocab = work.instance.engine.limits.vocab
    if max(ids) >= vocab:
        at = next(k for k, token in enumerate(ids) if token >= vocab)
        token = ids[at] - (1 << 32) if embed.channel.dtype == "i32" and ids[at] >> 31 else ids[at]
        work.fault = PassFailed(
            f"token {at} of the pass, read from a channel, is {token}, which is outside the vocabulary: ids are 0 .. {vocab - 1}",
            token=token,
            vocab=vocab,
        )
    elif not failed:
        at = 0
        for part in work.parts:
            part.ws.recipe.fill(part.undo[0], ids[at : at + part.n].tolist())
            at += part.n


def _vouches(work: Pass) -> bool:
    """Whether a fine status says so of all tokens of its sets: the epilogue looks at read-outs that see each of them."""
    info = work.info
    return info is not None and info.rows >= work.reads and work.plain and all(part.n - 1 in part.reads for part in work.parts)


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
    if work.fault is not None:
        return work.fault
    status = words[work.status_word] if work.status_word >= 0 else 0
    if not status:
        return None
    if status & _NAN_ROW:
        unseen = [part.ws for part in work.parts if part.ws.unseen is not None]
        fed = ", or a token id read from a channel is outside the vocabulary" if unseen or work.embed is not None else ""
        told: EngineError = PassFailed(f"a read-out row of the pass holds NaN: the model's numbers overflowed{fed}", status=status)
        for ws in unseen:
            told = ws.blame_unseen(told, work.seq)
        return told
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
