"""The start-up self-test on the cpu device: names the kernel of moved state that is wrong; what it compares, and how."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from pie_core.device import selftest_state
from pie_core.device.cpu import CpuDevice
from pie_core.device.protocol import NONE, DeviceError, TemplateSpec
from pie_core.device.selftest import SelfTest, self_test
from pie_core.device.templates import TEMPLATES, template
from pie_server.adapters.cpu_module import open_cpu_device


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    opened = open_cpu_device()
    yield opened
    opened.close()


class Tampered:
    """A real device whose kernel `name` is compiled with one parameter changed."""

    def __init__(self, device: CpuDevice, name: str, change: dict[str, Any]) -> None:
        self.device, self.name, self.change = device, name, change

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.device, attribute)

    def compile(self, spec: TemplateSpec) -> Any:
        return self.device.compile(template(spec.name, **{**dict(spec.params), **self.change}) if spec.name == self.name else spec)


WRONG = [
    ("recur", {"offset": 8}, "recur"),
    ("recur", {"width": 64}, "recur"),
    ("recur", {"stride": 72}, "recur"),
    ("move_slots", {"width": 68}, "move_slots .k."),
]


@pytest.mark.parametrize(("name", "change", "named"), WRONG)
async def test_names_the_wrong_kernel(device: CpuDevice, name: str, change: dict[str, Any], named: str) -> None:
    wrong: Any = Tampered(device, name, change)
    with pytest.raises(DeviceError, match=f"self-test: kernel {named} is wrong on cpu device 'cpu'.*use another device"):
        await self_test(wrong)


class Rewritten:
    """A real device that is given another step, arena or cache than the self-test wrote: as if its kernel had read one word as another."""

    def __init__(self, device: CpuDevice, label: str, word: int, value: int) -> None:
        self.device, self.label, self.word, self.value = device, f"self-test {label}", word, value

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.device, attribute)

    def write(self, buffer: Any, offset: int, data: Any) -> None:
        words = bytearray(data)
        if buffer.label == self.label and len(words) > 4 * self.word:
            words[4 * self.word : 4 * self.word + 4] = self.value.to_bytes(4, "little")
        self.device.write(buffer, offset, words)


FIRST_RUN = 16 + 8 * selftest_state.STEPS[0].tokens
FIRST_MOVE = 16
MISREAD = [  # label, word, what is read there, the check that finds it
    ("step with runs", FIRST_RUN, 1, "recur"),  # where the first run ends
    ("step with runs", FIRST_RUN + 1, 1, "recur"),  # where it starts
    ("step with runs", FIRST_RUN + 2, NONE, "recur"),  # what it writes
    ("step with runs", FIRST_RUN + 3, 1, "recur"),  # how much may be folded
    ("step with runs", FIRST_RUN + 5 + 4, NONE, "recur"),  # the second one's count
    ("arena", 1, 1, "recur"),  # a negative count
    ("slot moves", 0, len(selftest_state.MOVES) - 1, "move_slots .k."),
    ("slot moves", 0, len(selftest_state.MOVES) + 1, "move_slots .k."),
    ("slot moves", FIRST_MOVE, 2, "move_slots .k."),
    ("slot moves", FIRST_MOVE + 3, 2, "move_slots .k."),
    ("v", 2 * selftest_state.CACHE_WIDTH, 0, "move_slots .v."),
]


@pytest.mark.parametrize(("label", "word", "value", "named"), MISREAD)
async def test_a_word_read_as_another_is_found(device: CpuDevice, label: str, word: int, value: int, named: str) -> None:
    wrong: Any = Rewritten(device, label, word, value)
    test = SelfTest(wrong)
    try:
        with pytest.raises(DeviceError, match=f"kernel {named} is wrong"):
            await (test.recurrence() if named == "recur" else test.moves())
    finally:
        test.close()


async def test_every_template_is_run(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: set[str] = set()
    monkeypatch.setattr(SelfTest, "run", lambda test, spec, bindings, run=SelfTest.run: (ran.add(spec.name), run(test, spec, bindings)))
    await self_test(device)
    assert ran == set(TEMPLATES)


async def test_passes_twice_in_a_row(device: CpuDevice) -> None:
    """What it leaves in the device's memory is no part of the next one's answers."""
    await self_test(device)
    await self_test(device)


@pytest.mark.parametrize(
    ("found", "expected"),
    [([1.0, 2.0], [1.0, 2.1]), ([1.0, float("nan")], [1.0, 2.0]), ([float("nan")], [0.0]), ([1.0, 0.0], [1.0, float("nan")]),
     ([float("inf")], [1.0]), ([float("inf"), 1.0], [float("inf"), 1.0])],
)  # fmt: skip
def test_compares_each_value(device: CpuDevice, found: list[float], expected: list[float]) -> None:
    with pytest.raises(DeviceError, match="kernel k is wrong"):
        SelfTest(device).compare("k", array("f", found).tobytes(), expected)


@pytest.mark.parametrize(("found", "expected"), [([1.0, 2.0], [1.0, 2.001]), ([float("nan"), 4.0], [float("nan"), 4.0]), ([0.0], [0.0])])
def test_takes_what_is_within_the_tolerance(device: CpuDevice, found: list[float], expected: list[float]) -> None:
    SelfTest(device).compare("k", array("f", found).tobytes(), expected)
