"""The start-up self-test, asked for at once and judged later: a GPU compiles its kernels while Python reads and uploads the model."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from pie_core.device.protocol import Buffer, Device, DeviceError, DeviceInfo
from pie_core.device.selftest import FORMATS, POSITIONS, SelfTest


class _Question(NamedTuple):
    """A check whose read-back is on its way."""

    name: str
    buffer: Buffer
    offset: int
    expected: Sequence[float]
    answer: asyncio.Future[bytes]


class _Answers:
    """Stands in for the device when what was read is compared."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.next: asyncio.Future[bytes] | None = None

    def read(self, buffer: Buffer, offset: int, size: int) -> Any:
        """What the question of the moment was answered."""
        return self.next


class AskedTest(SelfTest):
    """`await ask()` enqueues every kernel and read-back, `await verdict()` compares, `close()` frees what the test holds."""

    def __init__(self, device: Device) -> None:
        if device.token_buckets[-1] < len(POSITIONS):
            raise DeviceError(f"the self-test runs {len(POSITIONS)} tokens a step; the device takes {device.token_buckets[-1]}")
        super().__init__(device)
        self._questions: list[_Question] = []

    async def check(self, name: str, buffer: Buffer, offset: int, expected: Sequence[float]) -> None:
        """Ask, and keep the question."""
        answer = asyncio.ensure_future(self.device.read(buffer, offset * 4, len(expected) * 4))
        self._questions.append(_Question(name, buffer, offset, expected, answer))

    async def ask(self, formats: Collection[str] = FORMATS) -> None:
        """Everything is on its way to the device when this returns; it waits for nothing. `formats`: those of the model's matrices; the
        kernels of others never run, and a software adapter compiles each for half a second."""
        await self.all(formats)

    async def verdict(self) -> None:
        """Raises DeviceError that names the first wrong kernel."""
        device, answers = self.device, _Answers(self.device.info)
        self.device = answers  # type: ignore[assignment]  # comparing only reads and names the device
        try:
            for question in self._questions:
                answers.next = question.answer
                await super().check(question.name, question.buffer, question.offset, question.expected)
        finally:
            self.device = device

    def close(self) -> None:
        """Free every buffer, and forget what was not looked at."""
        for question in self._questions:
            if not question.answer.cancel() and not question.answer.cancelled():
                question.answer.exception()  # seen: nobody will ask
        super().close()
