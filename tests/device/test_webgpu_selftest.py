"""The start-up self-test: passes where kernels are right, names the kernel that is wrong."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from pie_core.device import templates
from pie_core.device.protocol import Device, DeviceError, KernelError, KernelSpec, TemplateSpec
from pie_core.device.selftest import SelfTest, self_test
from tests.support.lavapipe import as_gpu, lavapipe


class Tampered:
    """A real device whose kernel `name` is compiled with one parameter changed."""

    def __init__(self, device: Device, name: str, change: dict[str, Any]) -> None:
        self.device, self.name, self.change = device, name, change

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.device, attribute)

    def compile(self, spec: KernelSpec) -> Any:
        if isinstance(spec, TemplateSpec) and spec.name == self.name:
            spec = templates.template(spec.name, **{**dict(spec.params), **self.change})
        return self.device.compile(spec)


@pytest.mark.parametrize("device", [lavapipe, as_gpu])
async def test_passes(device: Any) -> None:
    await self_test(device())


WRONG = [
    ("embed", {"vocab": 5}, "embed"),
    ("rms_norm", {"eps": 0.1}, "rms_norm rows=tokens"),
    ("linear", {"fmt": "f32"}, "linear fmt=f16 m=40"),
    ("linear", {"add": False}, "linear fmt=f16 m=40"),
    ("linear", {"rows": "reads"}, "linear fmt=f32 m=40"),
    ("rope_append", {"style": "half"}, "rope_append .q."),
    ("attention", {"scale": 0.126}, "attention"),
    ("attention", {"kv_heads": 4}, "attention"),
]


@pytest.mark.parametrize(("name", "change", "named"), WRONG)
async def test_names_the_wrong_kernel(name: str, change: dict[str, Any], named: str) -> None:
    wrong: Any = Tampered(lavapipe(), name, change)
    with pytest.raises(DeviceError, match=f"kernel {named} is wrong on webgpu device 'llvmpipe.*use another device"):
        await self_test(wrong)


async def test_formats_that_no_matrix_has_are_left_out_and_no_others() -> None:
    wrong: Any = Tampered(lavapipe(), "linear", {"add": False})  # harms what adds: f16 and q4_1
    for formats, named in (({"f32", "q8_0"}, None), ({"q4_1", "q8_0"}, "linear fmt=q4_1 m=40"), ({"f16"}, "linear fmt=f16 m=40")):
        test = SelfTest(wrong)
        if named is None:
            await test.all(formats)
        else:
            with pytest.raises(DeviceError, match=f"kernel {named} is wrong"):
                await test.all(formats)
        test.close()


class Maskless(Tampered):
    """A real device whose step buffers lose the mask offsets (word 7) of their tokens."""

    def write(self, buffer: Any, offset: int, data: Any) -> None:
        words = list(struct.unpack(f"<{len(data) // 4}I", data)) if buffer.label == "self-test step" else []
        for token in range(words[0] if words else 0):
            words[16 + 8 * token + 7] = 0
        self.device.write(buffer, offset, struct.pack(f"<{len(words)}I", *words) if words else data)


@pytest.mark.parametrize("device", [lavapipe, as_gpu])
async def test_names_attention_that_ignores_masks(device: Any) -> None:
    wrong: Any = Maskless(device(), "", {})
    with pytest.raises(DeviceError, match="kernel attention with masks is wrong on webgpu device 'llvmpipe"):
        await self_test(wrong)


async def test_says_when_a_step_is_too_small() -> None:
    small: Any = Tampered(lavapipe(), "", {})
    small.token_buckets = (1, 2)
    with pytest.raises(DeviceError, match="3 tokens a step; the device takes 2"):
        await self_test(small)


async def test_kernels_that_are_prepared_are_found_and_broken_ones_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = lavapipe()
    spec = templates.template("rms_norm", width=44, eps=1e-5, rows="tokens", bucket=4)  # of no other test
    await device.prepare(spec)
    with monkeypatch.context() as patch:
        patch.setattr(device.kernels, "_pipeline", None)  # compiling now would fail
        assert device.compile(spec).pipeline is device.compile(spec).pipeline is not None
    broken = templates.template("rms_norm", width=52, eps=1e-5, rows="tokens", bucket=4)
    rendered = device.kernels._rendered(broken)
    monkeypatch.setattr(device.kernels, "_rendered", lambda _: replace(rendered, source=rendered.source.replace("fn main", "fn mine")))
    with pytest.raises(KernelError, match="could not compile the template rms_norm"):
        await device.prepare(broken)
