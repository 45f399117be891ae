"""Runs in the page's Python: the cases of conformance.json on a device that `pie_web` opens, and its self-test with a tampered kernel."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import time
import zlib
from array import array
from collections.abc import Mapping
from typing import Any

import kernels_wgsl
from pie_core.device.protocol import Buffer, Device, DeviceError, EpilogueSpec, KernelSpec, Launch, MapSpec, TemplateSpec
from pie_core.device.templates import template
from pie_core.eta.program import Program
from pie_web.adapter import open_device
from pie_web.selftest import AskedTest
from pie_web.turns import Turns

COSTLY = ("attention", "linear")  # templates


class Runner:
    """Cases on one device."""

    def __init__(self, device: Device, blobs: Mapping[str, str]) -> None:
        self.device = device
        self.blobs = blobs

    def data(self, name: str) -> bytes:
        return zlib.decompress(base64.b64decode(self.blobs[name]))

    async def compile_ahead(self, cases: list[dict[str, Any]]) -> None:
        """Compile the costly kernels at once, on every core, as the page does those of its self-test: SwiftShader takes up to two seconds
        for each. The others are compiled where they are first needed, and the cpu device compiles none. Raises KernelError."""
        prepare = getattr(self.device, "prepare", None)
        if prepare is None:
            return
        adapter = "software" if self.device.info.software else "gpu"
        specs = [spec(case) for case in cases if case.get("template") in COSTLY]
        by_text = {
            kernels_wgsl.render(each.name, dict(each.params), adapter).source: each for each in specs if isinstance(each, TemplateSpec)
        }
        await asyncio.gather(*[prepare(each) for each in by_text.values()])

    async def run(self, case: dict[str, Any]) -> list[str]:
        """What is wrong, one line a check."""
        device = self.device
        buffers: dict[str, Buffer] = {}
        for name, given in case["buffers"].items():
            data = self.data(given["blob"])
            buffers[name] = device.create_buffer(len(data), name)
            device.write(buffers[name], 0, data)
        bindings = dict(buffers)
        made = list(buffers.values())
        if "weight" in case:
            w = case["weight"]
            weight = device.upload(w["fmt"], w["rows"], w["cols"], [memoryview(self.data(w["blob"]))], "weight")
            bindings |= {"quants": weight.quants, "scales": weight.scales or weight.quants}
            made += [weight.quants, *([weight.scales] if weight.scales else [])]
        plan = device.compile_plan([Launch(device.compile(spec(case)), bindings)])
        plan.run(**({"lane_offset": case["lane_offset"], "lanes": case["lanes"]} if "epilogue" in case else {}))
        wrong = []
        for check in case["checks"]:
            want = self.data(check["want"])
            got = await device.read(buffers[check["buffer"]], 4 * check["at"], len(want))
            fault = compare(got, want, check, device.info.kind)
            if fault:
                wrong.append(f"{check['buffer']} from word {check['at']}: {fault}")
        for buffer in made:
            buffer.destroy()
        return wrong


def spec(case: dict[str, Any]) -> KernelSpec:
    """The kernel of a case."""
    if "template" in case:
        return template(case["template"], **case["params"])
    if "epilogue" in case:
        return EpilogueSpec(Program.parse(case["epilogue"]))
    m = case["map"]
    return MapSpec(Program.parse(m["program"]), m["n"], tuple((a, b) for a, b in m["inputs"]), m["rows"], m["bucket"])


def compare(got: bytes, want: bytes, check: dict[str, Any], device: str) -> str | None:
    """What differs first, and how often; None when nothing does."""
    if got == want:
        return None
    code = "f" if check["kind"] == "f32" else "I"
    pairs = list(zip(array(code, got), array(code, want), strict=True))
    atol, rtol = check["atol"][device], check["rtol"]

    def same(a: float, b: float) -> bool:
        return a == b or (code == "f" and (abs(a - b) <= atol + rtol * abs(b) or (math.isnan(a) and math.isnan(b))))

    wrong = [(i, a, b) for i, (a, b) in enumerate(pairs) if not same(a, b)]
    if not wrong:
        return None
    i, a, b = wrong[0]
    return f"{len(wrong)} of {len(pairs)} differ, first [{i}] is {a!r}, want {b!r} (atol {atol:.2g}, rtol {rtol:.2g})"


class Tampered:
    """A device whose kernel `name` is compiled with one parameter changed, or as another `template`."""

    def __init__(self, device: Device, name: str, change: dict[str, Any]) -> None:
        self.device, self.name, self.change = device, name, change

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.device, attribute)

    def compile(self, spec: Any) -> Any:
        if getattr(spec, "name", None) == self.name:
            params = {**dict(spec.params), **self.change}
            spec = template(params.pop("template", spec.name), **params)
        return self.device.compile(spec)


async def asked_test(device: Any) -> None:
    """The page's self-test, with what boot.py does in between left out. Raises DeviceError."""
    test = AskedTest(device)
    try:
        await test.ask()
        await test.verdict()
    finally:
        test.close()


async def late_read(device: Device, opened: Any) -> list[float]:
    """[ms that passed between a read-back's call and its await, the device's busy ms meanwhile and until it was here]."""
    buffer = device.create_buffer(64, "late")
    before = opened.busy_ms
    began = time.perf_counter()
    read = device.read(buffer, 0, 4)
    while time.perf_counter() - began < 0.05:
        pass
    passed = 1e3 * (time.perf_counter() - began)
    await read
    buffer.destroy()
    return [passed, opened.busy_ms - before]


TURNS: list[Turns] = []  # of the worker's loop: taken over once, by the first run


def _turns(host: Any) -> Turns:
    TURNS.append(Turns(host.ticker))
    return TURNS[0]


async def run(host: Any, cases: str, tampered: str) -> str:
    """JSON {device, wrong: {title: lines}, selftest: seconds or message, refused: [message of each tampered kernel]}."""
    opened = await open_device(host, TURNS[0] if TURNS else _turns(host))
    if opened is None:
        return json.dumps({"failed": f"{host.failure.name}: {host.failure.message}"})
    device: Any = opened.device
    document = json.loads(cases)
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    runner = Runner(device, document["blobs"])
    await runner.compile_ahead(document["cases"])
    wrong: dict[str, list[str]] = {}
    for case in document["cases"]:
        try:
            lines = await runner.run(case)
        except DeviceError as error:
            lines = [f"{type(error).__name__}: {error}"]
        if lines:
            wrong[case["title"]] = lines
        seconds[case["title"]] = time.perf_counter() - start - sum(seconds.values())
    refused = []
    for name, change in [(None, {}), *json.loads(tampered)]:
        try:
            await asked_test(device if name is None else Tampered(device, name, change))
            refused.append("")
            seconds["self-test"] = time.perf_counter() - start - sum(seconds.values())
        except DeviceError as error:
            refused.append(str(error))
    late = await late_read(device, opened)
    info = device.info
    facts = {"kind": info.kind, "name": info.name, "software": info.software, "why": opened.why}
    device.close()
    found = {"device": facts, "cases": len(document["cases"]), "wrong": wrong, "refused": refused, "seconds": seconds, "late": late}
    return json.dumps(found)
