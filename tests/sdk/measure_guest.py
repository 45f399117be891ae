"""Measures the Python guest in the sandbox: warm start, and the cost of a token without engine and model.

`python -m tests.sdk.measure_guest` prints JSON. "step" is a whole resume in its thread (host glue, the scripted port and the guest's
work for one pass); "guest" is what the guest's own clock sees for building, lowering and submitting a pass, "trace" for the epilogue alone
(trace and encode, or the memo that knows it).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

from pie_server.sandbox import Sandbox
from tests.sdk.scripted_host import MODEL, ScriptedHost

TOKENS = 400
WAIT = "from inferlet import receive\nasync def main(input):\n    await receive()\n"
LOOP = """
import time
from inferlet import model
from inferlet.eta import *
async def main(input):
    ws, pipe, rng, used, n = WorkingSet(), Pipeline(), Channel.counter(7), 0.0, input["n"]
    mu, traces = Channel.of(6.0), []
    def mirostat_step():
        token, then = mirostat(intrinsics.output(0, 'logits'), mu.take(), rng.take(), 3.0)
        mu.put(then)
        return token
    for _ in range(n):
        began = time.perf_counter()
        fwd = ForwardPass()
        fwd.embed([5])
        fwd.state([ws], StateGeometry.folding())
        before = time.perf_counter()
        out = fwd.epilogue(EPILOGUE)
        traces.append(time.perf_counter() - before)
        pipe.submit(fwd)
        used += time.perf_counter() - began
        await out
    return used / n * 1e6, sorted(traces)[n // 2] * 1e6
"""
EPILOGUES = {
    "greedy": "lambda: reduce_argmax(intrinsics.output(0, 'logits'))",
    "gumbel": "lambda: gumbel_max(intrinsics.output(0, 'logits') / 0.7, rng.take())",
    "top-p": "lambda: nucleus_sample(intrinsics.output(0, 'logits') / 0.7, 0.9, rng.take())",
    "mirostat": "mirostat_step",
    "gumbel, traced each time": "lambda: gumbel_max(intrinsics.output(0, 'logits') / 0.7, (lambda: rng)().take())",
}


def start_request(source: str, **input: Any) -> str:
    model = MODEL | {"vocab": 49152, "hidden": 576}
    return json.dumps({"source": source, "name": "measure.py", "input": input, "model": model, "chat": {"prefix": []}})


async def start_times(sandbox: Sandbox, runs: int, pause: float) -> list[float]:
    """Milliseconds from `open` until the first pending answer."""
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        guest = sandbox.open(ScriptedHost())
        await guest.start(start_request(WAIT))
        times.append((time.perf_counter() - began) * 1e3)
        guest.close()
        await asyncio.sleep(pause)
    return times


async def per_token(sandbox: Sandbox, epilogue: str) -> dict[str, float]:
    """Microseconds of a token."""
    host = ScriptedHost()
    guest = sandbox.open(host)
    await guest.start(start_request(LOOP.replace("EPILOGUE", epilogue), n=TOKENS))

    def steps() -> tuple[float, str]:
        answer, began = "", time.perf_counter()
        for _ in range(TOKENS):
            answer = guest._step("resume", json.dumps(host.due()))
        return (time.perf_counter() - began) / TOKENS * 1e6, answer

    step, answer = await sandbox._pool.run(steps)
    guest_us, trace_us = json.loads(answer)["r"]
    return {"step_us": round(step, 1), "guest_us": round(guest_us, 1), "trace_us": round(trace_us, 1)}


async def measure() -> dict[str, Any]:
    """All figures."""
    figures: dict[str, Any] = {}
    for name, spares in (("start_ms", 4), ("start_without_spares_ms", 0)):
        sandbox = Sandbox(spares=spares)
        sandbox.warm()
        times = await start_times(sandbox, 30, 0.05)
        figures[name] = {"median": round(statistics.median(times), 2), "best": round(min(times), 2)}
        if spares:
            figures["per_token"] = {name: await per_token(sandbox, epilogue) for name, epilogue in EPILOGUES.items()}
        sandbox.close()
    return figures


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure()), indent=2))
