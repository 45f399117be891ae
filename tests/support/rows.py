"""Runs token rows straight on a ModelRunner, without the engine, and reads all their logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pie_core.device.protocol import NONE, PAGE_TOKENS
from pie_core.engine.model_runner import ModelRunner
from pie_core.engine.runner import StepBatch

Logits = npt.NDArray[np.float32]


@dataclass
class Line:
    """A sequence on given pages; `length` positions are in the cache."""

    pages: list[int]
    length: int = 0


def batch_of(parts: Sequence[tuple[Line, Sequence[int]]]) -> StepBatch:
    """One step that appends ids to each sequence and reads out every row."""
    batch = StepBatch()
    for seq, ids in parts:
        table = len(batch.tables)
        batch.tables.extend(seq.pages)
        for i, token in enumerate(ids):
            pos = seq.length + i
            slot = seq.pages[pos // PAGE_TOKENS] * PAGE_TOKENS + pos % PAGE_TOKENS
            batch.reads.append(batch.n_tokens)
            batch.rows.extend((token, NONE, pos, slot, table, 0, 0, 0))
        seq.length += len(ids)
    batch.n_seqs = len(parts)
    return batch


async def step_logits(runner: ModelRunner, parts: Sequence[tuple[Line, Sequence[int]]]) -> Logits:
    """Logits [rows, vocab] of one step."""
    batch = batch_of(parts)
    handle = runner.submit(batch)
    vocab = runner.limits.vocab
    data: Any = await runner.device.read(runner.model.logits, 0, 4 * len(batch.reads) * vocab)
    await handle.results()
    return np.frombuffer(data, np.float32).reshape(-1, vocab).copy()


async def all_logits(runner: ModelRunner, ids: Sequence[int], chunk: int | None = None, first_page: int = 0) -> Logits:
    """Logits [len(ids), vocab] of one sequence, `chunk` tokens a step (default: as many as fit)."""
    chunk = chunk or min(runner.limits.max_tokens, runner.limits.max_reads)
    seq = Line(list(range(first_page, first_page + -(-len(ids) // PAGE_TOKENS))))
    return np.concatenate([await step_logits(runner, [(seq, ids[at : at + chunk])]) for at in range(0, len(ids), chunk)])


def log_probabilities(logits: Logits) -> npt.NDArray[np.float64]:
    """Row-wise log-softmax in float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))
