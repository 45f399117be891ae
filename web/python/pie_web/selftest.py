"""The start-up self-test, asked for at once and judged later: a GPU compiles its kernels while Python reads and uploads the model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pie_core.device.protocol import Buffer, Device, TemplateSpec
from pie_core.device.selftest import FORMATS, SelfTest

_RUNNERS = ("gate", "shift")  # ModelRunner compiles the very same ones before the verdict


class _Launch(NamedTuple):
    """A kernel to run."""

    spec: TemplateSpec
    bindings: Mapping[str, Buffer]


class _Question(NamedTuple):
    """A check to make."""

    name: str
    buffer: Buffer
    offset: int
    expected: Sequence[float]


class AskedTest(SelfTest):
    """`await ask()` uploads what the test needs and has its kernels compiled, where the device can beside its queue, so that weights need
    not wait for them; `await verdict()` runs and compares; `close()` frees what the test holds."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._steps: list[_Launch | _Question] = []
        self._compiling: dict[TemplateSpec, asyncio.Future[None]] = {}
        self._answers: list[tuple[_Question, asyncio.Future[bytes]]] = []

    def run(self, spec: TemplateSpec, bindings: Mapping[str, Buffer]) -> None:
        """Begin to compile, and keep the launch."""
        prepare: Callable[[TemplateSpec], Awaitable[None]] | None = getattr(self.device, "prepare", None)
        if prepare is not None and spec not in self._compiling and spec.name not in _RUNNERS:
            self._compiling[spec] = asyncio.ensure_future(prepare(spec))
        self._steps.append(_Launch(spec, bindings))

    async def check(self, name: str, buffer: Buffer, offset: int, expected: Sequence[float]) -> None:
        """Keep the question."""
        self._steps.append(_Question(name, buffer, offset, expected))

    async def ask(self, formats: Collection[str] = FORMATS) -> None:
        """Everything that takes long is under way when this returns; it waits for nothing. `formats`: those of the model's matrices; the
        kernels of others never run, and a software adapter compiles each for half a second."""
        await self.all(formats)

    async def verdict(self) -> None:
        """Raises DeviceError that names the first wrong kernel."""
        for compiled in self._compiling.values():
            await compiled
        for step in self._steps:
            if isinstance(step, _Launch):
                super().run(*step)
            else:
                read: Any = self.device.read(step.buffer, step.offset * 4, len(step.expected) * 4)
                self._answers.append((step, asyncio.ensure_future(read)))
        for question, answer in self._answers:
            self.compare(question.name, await answer, question.expected)

    def close(self) -> None:
        """Free every buffer, and forget what was not looked at."""
        left: list[asyncio.Future[Any]] = [*self._compiling.values(), *(answer for _, answer in self._answers)]
        for pending in left:
            if not pending.cancel() and not pending.cancelled():
                pending.exception()  # seen: nobody will ask
        super().close()
