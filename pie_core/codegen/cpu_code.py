"""Words of the cpu virtual machine: instructions in blocks, scalar slots, temps with reuse, tables of constants.

Words: header [magic, words in all, lane words, logits width, hidden width, scalar slots, temps, word of the tables], then blocks
[kind, words behind, n] followed by instructions of six words [opcode, imm, d, a, b, c], then the tables. A block of kind ONCE runs once,
LOOP runs over n elements in chunks of 1,024, END ends the program. ROWS has four words more, [rows, words of each part], and three parts:
before each row, over its n elements in chunks, after it. An operand word is kind << 28 | index; with WHOLE it stands for its first element
wherever the chunk is. A map program's header has [magic, words, rows, inputs, n, scalar slots, temps, …] and then stride and offset of each
input; its LOOP blocks run once a row.

A scalar is a slot of 16 bytes that holds its word four times; a temp is one chunk of a vector. Bools are masks of ones there, and words of
0 or 1 in scratch, arena and results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pie_core.codegen.cpu_source import opcodes
from pie_core.eta.errors import ProgramError

MAGIC = 0x31454950
CHUNK = 1024  # elements
ONCE, LOOP, END, ROWS = range(4)
SCALAR, TEMP, LOGITS, HIDDEN, ARENA, INPUT, RESULTS, OUT, LANES, SCRATCH, TABLE = range(11)
WHOLE = 1 << 27
MAX_SCRATCH = 1 << 20  # bytes of slots and temps; values in memory come on top

Instruction = tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class CpuProgram:
    """`words`: the program, u32. `scratch_bytes`: what `vm_epilogue` or `vm_map` needs at `scratch`, 16-byte aligned.
    Row widths need no padding, but a vector load may touch up to 12 bytes behind the last row: allocate in multiples of 16 bytes."""

    words: tuple[int, ...]
    scratch_bytes: int
    work: int = 0  # nanoseconds of one lane, about, at most


def operand_word(kind: int, index: int) -> int:
    """An operand: SCALAR slot, TEMP, row of LOGITS or HIDDEN, INPUT, lane word of an ARENA, RESULTS or LANES place, word of
    SCRATCH or of the TABLEs."""
    return kind << 28 | index


class Code:
    """Instructions of the block being written, scalar slots, temps with reuse, and tables."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.block: list[Instruction] = []
        self.tables: list[int] = []
        self.scalars = 0
        self.temps = 0
        self.free: list[int] = []
        self._tables: dict[tuple[int, ...], int] = {}
        self._opcodes = opcodes()

    def emit(self, name: str, d: int, a: int = 0, b: int = 0, *, c: int = 0, key: str = "", imm: int = 0) -> None:
        """Append an instruction to the block."""
        self.block.append((self._opcodes[name, key], imm, d, a, b, c))

    def slot(self) -> int:
        """A new scalar slot, as an operand."""
        self.scalars += 1
        return operand_word(SCALAR, self.scalars - 1)

    def temp(self) -> int:
        """A temp, as an operand; an unused one if there is any."""
        if self.free:
            return operand_word(TEMP, self.free.pop())
        self.temps += 1
        return operand_word(TEMP, self.temps - 1)

    def table(self, *words: int) -> int:
        """Constants behind the program, as an operand; equal ones are kept once. Negative numbers are taken modulo 2^32."""
        if words not in self._tables:
            self._tables[words] = len(self.tables)
            self.tables += [w & 0xFFFFFFFF for w in words]
        return operand_word(TABLE, self._tables[words])

    def release(self, operand: int) -> None:
        """Give a temp back; other operands are left alone."""
        if operand >> 28 == TEMP:
            self.free.append(operand & 0xFFFFFFF)

    def close(self, kind: int, n: int = 1) -> None:
        """End the block as `kind` over n elements; an empty one is dropped."""
        if self.block or kind == END:
            self.blocks += [kind, 6 * len(self.block), n]
            self.blocks += self.cut()

    def cut(self) -> list[int]:
        """The words of the block so far, as one part of a ROWS block; the block is empty then."""
        words = [word for instruction in self.block for word in instruction]
        self.block = []
        return words

    def close_rows(self, n: int, rows: int, parts: Sequence[Sequence[int]]) -> None:
        """Append a ROWS block of three parts made by `cut`."""
        self.blocks += [ROWS, 4 + sum(map(len, parts)), n, rows, *map(len, parts)]
        for part in parts:
            self.blocks += part

    def program(self, header: Sequence[int], extra: Sequence[int] = (), *, scratch_words: int = 0) -> CpuProgram:
        """The whole program behind a header; `extra` words stand between header and blocks, `scratch_words` behind slots and temps. Raises
        ProgramError over the cap of slots and temps."""
        self.close(END)
        local = 16 * self.scalars + 4 * CHUNK * self.temps
        if local > MAX_SCRATCH:
            raise ProgramError(
                f"the program needs {local} bytes of scratch on the cpu device for values alive at once, the cap is {MAX_SCRATCH}: "
                "split it or reduce intermediate vectors earlier"
            )
        body = [*extra, *self.blocks, *self.tables]
        tables = 8 + len(extra) + len(self.blocks)
        words = (MAGIC, 8 + len(body), *header, self.scalars, self.temps, tables, *body)
        return CpuProgram(words, local + 4 * scratch_words)
