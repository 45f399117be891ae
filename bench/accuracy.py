"""SmolLM2 against fp32 references: the greatest difference of a log-probability, and greedy ids where the margin is clear.

The references (tests/goldens) come from transformers in fp32 over the dequantised checkpoint.
"""

from __future__ import annotations

import asyncio
import sys

from bench.report import Report, arguments
from tests.support.engines import load_runner
from tests.support.paths import default_model, goldens
from tests.support.rows import all_logits, log_probabilities

TOLERANCE = 0.02
MARGIN = 0.05
PROMPTS = ("completion", "chat_capital", "chat_colors", "chat_math")


async def run() -> int:
    """The bench; its exit code."""
    args = arguments(__doc__)
    runner = await load_runner(args.device, args.model or default_model(), kv_pool_mb=32)
    report = Report("accuracy", f"{runner.device.info.name} ({args.device})")
    golden = goldens()
    ids, wanted = golden["teacher_forced"]["ids"], golden["teacher_forced"]["next_logprobs"]
    for name, chunk in (("prefill", None), ("decode", 1)):
        logp = log_probabilities(await all_logits(runner, ids, chunk))
        worst = max(abs(logp[i, ids[i + 1]] - want) for i, want in enumerate(wanted))
        report.target(f"teacher-forced, {name}: max difference", float(worst), "<=", TOLERANCE)
    worst, different, clear = 0.0, 0, 0
    for name in PROMPTS:
        case = golden[name]
        logp = log_probabilities(await all_logits(runner, case["prompt_ids"] + case["gen_ids"][:-1]))
        for step, top in enumerate(case["step_top5"]):
            row = logp[len(case["prompt_ids"]) - 1 + step]
            worst = max(worst, *(abs(float(row[t["id"]]) - t["logprob"]) for t in top))
            if top[0]["logprob"] - top[1]["logprob"] >= MARGIN:
                clear += 1
                different += int(row.argmax()) != case["gen_ids"][step]
    report.target("continuations, top five: max difference", worst, "<=", TOLERANCE)
    report.add("greedy steps with a margin of 0.05 or more", clear)
    report.target("of those, with another id", different, "<=", 0)
    runner.close()
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
