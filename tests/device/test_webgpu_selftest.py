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
    """A real device whose kernel `name` is compiled with one parameter changed, or as another `template`."""

    def __init__(self, device: Device, name: str, change: dict[str, Any]) -> None:
        self.device, self.name, self.change = device, name, change

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.device, attribute)

    def compile(self, spec: KernelSpec) -> Any:
        if isinstance(spec, TemplateSpec) and spec.name == self.name:
            params = {**dict(spec.params), **self.change}
            spec = templates.template(params.pop("template", spec.name), **params)
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
    ("shift", {"template": "gate"}, "shift"),
    ("gate", {"template": "shift"}, "gate"),
    ("gate", {"bucket": 3}, "gate"),
    ("recur", {"offset": 8}, "recur"),
    ("recur", {"width": 64}, "recur"),
    ("recur", {"bucket": 5}, "recur"),
    ("move_slots", {"width": 68}, "move_slots .k."),
    ("move_slots", {"bucket": 7}, "move_slots .k."),
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


# Faults that a driver may build into kernels of tables and state: (template, text, text instead, the check that finds it)
FAULTS = [
    ("shift", "select(arena[word], 0u, step[at + 1u] != 0u)", "arena[word]", "shift"),
    ("shift", "select(arena[word], 0u, step[at + 1u] != 0u)", "0u", "shift"),
    ("shift", "if (cell < words)", "if (true)", "shift"),
    ("shift", "clamp(bitcast<i32>(arena[cell]), 0i, i32(limit))", "bitcast<i32>(arena[cell])", "shift"),
    ("shift", "u32(clamp(bitcast<i32>(arena[cell]), 0i, i32(limit)))", "min(arena[cell], limit)", "shift"),
    ("shift", "u32(clamp(bitcast<i32>(arena[cell]), 0i, i32(limit)))", "u32(max(bitcast<i32>(arena[cell]), 0i))", "shift"),
    ("shift", "arena[word] = total;", "", "shift"),
    ("shift", "k < early", "false", "shift"),
    ("shift", "k < early", "true", "shift"),
    ("shift", " - known", "", "shift"),
    ("shift", "let first = step[at + 5u]", "let first = 0u", "shift"),
    ("shift", "k < count &&", "k <= count &&", "shift"),
    ("shift", "k < count &&", "k < 1u &&", "shift"),
    ("shift", "if (step[row + 3u] != NONE)", "if (true)", "shift"),
    ("shift", "pos / PAGE", "1u", "shift"),
    ("shift", "pos % PAGE", "pos", "shift"),
    ("shift", "step[row + 2u] = pos;", "", "shift"),
    ("gate", "arena[word] |=", "arena[word] =", "gate"),
    ("gate", "if (cell < words) { arena[word] |= u32(arena[cell] != 0u); }", "", "gate"),
    ("gate", "if (arena[word] == 0u)", "if (false)", "gate"),
    ("gate", "if (arena[word] == 0u)", "if (true)", "gate"),
    ("gate", "k < count &&", "k < 1u &&", "gate"),
    ("gate", "k < count &&", "k <= count &&", "gate"),
    ("gate", "step[place] = NONE", "step[place] = 0u", "gate"),
    ("gate", " && open == 0u", "", "gate"),
    ("gate", "step[10] == 0u", "true", "gate, all shut, 1 rows without one"),
    ("gate", "step[0] = 0u;", "", "gate, all shut, 0 rows without one"),
    ("gate", "step[1] = 0u;", "", "gate, all shut, 0 rows without one"),
    ("recur", "if (run > 0u)", "if (false)", "recur"),
    ("recur", "var end = n; // behind the last run", "var end = 0u;", "recur"),
    ("recur", "if (t - begin == limit) { h = kept; }", "", "recur"),
    ("recur", "if (t - begin + 1u == folded) { kept = h; }", "", "recur"),
    ("recur", "if (t - begin + 1u == folded) { kept = h; }", "kept = h;", "recur"),
    ("recur", "if (!bad && cell != NONE)", "if (false)", "recur"),
    ("recur", "u32(clamp(bitcast<i32>(arena[cell]), 0, i32(limit)))", "u32(max(bitcast<i32>(arena[cell]), 0))", "recur"),
    ("recur", "u32(clamp(bitcast<i32>(arena[cell]), 0, i32(limit)))", "min(arena[cell], limit)", "recur"),
    ("recur", "if (start != NONE) { h = state", "if (false) { h = state", "recur"),
    ("recur", "h = state[start * 76u + 4u + i]", "h = state[start * 76u + i]", "recur"),
    ("recur", "state[place * 76u + 4u + i] = kept", "state[place * 76u + 4u + i] = h", "recur"),
    ("recur", "state[place * 76u + 4u + i] = kept", "state[place * 76u + i] = kept", "recur"),
    ("recur", "state[place * 76u + 4u + i] = kept", "state[start * 76u + 4u + i] = kept", "recur"),
    ("recur", "if (place != NONE)", "if (false)", "recur"),
    ("recur", "let a = decay[i];", "let a = decay[0];", "recur"),
    ("recur", "let b = gain[i];", "let b = gain[0];", "recur"),
    ("recur", "bitcast<f32>(0x7FC00000u | (n & 0u))", "0.0", "recur"),
    ("recur", "begin > end || end > n ||", "begin > end ||", "recur with malformed runs"),
    ("recur", "limit > end - begin ||", "", "recur with malformed runs"),
    ("recur", "(start != NONE && start >= slots) ||", "", "recur with malformed runs"),
    ("recur", "(place != NONE && place >= slots)", "false", "recur with malformed runs"),
    ("recur", "(cell != NONE && cell >= arrayLength(&arena))", "false", "recur with malformed runs"),
    ("recur", "t < min(end, n)", "t < end", "recur with malformed runs"),
    ("move_slots", "let source = token_word(t, 0u)", "let source = token_word(n - 1u - t, 0u)", "move_slots .k."),
    ("move_slots", "let place = token_word(t, 3u)", "let place = token_word(t, 0u)", "move_slots .k."),
    ("move_slots", "min(step[0], 64u)", "step[0] + 1u", "move_slots .k."),
    (
        "move_slots",
        "if (source >= slots || place >= slots) { continue; }",
        "if (source >= slots || place >= slots) { break; }",
        "move_slots .k.",
    ),
    ("move_slots", "if (source >= slots || place >= slots)", "if (place >= slots)", "move_slots .k."),
    ("move_slots", "if (cache == 0u)", "if (false)", "move_slots .k."),
    ("move_slots", "if (cache == 1u)", "if (false)", "move_slots .v."),
    ("move_slots", "= v_cache[source * 34u + column]", "= v_cache[place * 34u + column]", "move_slots .v."),
    ("move_slots", "if (cache == 1u)", "if (cache == 1u && gid.x < 64u)", "move_slots .v."),
]
GPU_FAULTS = [
    ("gate", "atomicOr(&live, open);", "if (lid == 0u) { atomicOr(&live, open); }", "gate"),  # a lost vote of another invocation
    ("gate", "lid; g < gates", "0u; g < min(gates, 1u)", "gate"),
    ("shift", "lid; s < shifts", "0u; s < min(shifts, 1u)", "shift"),
]


class Faulty(Tampered):
    """A real device that compiles another text than that of the template `name`."""

    def __init__(self, device: Device, name: str, text: str, instead: str) -> None:
        super().__init__(device, name, {})
        self.text, self.instead = text, instead

    def compile(self, spec: KernelSpec) -> Any:
        if not isinstance(spec, TemplateSpec) or spec.name != self.name:
            return self.device.compile(spec)
        kernels: Any = self.device.kernels  # type: ignore[attr-defined]
        rendered = kernels._rendered(spec)
        assert rendered.source.count(self.text) == 1, rendered.source
        source = rendered.source.replace(self.text, self.instead)
        return kernels._build(spec, source, rendered.bindings, rendered.grid, "faulty template")


@pytest.mark.parametrize(("open_device", "name", "text", "instead", "named"), [
    *((lavapipe, *fault) for fault in FAULTS), *((as_gpu, *fault) for fault in GPU_FAULTS),
])  # fmt: skip
async def test_every_part_of_what_tables_say_is_looked_at(open_device: Any, name: str, text: str, instead: str, named: str) -> None:
    test = SelfTest(Faulty(open_device(), name, text, instead))  # type: ignore[arg-type]
    ask = {"recur": test.recurrence, "move_slots": test.moves}.get(name, test.tables)
    try:
        with pytest.raises(DeviceError, match=f"kernel {named} is wrong on webgpu device 'llvmpipe.*use another device"):
            await ask()
    finally:
        test.close()


async def test_says_when_a_step_is_too_small() -> None:
    small: Any = Tampered(lavapipe(), "", {})
    small.token_buckets = (1, 4)
    with pytest.raises(DeviceError, match="7 tokens a step; the device takes 4"):
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
