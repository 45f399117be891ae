"""The tensor formats of GGUF, one row each: name, number in the file, values and bytes of a block, whether devices run it."""

from __future__ import annotations

from dataclasses import dataclass

from pie_core.weights.errors import UnsupportedFormat


@dataclass(frozen=True)
class Format:
    """`block` values take `block_bytes` bytes. `runs` says whether the devices have kernels for it."""

    name: str
    number: int
    block: int
    block_bytes: int
    runs: bool = False

    def nbytes(self, values: int) -> int:
        """Bytes of `values` values; `values` is a multiple of `block`."""
        return values // self.block * self.block_bytes


_ROWS = (
    Format("f32", 0, 1, 4, runs=True),
    Format("f16", 1, 1, 2, runs=True),
    Format("q4_0", 2, 32, 18),
    Format("q4_1", 3, 32, 20, runs=True),
    Format("q5_0", 6, 32, 22),
    Format("q5_1", 7, 32, 24),
    Format("q8_0", 8, 32, 34, runs=True),
    Format("q2_k", 10, 256, 84),
    Format("q3_k", 11, 256, 110),
    Format("q4_k", 12, 256, 144),
    Format("q5_k", 13, 256, 176),
    Format("q6_k", 14, 256, 210),
    Format("i8", 24, 1, 1),
    Format("i16", 25, 1, 2),
    Format("i32", 26, 1, 4),
    Format("f64", 28, 1, 8),
    Format("bf16", 30, 1, 2),
)
FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}
BY_NUMBER: dict[int, Format] = {row.number: row for row in _ROWS}


def require_runnable(fmt: str, tensor: str) -> Format:
    """The format's row. Raises UnsupportedFormat, naming the tensor, when no device runs it."""
    row = FORMATS.get(fmt)
    if row is None or not row.runs:
        able = ", ".join(other.name for other in _ROWS if other.runs)
        raise UnsupportedFormat(f"tensor {tensor!r} is stored as {fmt}, which does not run yet; use a file whose tensors are {able}")
    return row
