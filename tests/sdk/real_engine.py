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
    """An inferlet's file name, source and input, and what its client sends before it begins."""

    name: str
    source: str
    input: dict[str, Any]
    messages: tuple[Any, ...] = ()


class Ended(NamedTuple):
    """What an inferlet sent, and its result or the exception that ended it."""

    sent: list[Any]
    result: Any


def run_jobs(kind: Kind, jobs: Sequence[Job]) -> list[Any]:
    """What each inferlet returned, or the exception that ended it; one after another on one engine."""
    return [ended.result for ended in talk_to(kind, jobs)]


def talk_to(kind: Kind, jobs: Sequence[Job]) -> list[Ended]:
    """As `run_jobs`, with what each sent to its client."""
    return asyncio.run(_run(kind, jobs))


async def _run(kind: Kind, jobs: Sequence[Job]) -> list[Ended]:
    path = default_model()
    checkpoint = open_gguf(path)
    text = load_text(checkpoint)
    pool_mb = 400 if kind == "cpu" else 32  # holds the model's whole context, in memory that is not touched
    runner = await load_runner(kind, path, kv_pool_mb=pool_mb)
    engine = Engine(runner)
    engine.start()
    limits = runner.limits
    facts = ModelFacts("SmolLM2", limits.vocab, limits.hidden, limits.context, tuple(text.spec["eos"]), limits.pages)
    services, sandbox, ended = Services(facts, text.tokenizer, text.chat), Sandbox(spares=1), []
    try:
        for job in jobs:
            process = Process(engine, services, job.name)
            for message in job.messages:
                process.deliver(message)
            try:
                result = await process.run(sandbox.open(process.port), process.request(job.source, job.input))
            except Exception as error:  # a test shows it
                result = error
            ended.append(Ended([message async for message in process.messages()], result))
    finally:
        sandbox.close()
        await engine.stop()
        runner.close()
        checkpoint.close()
    return ended
