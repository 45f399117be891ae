"""Inferlets in the sandbox over a real engine and the default model, for tests that check what guides and examples say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from pie_core.engine.loop import Engine
from pie_core.host.process import Process
from pie_core.host.services import ModelFacts, Services
from pie_core.weights import open_gguf
from pie_server.loading import load_text
from pie_server.sandbox import Sandbox
from tests.support.engines import Kind, load_runner
from tests.support.paths import default_model


class Job(NamedTuple):
    """An inferlet's file name, source and input."""

    name: str
    source: str
    input: dict[str, Any]


def run_jobs(kind: Kind, jobs: Sequence[Job]) -> list[Any]:
    """What each inferlet returned, or the exception that ended it; one after another on one engine."""
    return asyncio.run(_run(kind, jobs))


async def _run(kind: Kind, jobs: Sequence[Job]) -> list[Any]:
    path = default_model()
    checkpoint = open_gguf(path)
    text = load_text(checkpoint)
    runner = await load_runner(kind, path, kv_pool_mb=32)
    engine = Engine(runner)
    engine.start()
    limits = runner.limits
    facts = ModelFacts("SmolLM2", limits.vocab, limits.hidden, limits.context, tuple(text.spec["eos"]), limits.pages)
    services, sandbox, results = Services(facts, text.tokenizer, text.chat), Sandbox(spares=1), []
    try:
        for job in jobs:
            process = Process(engine, services, job.name)
            try:
                results.append(await process.run(sandbox.open(process.port), process.request(job.source, job.input)))
            except Exception as error:  # a test shows it
                results.append(error)
    finally:
        sandbox.close()
        await engine.stop()
        runner.close()
        checkpoint.close()
    return results
