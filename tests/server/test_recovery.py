"""After a real loss of the device: what clients and /health are told, that the server comes back, and what is freed before it does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tiny_gguf import write_tiny_gguf

from pie_core.device.protocol import Device, DeviceError, DeviceLost, DeviceOutOfMemory
from pie_core.engine.errors import OutOfPages
from pie_server import live_model, recovery, service
from pie_server.adapters.cpu_module import WasmtimeCpuModule
from pie_server.api.backend import InferletError, Outage
from pie_server.build.cpu_module import cpu_module
from pie_server.config import DeviceName, Settings
from pie_server.logs import configure
from pie_server.recovery import Backoff
from pie_server.serve import bind, serve, url_of
from pie_server.service import Service
from tests.support.lavapipe import LAVAPIPE
from tests.support.paths import default_model

KINDS: list[DeviceName] = ["cpu", "webgpu"]
ASK: Any = [{"role": "user", "content": "Say something long."}]
CONTEXT = 512


@dataclass
class Running:
    """A server in this process."""

    url: str
    service: Service
    client: openai.AsyncOpenAI
    http: aiohttp.ClientSession

    async def health(self) -> tuple[int, dict[str, Any], dict[str, str]]:
        async with self.http.get("/health") as response:
            return response.status, await response.json(), dict(response.headers)

    async def metrics(self) -> dict[str, float]:
        async with self.http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}

    async def ready(self) -> None:
        await until(lambda: self.service.status.state == "ready")

    async def ask(self, tokens: int = 24) -> str:
        answer = await self.client.chat.completions.create(
            model=self.service.card.name, messages=ASK, max_tokens=tokens, temperature=0, logit_bias=NO_END
        )
        return str(answer.choices[0].message.content)


NO_END = {"0": -100, "2": -100}  # the tiny model's stop tokens


async def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(model: Path, device: DeviceName = "cpu", **settings: Any) -> AsyncIterator[Running]:
    """`pie serve` in this process, ready; ended by SIGTERM."""
    chosen = Settings(model=str(model), device=device, **{"kv_pool_mb": 16, "shutdown_s": 0.5, **settings})
    served = Service.from_settings(chosen)
    with bind("127.0.0.1", 0) as sock:
        url = url_of(sock)
        task = asyncio.create_task(serve(sock, served, chosen, lambda _: None))
        try:
            await until(lambda: served.status.state != "loading" or task.done())
            if task.done():
                task.result()
            assert served.status.state == "ready", served.status.error
            async with (
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
                aiohttp.ClientSession(url) as http,
            ):
                yield Running(url, served, client, http)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(20):
                await task


def live(served: Service) -> live_model.LiveModel:
    assert served._live is not None
    return served._live


def device_of(served: Service) -> Device:
    device = live(served).device
    assert device is not None
    return device


def lose(served: Service) -> None:
    """Really: a trap in the cpu module; the end of the WebGPU device at its next write with no step in flight (wgpu-native ends the process
    where a mapped buffer is read that was destroyed)."""
    device: Any = device_of(served)
    engine = live(served).engine
    assert engine is not None
    if device.info.kind == "cpu":
        device._module.call("mem_zero", 1 << 31, 4)  # outside of memory
        return
    write = device.write

    def last_write(*args: Any) -> None:
        if not engine.status()["in_flight"]:
            del device.write
            device.raw.destroy()
        write(*args)

    device.write = last_write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_gguf(path, context=CONTEXT)
    return path


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VK_ICD_FILENAMES", str(LAVAPIPE))
    monkeypatch.setattr("pie_server.loading.cache_root", lambda: tmp_path)
    monkeypatch.setattr(recovery, "FIRST_S", 0.05)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """While it is closed, a rebuild waits where the device would be opened."""
    event = asyncio.Event()
    event.set()
    real = live_model.open_device

    async def opened(*args: Any, **kwargs: Any) -> Device:
        await event.wait()
        return await real(*args, **kwargs)

    monkeypatch.setattr(live_model, "open_device", opened)
    return event


def assert_lost(error: Any) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, "engine_lost")
    assert "the device was lost" in error["message"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_ends_in_the_error_and_a_later_request_gives_the_same_tokens(
    kind: DeviceName, model: Path, gate: asyncio.Event
) -> None:
    async with running(model, kind) as server:
        before = await server.ask()
        name = server.service.card.name
        stream = await server.client.chat.completions.create(
            model=name, messages=ASK, max_tokens=400, temperature=0, logit_bias=NO_END, stream=True
        )
        whole = asyncio.create_task(server.ask(400))
        text, finishes, caught = "", [], None
        gate.clear()
        try:
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                finishes.append(chunk.choices[0].finish_reason)
                if len(finishes) == 4:
                    lose(server.service)
        except openai.APIError as error:
            caught = error
        assert caught is not None and text and set(finishes) == {None}, caught
        assert_lost(caught.body)
        with pytest.raises(openai.InternalServerError) as failed:
            await whole
        assert failed.value.status_code == 503 and int(failed.value.response.headers["Retry-After"]) >= 1
        assert_lost(failed.value.body)

        status, body, headers = await server.health()
        assert (status, body["status"], body["failed_rebuilds"]) == (503, "recovering", 0)
        assert "the device was lost" in body["error"] and body["since"].endswith("Z") and body["down_s"] >= 0
        assert int(headers["Retry-After"]) >= 1
        with pytest.raises(openai.InternalServerError) as refused:
            await server.ask()
        assert_lost(refused.value.body)
        assert "is being rebuilt" in refused.value.message and int(refused.value.response.headers["Retry-After"]) >= 1
        counted = await server.metrics()
        assert (counted["pie_engine_losses_total"], counted["pie_engine_rebuilds_total"]) == (1, 0)

        gate.set()
        await server.ready()
        status, body, _ = await server.health()
        assert (status, body["status"], body["device"]["kind"]) == (200, "ok", kind)
        assert await server.ask() == before
        after = await server.metrics()
        assert (after["pie_engine_losses_total"], after["pie_engine_rebuilds_total"]) == (1, 1)
        assert after["pie_steps_total"] > counted["pie_steps_total"] > 0
        assert after["pie_pages_used"] == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_the_old_one_is_freed_before_the_new_one_is_made(kind: DeviceName, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(model, kind) as server:
        await server.ask()
        engine: Any = live(server.service).engine
        old = {"engine": engine, "runner": engine.runner, "model": engine.runner.model, "device": engine.runner.device}
        lose(server.service)
        watched = {name: weakref.ref(thing) for name, thing in old.items()}
        del engine, old
        alive: list[str] = []
        real = live_model.open_device

        async def opened(*args: Any, **kwargs: Any) -> Device:
            alive.extend(name for name, reference in watched.items() if reference() is not None)
            return await real(*args, **kwargs)

        monkeypatch.setattr(live_model, "open_device", opened)
        with pytest.raises(openai.InternalServerError):
            await server.ask()
        await server.ready()
        assert alive == []


async def test_memory_does_not_grow_by_a_second_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model, whose weights are most of what the process holds."""

    def resident_mb() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    async with running(default_model(), kv_pool_mb=64) as server:
        before = await server.ask(8)
        loaded = resident_mb()
        seen: list[float] = []
        real = live_model.open_device

        async def opened(*args: Any, **kwargs: Any) -> Device:
            seen.append(resident_mb())
            return await real(*args, **kwargs)

        monkeypatch.setattr(live_model, "open_device", opened)
        lose(server.service)
        with pytest.raises(openai.InternalServerError):
            await server.ask(8)
        await server.ready()
        assert await server.ask(8) == before
        assert seen[0] < loaded - 80, "the weights were freed first"
        assert resident_mb() < loaded + 40


KEEP = """
from inferlet.eta import ForwardPass, Pipeline, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    ws, pipe = await WorkingSet.open("kept") if input["open"] else WorkingSet(), Pipeline()
    for ids in [[7]] if input["open"] else [[5, 17, 30, 71], [7]]:
        fwd = ForwardPass()
        fwd.embed(ids)
        fwd.state([ws])
        out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
        pipe.submit(fwd)
        if input["save"]:
            return await ws.save("kept")
    return await out
"""
GOES_ON = """
import asyncio
from inferlet import send
from inferlet.errors import EngineLost
from inferlet.eta import ForwardPass, Pipeline, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    try:
        while True:
            fwd = ForwardPass()
            fwd.embed([1])
            fwd.state([ws])
            out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
            pipe.submit(fwd)
            await out
            send("step")
    except EngineLost:
        await asyncio.sleep(600)
    return "all is well"
"""


def timeline(served: Service, since: int) -> list[int]:
    steps: Any = served.timeline(since)["steps"]
    return [number for number, *_ in steps]


async def test_saved_sets_and_prewarmed_prefixes_are_there_again(model: Path, tmp_path: Path) -> None:
    opening = tmp_path / "start.json"
    opening.write_text(json.dumps([{"role": "system", "content": "You answer in one word. " * 5}]))
    async with running(model, prewarm=[opening]) as server:
        served = server.service
        want = await served.run(KEEP, "keep.py", {"open": False, "save": False})
        await served.run(KEEP, "keep.py", {"open": False, "save": True})
        cached, steps = served.stats()["pages_cached"], timeline(served, -1)
        lose(served)
        with pytest.raises(InferletError) as caught:
            await served.run(KEEP, "keep.py", {"open": False, "save": False})
        assert caught.value.kind == "EngineLost"
        await server.ready()
        assert 0 < served.stats()["pages_cached"] <= cached
        assert served.prewarm_text.endswith("tokens of 1 file")
        assert await served.run(KEEP, "keep.py", {"open": True, "save": False}) == want
        fresh = timeline(served, -1)
        assert fresh == timeline(served, steps[-1]) and fresh[0] > steps[-1], "numbers go on"
        assert timeline(served, fresh[0]) == fresh[1:]


async def test_what_goes_on_without_the_engine_is_ended(model: Path) -> None:
    async with running(model) as server:
        served = server.service

        async def heard(message: Any) -> None:
            if served.status.state == "ready" and device_of(served).info.kind == "cpu" and not lost:
                lost.append(message)
                lose(served)

        lost: list[Any] = []
        with pytest.raises(InferletError, match="the device was lost") as caught:
            await served.run(GOES_ON, "on.py", {}, heard)
        assert caught.value.kind == "EngineLost"
        await server.ready()


SEEDED = """
from inferlet.eta import Channel, ForwardPass, Pipeline, WorkingSet

async def main(input):
    number, fwd, pipe = Channel.of([1]), ForwardPass(), Pipeline()
    fwd.embed([1])
    fwd.state([WorkingSet()])

    def epilogue():
        value = number.take()
        number.put(value)
        return value

    out = fwd.epilogue(epilogue)
    pipe.submit(fwd)
    return await out
"""


class Never:
    """A step whose results do not come: what a driver that is gone leaves behind."""

    def results(self) -> asyncio.Future[bytes]:
        return asyncio.get_running_loop().create_future()

    def times(self) -> None:
        return None


async def test_who_waits_for_a_step_that_never_lands_is_told_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "TELL_S", 0.05)
    monkeypatch.setattr(live_model, "STOP_S", 0.05)
    async with running(model) as server:
        served = server.service
        assert await served.run(SEEDED, "seeded.py", {}) == [1]
        engine = live(served).engine
        assert engine is not None
        monkeypatch.setattr(engine.runner, "submit", lambda batch: Never())
        waiting = asyncio.create_task(served.run(GOES_ON, "on.py", {}))
        await until(lambda: engine.status()["in_flight"])
        device_of(served).close()
        for run in (served.run(SEEDED, "seeded.py", {}), waiting):
            with pytest.raises(InferletError, match="the cpu device is closed") as caught:
                async with asyncio.timeout(20):
                    await run
            assert caught.value.kind == "EngineLost"
        await server.ready()
        assert await served.run(SEEDED, "seeded.py", {}) == [1]


async def test_an_idle_device_is_asked_and_rebuilt(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "WATCH_S", 0.02)
    async with running(model) as server:
        lose(server.service)
        await until(lambda: server.service.stats()["engine_rebuilds_total"] == 1)
        assert await server.ask(2)


async def test_an_author_cannot_make_the_server_rebuild(model: Path) -> None:
    async with running(model) as server:
        source = "class EngineLost(Exception): pass\ndef main(input):\n    raise EngineLost('really')\n"
        with pytest.raises(InferletError, match="really"):
            await server.service.run(source, "liar.py", {})
        assert (await server.health())[0] == 200
        assert (await server.metrics())["pie_engine_losses_total"] == 0


async def test_a_fault_of_the_engine_is_logged_once_with_its_traceback_and_rebuilt(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("json")

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    async with running(model) as server:
        monkeypatch.setattr(live(server.service).engine, "_settle", broken)
        with pytest.raises(openai.InternalServerError, match="the engine failed: ZeroDivisionError: a bug"):
            await server.ask()
        await server.ready()
        assert await server.ask(2)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["event"] for line in lines if "ZeroDivisionError" in line.get("traceback", "")] == ["the step loop failed"]
    lost, rebuilt = ([line for line in lines if line["event"] == event] for event in ("engine_lost", "rebuilt"))
    assert len(lost) == len(rebuilt) == 1
    assert lost[0]["error"] == "the engine failed: ZeroDivisionError: a bug"
    assert (rebuilt[0]["device_kind"], rebuilt[0]["failures"]) == ("cpu", 0)


async def test_rebuilds_that_fail_are_told_and_tried_again_and_a_stop_ends_them(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("json")
    outcomes: list[Exception] = [DeviceError("no adapter"), KeyError("a bug"), KeyError("a bug")]
    real = live_model.open_device

    async def opened(*args: Any, **kwargs: Any) -> Device:
        if outcomes:
            raise outcomes.pop(0)
        return await real(*args, **kwargs)

    async with running(model) as server:
        monkeypatch.setattr(live_model, "open_device", opened)
        lose(server.service)
        with pytest.raises(openai.InternalServerError):
            await server.ask()
        await until(lambda: len(outcomes) < 3)
        await until(lambda: (server.service.status.outage or Outage("", 0, 0)).failures >= 1)
        _, body, _ = await server.health()
        assert body["status"] == "recovering" and body["failed_rebuilds"] >= 1
        assert body["last_failure"] == "no adapter" or "KeyError" in body["last_failure"]
        await server.ready()
        assert server.service.stats()["engine_rebuilds_failed_total"] == 3

        outcomes += [DeviceError("no adapter")] * 100  # the stop comes in the middle of these
        monkeypatch.setattr(recovery, "FIRST_S", 30.0)
        lose(server.service)
        with pytest.raises(openai.InternalServerError) as refused:
            await server.ask()
        await until(lambda: server.service.status.outage is not None and server.service.status.outage.retry_at is not None)
        with pytest.raises(openai.InternalServerError) as refused:
            await server.ask()
        assert int(refused.value.response.headers["Retry-After"]) >= 30
        _, body, _ = await server.health()
        assert 29 < body["next_rebuild_s"] <= 60 and body["progress"]["stage"] == "waiting to rebuild"
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    failed = [line for line in lines if line["event"] == "rebuild_failed"]
    assert [line["error"] for line in failed[:3]] == ["no adapter", "KeyError: 'a bug'", "KeyError: 'a bug'"]
    assert ["traceback" in line for line in failed[:3]] == [False, True, False], "a fault of ours has its traceback, once"
    waits = [line["rebuild_in_s"] for line in lines if line["event"] in ("engine_lost", "rebuild_failed")]
    assert waits[:4] == [0.0, 0.05, 0.1, 0.2] and waits[4] > 30, "a loss right after a rebuild waits longer still"


async def test_auto_says_which_device_it_is_now(model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    configure("json")
    real = live_model.open_device
    kinds: list[DeviceName] = ["webgpu", "cpu"]

    async def opened(wanted: DeviceName, **kwargs: Any) -> Device:
        assert wanted == "auto"
        return await real(kinds.pop(0), **kwargs)

    monkeypatch.setattr(live_model, "open_device", opened)
    async with running(model, "auto") as server:
        lose(server.service)
        with pytest.raises(openai.InternalServerError):
            await server.ask()
        await server.ready()
        assert (await server.health())[1]["device"]["kind"] == "cpu"
        assert await server.ask(2)
    (line,) = [line for line in map(json.loads, capfd.readouterr().err.splitlines()) if line.get("event") == "rebuilt"]
    assert (line["device_kind"], line["before_kind"]) == ("cpu", "webgpu")


@pytest.mark.parametrize(
    ("lives", "waits"),
    [
        ([60.0, 60.0, 3600.0], [0, 0, 0]),
        ([60.0, 1.0, 1.0, 1.0, 59.0], [0, 1, 2, 4, 8]),
        ([60.0, *[0.0] * 7, 61.0, 0.0], [0, 1, 2, 4, 8, 16, 32, 60, 0, 1]),
    ],
)
def test_waits_grow_while_losses_follow_each_other(lives: list[float], waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "FIRST_S", 1.0)
    backoff, found = Backoff(), []
    for lived in lives:
        backoff.lost(lived)
        found.append(backoff.next())
    assert found == waits


def test_the_wait_has_a_bound() -> None:
    backoff = Backoff()
    assert max(backoff.next() for _ in range(5000)) == recovery.MOST_S


async def test_a_fault_of_ours_while_loading_has_its_traceback(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("json")

    async def opened(*args: Any, **kwargs: Any) -> Device:
        raise KeyError("a user's words")

    monkeypatch.setattr(live_model, "open_device", opened)
    served = Service.from_settings(Settings(model=str(model), device="cpu", kv_pool_mb=4))
    await served.load()
    await served.close()
    assert served.status.state == "failed"
    (line,) = [line for line in map(json.loads, capfd.readouterr().err.splitlines()) if "traceback" in line]
    assert line["event"] == "load_fault" and "in opened" in line["traceback"] and line["traceback"].endswith("KeyError")
    assert "a user's words" not in line["traceback"].splitlines()[-1]


async def test_a_fault_of_ours_on_the_devices_thread_has_its_traceback(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configure("json")
    async with running(model) as server:
        device: Any = device_of(server.service)
        device._module.call("nonsense")
        with pytest.raises(openai.InternalServerError, match="the cpu device stopped in nonsense"):
            await server.ask()
        await server.ready()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [line["event"] for line in lines if "traceback" in line] == ["cpu_device_fault"]


async def test_a_stop_in_the_middle_of_a_rebuild_ends_it(model: Path, gate: asyncio.Event) -> None:
    async with running(model) as server:
        gate.clear()
        lose(server.service)
        with pytest.raises(openai.InternalServerError):
            await server.ask()
        await until(lambda: server.service.status.progress.stage == "opening the device")
    assert server.service.status.state == "recovering"  # `running` has waited for the end


async def test_a_prewarm_file_that_no_longer_fits_is_left_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    configure("json")
    opening = tmp_path / "start.json"
    opening.write_text(json.dumps([{"role": "system", "content": "You answer in one word. " * 5}]))

    async def refuse(*_: Any) -> int:
        raise OutOfPages("9 pages are needed, more than all 4")

    async with running(model, prewarm=[opening]) as server:
        monkeypatch.setattr(live_model._Engine, "prewarm", refuse)
        lose(server.service)
        with pytest.raises(openai.InternalServerError):
            await server.ask()
        await server.ready()
        assert server.service.prewarm_text == "0 tokens of 1 file"
    (line,) = [line for line in map(json.loads, capfd.readouterr().err.splitlines()) if line["event"] == "prewarm_failed"]
    assert "start.json: 9 pages are needed" in line["error"] and "--kv-pool-mb" in line["error"]


async def test_memory_that_was_refused_is_told_as_such_once_and_ends_the_device() -> None:
    module = WasmtimeCpuModule(cpu_module().read_bytes())
    module.grow(1 << 40)
    for kind in (DeviceOutOfMemory, DeviceLost, DeviceLost):
        with pytest.raises(DeviceError, match="refused") as caught:
            await module.read(0, 4)
        assert type(caught.value) is kind
    module.close()
