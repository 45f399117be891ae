"""What a host must give the cpu device: one ordered queue in front of one WebAssembly module (kernels_wasm/)."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from pie_core.device.protocol import Data

# Why the module refused a record (enum Fault in kernels_wasm/device.h).
_FAULTS = {
    1: "it has an unknown opcode",
    2: "the step buffer's counts or offsets leave the buffer or the launch's bucket",
    3: "its weight format is unknown",
}


def fault_text(export: str, code: int) -> str:
    """The sentence for a non-zero result of `export` (run_plan packs the record's index above the low byte)."""
    where = f"record {code >> 8} of a plan" if export == "run_plan" else f"a call of {export}"
    return f"the cpu module refused {where}: {_FAULTS.get(code & 0xFF, f'fault {code & 0xFF}')}"


class CpuModule(Protocol):
    """A running module. `grow`, `write`, `call` and `read` take effect in call order; only what `read` returns is awaited.

    Work that fails ends the module: the first error (a DeviceError) is raised by every read that follows. After `close`
    every method raises DeviceLost.
    """

    @property
    def description(self) -> str:
        """What runs it, for people: engine, version, threads."""
        ...

    @property
    def heap_base(self) -> int:
        """First byte of linear memory that the module does not use itself."""
        ...

    def grow(self, end: int) -> None:
        """Linear memory has at least `end` bytes from here on; new bytes are zero."""
        ...

    def write(self, address: int, data: Data) -> None:
        """Copy `data` into linear memory. The caller may change it when the call returns."""
        ...

    def call(self, export: str, *arguments: int) -> None:
        """Run an export on u32 arguments. A result other than 0 is an error (`fault_text`)."""
        ...

    def read(self, address: int, size: int) -> Awaitable[bytes]:
        """Bytes of linear memory as of everything enqueued before this call."""
        ...

    def close(self) -> None:
        """Finish what is enqueued and stop. May be called twice."""
        ...
