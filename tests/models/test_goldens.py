"""SmolLM2 against fp32 references, on both devices: log-probabilities, argmax, and rows that do not depend on their batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from tests.support.engines import Kind, load_runner
from tests.support.paths import default_model, goldens
from tests.support.rows import Line, all_logits, log_probabilities, step_logits

TOLERANCE = 0.02  # of a log-probability
MARGIN = 0.05  # between the two best: below it, devices may differ in the argmax
PROMPTS = ("completion", "chat_capital", "chat_colors", "chat_math")


def continuation_errors(case: dict[str, Any], logp: np.ndarray) -> Iterable[float]:
    """|difference| of the stored top five at every step of a continuation; fails on a different argmax beyond the margin."""
    start = len(case["prompt_ids"]) - 1
    for step, top in enumerate(case["step_top5"]):
        row = logp[start + step]
        if top[0]["logprob"] - top[1]["logprob"] >= MARGIN:
            assert int(row.argmax()) == case["gen_ids"][step], f"step {step} of {case['prompt_ids'][:5]}"
        yield from (abs(row[t["id"]] - t["logprob"]) for t in top)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["cpu", "webgpu"])
async def test_smollm2_matches_fp32(kind: Kind) -> None:
    runner = await load_runner(kind, default_model(), kv_pool_mb=32)
    try:
        golden = goldens()
        forced = golden["teacher_forced"]
        ids = forced["ids"]
        whole = await all_logits(runner, ids)
        logp = log_probabilities(whole)
        errors = [abs(logp[i, ids[i + 1]] - want) for i, want in enumerate(forced["next_logprobs"])]
        assert max(errors) <= TOLERANCE, f"prefill: {max(errors):.4f} at {int(np.argmax(errors))}"

        # token by token, the decode path
        steps = await all_logits(runner, ids[:20], chunk=1)
        decoded = log_probabilities(steps)
        errors = [abs(decoded[i, ids[i + 1]] - forced["next_logprobs"][i]) for i in range(20)]
        assert max(errors) <= TOLERANCE, f"decode: {max(errors):.4f} at {int(np.argmax(errors))}"

        for name in PROMPTS:
            case = golden[name]
            full = case["prompt_ids"] + case["gen_ids"][:-1]
            worst = max(continuation_errors(case, log_probabilities(await all_logits(runner, full))))
            assert worst <= TOLERANCE, f"{name}: {worst:.4f}"

        await batches_equal_solo_runs(runner, ids)
    finally:
        runner.close()


async def batches_equal_solo_runs(runner: Any, ids: list[int]) -> None:
    """Copies of a sequence agree bit for bit in one step; mixed lengths equal their solo runs, in both orders."""
    copies = await step_logits(runner, [(Line([k]), ids[:6]) for k in range(4)])
    copies = copies.reshape(4, 6, -1)
    assert np.isfinite(copies).all()
    for k in range(1, 4):
        assert np.array_equal(copies[k], copies[0]), f"copy {k} differs"
    lengths = (1, 3, 7, 12)
    solo = {n: await step_logits(runner, [(Line([9]), ids[:n])]) for n in lengths}
    for order in (lengths, lengths[::-1]):
        mixed = await step_logits(runner, [(Line([20 + n]), ids[:n]) for n in order])
        at = 0
        for n in order:
            assert np.abs(mixed[at : at + n] - solo[n]).max() <= 2e-3, f"length {n} in a batch {order}"
            at += n
