"""Specs checked and turned into the records that kernels_wasm/plan.c walks: parameters, binding sizes, scratch."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pie_core.device.protocol import PAGE_TOKENS, Buffer, KernelError, LimitError, ParamValue, TemplateSpec
from pie_core.device.templates import TEMPLATES

RECORD_WORDS = 16
# enum Opcode in kernels_wasm/device.h
OP_EMBED, OP_RMS_NORM, OP_LINEAR, OP_ROPE_APPEND, OP_ATTENTION, OP_MAP, OP_EPILOGUE, OP_MOVE_SLOTS, OP_RECUR, OP_GATE, OP_SHIFT = range(
    1, 12
)
FORMATS = {"f32": 0, "f16": 1, "q4_1": 2, "q8_0": 3}
BLOCK = 32  # columns that share a scale
GROUP_ROWS = 4  # rows of one group of the device layout
MAX_BUCKET = 1 << 16
MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 512
_TILE_ROWS = 32  # rows of activations quantised at a time (X_ROWS in linear.c)
_HEADS_PER_PASS = 4  # HEADS in attention.c
_ROWS = {"tokens": 0, "reads": 1}
_STYLES = {"interleaved": 0, "half": 1}
_HEADER_BYTES = 64


def weight_bytes(fmt: str, rows: int, cols: int) -> tuple[int, int]:
    """Bytes of (quants, scales) of a [rows, cols] weight in device layout; f32 and f16 have no scales."""
    padded = -(-rows // GROUP_ROWS) * GROUP_ROWS
    match fmt:
        case "f32":
            return 4 * rows * cols, 0
        case "f16":
            return 2 * rows * cols, 0
        case "q4_1":
            return padded * cols // 2, padded * (cols // BLOCK) * 8
        case "q8_0":
            return padded * cols, padded * (cols // BLOCK) * 4
    raise KernelError(f"weight format {fmt!r} is unknown to the cpu device; known: {', '.join(FORMATS)}")


def raw_row_bytes(fmt: str, cols: int) -> int:
    """Bytes of one row as the checkpoint stores it. Raises KernelError for an unknown format or a width that blocks do not divide."""
    if fmt not in FORMATS:
        raise KernelError(f"weight format {fmt!r} is unknown to the cpu device; known: {', '.join(FORMATS)}")
    if fmt in ("q4_1", "q8_0") and cols % BLOCK:
        raise KernelError(f"a {fmt} weight has {cols} columns; blocks hold {BLOCK}, so the count must be a multiple of {BLOCK}")
    return {"f32": 4 * cols, "f16": 2 * cols, "q4_1": cols // BLOCK * 20, "q8_0": cols // BLOCK * 34}[fmt]


@dataclass(frozen=True)
class Record:
    """One record: its words, the scratch bytes its kernel needs, and a table of words that it points to."""

    words: tuple[int, ...]
    scratch: int = 0
    table: tuple[int, ...] = ()


class Params:
    """The checked parameters of one template spec; every getter raises KernelError naming template, parameter and value."""

    def __init__(self, spec: TemplateSpec) -> None:
        info = TEMPLATES.get(spec.name)
        if info is None:
            raise KernelError(f"unknown kernel template {spec.name!r}; known: {', '.join(sorted(TEMPLATES))}")
        self.name = spec.name
        self.values: dict[str, ParamValue] = dict(spec.params)
        if set(self.values) != set(info.params):
            raise KernelError(f"template {spec.name} takes parameters {sorted(info.params)}, got {sorted(self.values)}")

    def number(self, name: str, *, multiple: int = 1, most: int = MAX_WIDTH) -> int:
        """An integer in 1 .. most, a multiple of `multiple`."""
        value = self.values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most or value % multiple:
            extra = f", a multiple of {multiple}" if multiple > 1 else ""
            raise KernelError(f"{self.name}: {name} is {value!r}; it must be an integer in 1 .. {most}{extra}")
        return value

    def choice(self, name: str, table: Mapping[str, int]) -> int:
        """The code of one of the table's names."""
        value = self.values[name]
        if not isinstance(value, str) or value not in table:
            raise KernelError(f"{self.name}: {name} is {value!r}; known: {', '.join(table)}")
        return table[value]

    def real(self, name: str) -> int:
        """The f32 bits of a number."""
        value = self.values[name]
        if isinstance(value, str | bool):
            raise KernelError(f"{self.name}: {name} is {value!r}; it must be a number")
        return int.from_bytes(struct.pack("<f", value), "little")

    def flag(self, name: str) -> int:
        """0 or 1."""
        value = self.values[name]
        if value not in (0, 1):
            raise KernelError(f"{self.name}: {name} is {value!r}; it must be a bool")
        return int(value)


class Bindings:
    """The buffers of one launch; `address` checks that a buffer holds what the kernel touches."""

    def __init__(self, kernel: str, expected: tuple[str, ...], given: Mapping[str, Buffer], address_of: Callable[[Buffer], int]) -> None:
        if set(given) != set(expected):
            raise KernelError(f"{kernel} binds {', '.join(expected)}; got {', '.join(sorted(given)) or 'nothing'}")
        self.kernel, self.given, self._address_of = kernel, given, address_of

    def address(self, name: str, size: int = 4) -> int:
        """Address of a binding that must hold at least `size` bytes. Raises LimitError."""
        buffer = self.given[name]
        if buffer.size < size:
            raise LimitError(f"{self.kernel}: binding {name} (buffer {buffer.label!r}) has {buffer.size} bytes; the kernel needs {size}")
        return self._address_of(buffer)

    def size(self, name: str) -> int:
        """Bytes of a binding."""
        return self.given[name].size


def record(opcode: int, b: Bindings, rows: int, bucket: int, arguments: list[int], *, scratch: int = 0) -> Record:
    """The record of a kernel whose rows the step buffer counts."""
    words = [opcode, b.address("step", _HEADER_BYTES), b.size("step") // 4, rows, bucket, *arguments]
    return Record((*words, *[0] * (RECORD_WORDS - len(words))), scratch)


RecordOf = Callable[[Bindings], Record]


def _embed(p: Params) -> RecordOf:
    fmt, vocab, bucket = p.choice("fmt", FORMATS), p.number("vocab", most=1 << 24), p.number("bucket", most=MAX_BUCKET)
    name = str(p.values["fmt"])
    width = p.number("width", multiple=BLOCK if name in ("q4_1", "q8_0") else 1)
    quants, scales = weight_bytes(name, vocab, width)

    def build(b: Bindings) -> Record:
        addresses = [b.address("arena"), b.address("quants", quants), b.address("scales", scales), b.address("out", 4 * bucket * width)]
        return record(OP_EMBED, b, 0, bucket, [*addresses, fmt, vocab, width, b.size("arena") // 4])

    return build


def _rms_norm(p: Params) -> RecordOf:
    width, bucket = p.number("width"), p.number("bucket", most=MAX_BUCKET)
    eps, rows = p.real("eps"), p.choice("rows", _ROWS)

    def build(b: Bindings) -> Record:
        # Read-outs gather from any row of x; the kernel makes a row outside of it NaN.
        x = b.address("x", 4 * width * (bucket if rows == 0 else 1))
        addresses = [x, b.address("weight", 4 * width), b.address("out", 4 * bucket * width)]
        return record(OP_RMS_NORM, b, rows, bucket, [*addresses, width, eps, b.size("x") // (4 * width)])

    return build


def _linear(p: Params) -> RecordOf:
    fmt, add, rows = p.choice("fmt", FORMATS), p.flag("add"), p.choice("rows", _ROWS)
    m, k, bucket = p.number("m", most=1 << 24), p.number("k", multiple=BLOCK), p.number("bucket", most=MAX_BUCKET)
    quants, scales = weight_bytes(str(p.values["fmt"]), m, k)
    packed = min(bucket, _TILE_ROWS) * k * 5 if fmt > 1 else 0

    def build(b: Bindings) -> Record:
        addresses = [
            b.address("x", 4 * bucket * k), b.address("quants", quants), b.address("scales", scales), b.address("out", 4 * bucket * m)
        ]  # fmt: skip
        return record(OP_LINEAR, b, rows, bucket, [*addresses, fmt, m, k, add], scratch=packed)

    return build


def _heads(p: Params) -> tuple[int, int, int, int]:
    heads, kv_heads = p.number("heads", most=4096), p.number("kv_heads", most=4096)
    if heads % kv_heads:
        raise KernelError(f"{p.name}: heads is {heads}, not a multiple of kv_heads {kv_heads}")
    return heads, kv_heads, p.number("head_dim", multiple=4, most=MAX_HEAD_DIM), p.number("bucket", most=MAX_BUCKET)


def _caches(b: Bindings, row: int) -> tuple[int, int, int]:
    """Addresses of both caches and the slots (of `row` floats) that both hold."""
    page = 4 * row * PAGE_TOKENS
    addresses = b.address("k_cache", page), b.address("v_cache", page)
    return *addresses, min(b.size("k_cache"), b.size("v_cache")) // (4 * row)


def _rope_append(p: Params) -> RecordOf:
    heads, kv_heads, dim, bucket = _heads(p)
    style = p.choice("style", _STYLES)

    def build(b: Bindings) -> Record:
        k, v, slots = _caches(b, kv_heads * dim)
        addresses = [b.address("qkv", 4 * bucket * (heads + 2 * kv_heads) * dim), b.address("freqs", 2 * dim)]
        q = b.address("q", 4 * bucket * heads * dim)
        return record(OP_ROPE_APPEND, b, 0, bucket, [*addresses, q, k, v, heads, kv_heads, dim, style, slots])

    return build


def _attention(p: Params) -> RecordOf:
    heads, kv_heads, dim, bucket = _heads(p)
    scale = p.real("scale")

    def build(b: Bindings) -> Record:
        k, v, slots = _caches(b, kv_heads * dim)
        q, out = b.address("q", 4 * bucket * heads * dim), b.address("out", 4 * bucket * heads * dim)
        scratch = (1 + _HEADS_PER_PASS) * 4 * (slots + 4)  # row addresses, then scores
        return record(OP_ATTENTION, b, 0, bucket, [q, k, v, out, heads, kv_heads, dim, scale, slots], scratch=scratch)

    return build


def _move_slots(p: Params) -> RecordOf:
    width, bucket = p.number("width", multiple=4), p.number("bucket", most=MAX_BUCKET)

    def build(b: Bindings) -> Record:
        k, v, slots = _caches(b, width)
        return record(OP_MOVE_SLOTS, b, 0, bucket, [k, v, 4 * width, slots])

    return build


def _recur(p: Params) -> RecordOf:
    width, stride, bucket = p.number("width", multiple=4), p.number("stride", multiple=4, most=1 << 24), p.number("bucket", most=MAX_BUCKET)
    offset = p.values["offset"]
    if not isinstance(offset, int) or isinstance(offset, bool) or offset % 4 or not 0 <= offset <= stride - width:
        raise KernelError(f"recur: offset is {offset!r}; it must be a multiple of 4 in 0 .. {stride - width} (stride - width)")

    def build(b: Bindings) -> Record:
        rows = 4 * bucket * width
        addresses = [b.address("arena"), b.address("x", rows), b.address("decay", 4 * width), b.address("gain", 4 * width)]
        addresses += [b.address("state", 4 * stride), b.address("out", rows)]
        return record(OP_RECUR, b, 0, bucket, [*addresses, width, stride, offset, b.size("state") // (4 * stride), b.size("arena") // 4])

    return build


def _gate(p: Params) -> RecordOf:
    bucket = p.number("bucket", most=MAX_BUCKET)

    def build(b: Bindings) -> Record:
        return record(OP_GATE, b, 0, bucket, [b.address("arena"), b.size("arena") // 4])

    return build


def _shift(p: Params) -> RecordOf:
    bucket = p.number("bucket", most=MAX_BUCKET)

    def build(b: Bindings) -> Record:
        return record(OP_SHIFT, b, 0, bucket, [b.address("arena"), b.size("arena") // 4])

    return build


_TEMPLATES: dict[str, Callable[[Params], RecordOf]] = {
    "embed": _embed, "rms_norm": _rms_norm, "linear": _linear, "rope_append": _rope_append, "attention": _attention,
    "move_slots": _move_slots, "recur": _recur, "gate": _gate, "shift": _shift,
}  # fmt: skip


def compile_template(spec: TemplateSpec) -> RecordOf:
    """A function from bindings to the record. Raises KernelError naming the parameter that does not fit."""
    params = Params(spec)
    return _TEMPLATES[spec.name](params)


def binding_names(spec: TemplateSpec) -> tuple[str, ...]:
    """Binding names of a template in order."""
    return tuple(name for name, _ in TEMPLATES[spec.name].bindings)
