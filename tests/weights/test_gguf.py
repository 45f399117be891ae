"""The GGUF reader against the `gguf` package, and against headers that lie."""

from __future__ import annotations

import hashlib
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pie_core.weights import (
    FORMATS,
    BadHeader,
    BadMetadata,
    Checkpoint,
    MissingKey,
    NotReadable,
    TruncatedFile,
    UnsupportedFormat,
    WeightsError,
    open_gguf,
    read_header,
)
from pie_core.weights.metadata import StringArray
from tests.support.paths import default_model
from tests.support.tiny_gguf import FORMAT_IDS, RawTensor, gguf_bytes, write_tiny_gguf


def norm(name: str = "w", cols: int = 32) -> RawTensor:
    return RawTensor(name, "f32", None, cols, bytes(range(32)) * (cols // 8))


def small(metadata: dict[str, Any] | None = None, tensors: list[RawTensor] | None = None, **kwargs: Any) -> bytes:
    return gguf_bytes({"general.architecture": "llama"} if metadata is None else metadata, tensors or [norm()], **kwargs)


@pytest.mark.parametrize("fmt", sorted(FORMAT_IDS))
@pytest.mark.parametrize("alignment", [32, 4096])
def test_agrees_with_the_gguf_package(tmp_path: Path, fmt: str, alignment: int) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", fmt=fmt, layers=2, alignment=alignment)
    reference = gguf.GGUFReader(path)
    with open_gguf(path) as ours:
        ours.check_runnable()
        assert list(ours.tensors) == [tensor.name for tensor in reference.tensors]
        for tensor in reference.tensors:
            info = ours.tensors[tensor.name]
            assert info.dims == tuple(int(size) for size in reversed(tensor.shape))
            assert (info.fmt, info.offset, info.nbytes) == (tensor.tensor_type.name.lower(), tensor.data_offset, tensor.n_bytes)
            assert info.rows * info.cols == int(tensor.n_elements)
            assert b"".join(ours.rows(info.name, 1000)) == tensor.data.tobytes()
        keys = [key for key in reference.fields if not key.startswith("GGUF.")]
        assert list(ours.metadata) == keys
        for key in keys:
            expected = reference.fields[key].contents()
            value = ours.metadata[key]
            if isinstance(value, StringArray):
                assert ours.metadata.strings(key) == expected
            elif isinstance(expected, list):
                assert ours.metadata.integers(key) == expected
            else:
                assert value == expected
        assert ours.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_bytes_and_file_read_alike(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with open_gguf(path) as mapped, open_gguf(path.read_bytes()) as held:
        assert mapped.tensors == held.tensors
        assert mapped.sha256 == held.sha256
        for name in mapped.tensors:
            assert b"".join(mapped.rows(name)) == b"".join(held.rows(name))


def test_a_header_reads_from_a_prefix(tmp_path: Path) -> None:
    raw = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    whole = read_header(memoryview(raw), len(raw))
    prefix = read_header(memoryview(raw)[: whole.data_offset], len(raw))
    assert prefix.tensors == whole.tensors
    with pytest.raises(TruncatedFile):
        read_header(memoryview(raw)[: whole.data_offset // 2], len(raw))


@pytest.mark.parametrize("chunk", [1, 40, 79, 80, 81, 1000, 1 << 20])
def test_rows_come_whole_and_in_order(tmp_path: Path, chunk: int) -> None:
    with open_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", ff=96)) as ours:
        info = ours.tensors["blk.0.ffn_up.weight"]
        assert (info.shape, info.row_bytes) == ((96, 64), 40)
        parts = list(ours.rows(info.name, chunk))
        assert all(part.readonly and part.nbytes % 40 == 0 and part.nbytes <= max(chunk, 40) for part in parts)
        assert sum(part.nbytes for part in parts) == info.nbytes


def test_views_outlive_the_next_chunk_and_close(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    ours = open_gguf(path)
    info = ours.tensors["token_embd.weight"]
    parts = list(ours.rows(info.name, 4096))
    ours.close()
    ours.close()
    assert b"".join(parts) == path.read_bytes()[info.offset : info.offset + info.nbytes]
    with pytest.raises(WeightsError, match="closed"):
        list(ours.rows(info.name))


def test_close_unmaps_the_file_and_keeps_the_metadata(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    ours = open_gguf(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    ours.close()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert len(ours.metadata.strings("tokenizer.ggml.tokens")) == 320
    assert ours.metadata.integers("tokenizer.ggml.token_type")[:4] == [3, 3, 3, 1]


def test_streaming_does_not_keep_a_second_copy(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    rows = 16_384
    path.write_bytes(small(tensors=[RawTensor("w", "f32", rows, 1024, bytes(rows * 4096))]))  # 64 MB
    smaps = Path("/proc/self/smaps")

    def resident() -> int:
        lines = iter(smaps.read_text().splitlines())
        for line in lines:
            if line.endswith(str(path)):
                return int(next(item for item in lines if item.startswith("Rss:")).split()[1])
        raise AssertionError("the file is not mapped")

    with open_gguf(path) as ours:
        highest = 0
        for part in ours.rows("w", 4 << 20):
            assert np.frombuffer(part, np.uint8).max() == 0
            highest = max(highest, resident())
            del part
        assert highest < 12 << 10  # kB
        assert resident() < 1 << 10


def test_format_table_agrees_with_the_gguf_package() -> None:
    for fmt in FORMATS.values():
        kind = gguf.GGMLQuantizationType(fmt.number)
        assert (kind.name.lower(), gguf.GGML_QUANT_SIZES[kind]) == (fmt.name, (fmt.block, fmt.block_bytes))
    assert {fmt.name for fmt in FORMATS.values() if fmt.runs} == {"f32", "f16", "q4_1", "q8_0"}


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "BF16"])
def test_known_formats_that_do_not_run_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    writer.add_tensor("w", np.zeros((2, 256 // block * size), np.uint8), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(path) as ours:
        assert (ours.tensors["w"].shape, ours.tensors["w"].fmt) == ((2, 256), kind.lower())
        with pytest.raises(UnsupportedFormat, match=f"'w' is stored as {kind.lower()}.*f32, f16, q4_1, q8_0"):
            ours.rows("w")
        with pytest.raises(UnsupportedFormat, match="'w'"):
            ours.check_runnable()


def test_typed_getters() -> None:
    pairs = {"s": "text", "i": 7, "f": 0.5, "b": True, "ss": ["a", "é"], "ii": [1, -2]}
    meta = open_gguf(small(pairs)).metadata
    assert (meta.str("s"), meta.int("i"), meta.float("f"), meta.bool("b")) == ("text", 7, 0.5, True)
    assert (meta.strings("ss"), meta.integers("ii"), meta.float("i")) == (["a", "é"], [1, -2], 7.0)
    assert (meta.optional_str("s", None), meta.optional_int("x", 3), meta.optional_float("x", None), meta.optional_bool("x", False)) == (
        "text", 3, None, False,
    )  # fmt: skip
    assert "s" in meta and len(meta) == 6


@pytest.mark.parametrize(
    ("getter", "key", "error", "words"),
    [
        ("str", "nope", MissingKey, "no metadata key 'nope'"),
        ("str", "i", BadMetadata, "'i' .* is an integer, not a string"),
        ("int", "s", BadMetadata, "is a string, not an integer"),
        ("int", "b", BadMetadata, "is a bool, not an integer"),
        ("float", "s", BadMetadata, "not a float"),
        ("float", "nan", BadMetadata, "must be finite"),
        ("bool", "i", BadMetadata, "not a bool"),
        ("strings", "ii", BadMetadata, "a list of numbers, not a list of strings"),
        ("integers", "ss", BadMetadata, "not a list of integers"),
        ("floats", "ii", BadMetadata, "not a list of floats"),
    ],
)
def test_getters_name_the_key(getter: str, key: str, error: type[WeightsError], words: str) -> None:
    meta = open_gguf(small({"s": "t", "i": 7, "b": True, "ss": ["a"], "ii": [1], "nan": float("nan")})).metadata
    with pytest.raises(error, match=words):
        getattr(meta, getter)(key)


def test_integer_bounds() -> None:
    meta = open_gguf(small({"n": 7})).metadata
    for bounds, words in (({"low": 8}, "at least 8"), ({"high": 6}, "at most 6"), ({"low": 1, "high": 6}, "1 to 6")):
        with pytest.raises(BadMetadata, match=f"is 7, it must be {words}"):
            meta.int("n", **bounds)


def patched(old: bytes, new: bytes, base: bytes | None = None) -> bytes:
    raw = small() if base is None else base
    assert raw.count(old) == 1 and len(old) == len(new)
    return raw.replace(old, new)


U64 = struct.Struct("<Q").pack
ENTRY = struct.pack("<I", 1) + U64(32) + struct.pack("<I", 0) + U64(0)  # dimensions, size, format, offset of the one tensor
HUGE = 1 << 62
TWO = [norm("a", 64), norm("b", 64)]
LIST = struct.Struct("<IIQ").pack  # array, element type, count
BAD_FILES: list[tuple[str, bytes, type[WeightsError], str]] = [
    ("magic", b"GGML" + small()[4:], BadHeader, "not a GGUF file"),
    ("short", b"GG", TruncatedFile, "magic"),
    ("version 1", small(version=1), UnsupportedFormat, "version 1"),
    ("big endian", small(version=0x03000000), UnsupportedFormat, "big-endian"),
    ("pair count", small()[:16] + U64(HUGE) + small()[24:], TruncatedFile, f"{HUGE} metadata pairs"),
    ("tensor count", small()[:8] + U64(HUGE) + small()[16:], TruncatedFile, f"{HUGE} tensors"),
    ("key length", small()[:24] + U64(HUGE) + small()[32:], BadHeader, "at most 65535"),
    ("string length", patched(U64(5) + b"llama", U64(HUGE) + b"llama"), TruncatedFile, "general.architecture"),
    ("key utf-8", patched(b"general.architecture", b"general.architectur\xff"), BadHeader, "not UTF-8"),
    ("no dimensions", patched(ENTRY, struct.pack("<I", 0) + ENTRY[4:]), BadHeader, "0 dimensions"),
    ("five dimensions", patched(ENTRY, struct.pack("<I", 5) + ENTRY[4:]), BadHeader, "5 dimensions"),
    ("zero rows", patched(ENTRY, struct.pack("<I", 1) + U64(0) + ENTRY[12:]), BadHeader, "0 values"),
    ("huge rows", patched(ENTRY, struct.pack("<I", 1) + U64(HUGE) + ENTRY[12:]), BadHeader, "cannot hold"),
    ("past the end", patched(ENTRY, struct.pack("<I", 1) + U64(64) + ENTRY[12:]), TruncatedFile, "'w' ends at byte"),
    ("offset", patched(ENTRY, ENTRY[:16] + U64(HUGE)), TruncatedFile, "cut off"),
    ("offset alignment", patched(ENTRY, ENTRY[:16] + U64(4)), BadHeader, "alignment 32"),
    ("unknown format", patched(ENTRY, ENTRY[:12] + struct.pack("<I", 99) + ENTRY[16:]), UnsupportedFormat, "format number 99"),
    ("block", small(tensors=[norm(cols=40)]).replace(struct.pack("<QI", 40, 0), struct.pack("<QI", 40, 3)), BadHeader, "multiple of 32"),
    ("alignment zero", small({"general.alignment": 0}), BadMetadata, "at least 8|8 to"),
    ("alignment odd", small({"general.alignment": 24}), BadHeader, "power of two"),
    ("alignment huge", small({"general.alignment": 1 << 20}), BadMetadata, "8 to 65536"),
    ("split", small({"split.count": 3}), UnsupportedFormat, "one of 3 parts"),
    ("twice", small(tensors=[norm(), norm()]), BadHeader, "tensor 'w' twice"),
    ("key twice", patched(b"key2", b"key1", small({"key1": 1, "key2": 2})), BadHeader, "'key1' twice"),
    ("overlap", patched(struct.pack("<QIQ", 64, 0, 256), struct.pack("<QIQ", 64, 0, 32), small(tensors=TWO)), BadHeader, "overlap"),
    ("value type", patched(struct.pack("<II", 4, 7), struct.pack("<II", 99, 7), small({"k": 7})), BadHeader, "has type 99"),
    ("element type", patched(LIST(9, 5, 1), LIST(9, 77, 1), small({"k": [1]})), BadHeader, "element type 77"),
    ("nested", patched(LIST(9, 5, 1), LIST(9, 9, 1), small({"k": [1]})), UnsupportedFormat, "array of arrays"),
    ("array count", patched(LIST(9, 5, 1), LIST(9, 5, HUGE), small({"k": [1]})), TruncatedFile, "'k'"),
    ("string count", patched(LIST(9, 8, 1), LIST(9, 8, HUGE), small({"k": ["a"]})), TruncatedFile, "'k'"),
    ("string inside", patched(U64(4) + b"text", U64(HUGE) + b"text", small({"k": ["text"]})), TruncatedFile, "'k'"),
    ("bool", patched(struct.pack("<IB", 7, 1), struct.pack("<IB", 7, 2), small({"k": True})), BadHeader, "must be 0 or 1"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "error", "words"), [case[1:] for case in BAD_FILES], ids=[case[0] for case in BAD_FILES])
def test_headers_that_lie(tmp_path: Path, raw: bytes, error: type[WeightsError], words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    for source in (raw, path):
        with pytest.raises(error, match=words) as caught:
            open_gguf(source)
        assert type(caught.value) is error
        assert "\n" not in str(caught.value)


def test_a_file_cut_anywhere_says_so(tmp_path: Path) -> None:
    raw = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    for length in [0, 1, 20, 100, len(raw) // 3, len(raw) - 4000, len(raw) - 300]:
        (tmp_path / "cut.gguf").write_bytes(raw[:length])
        with pytest.raises(TruncatedFile):
            open_gguf(tmp_path / "cut.gguf")


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(NotReadable, match="cannot open"):
            open_gguf(path)


def test_missing_tensor_and_bad_chunk() -> None:
    ours = open_gguf(small())
    with pytest.raises(MissingKey, match="no tensor 'x'"):
        ours.tensor("x")
    with pytest.raises(WeightsError, match="chunk_bytes is 0"):
        ours.rows("w", 0)


def test_a_string_that_is_not_utf8_names_its_place() -> None:
    ours = open_gguf(patched(U64(2) + b"bb", U64(2) + b"\xc3\x28", small({"k": ["a", "bb"]})))
    with pytest.raises(BadMetadata, match="string 1 of metadata key 'k' is not UTF-8"):
        ours.metadata.strings("k")


def touch_everything(ours: Checkpoint) -> None:
    for key, value in ours.metadata.items():
        if isinstance(value, StringArray):
            ours.metadata.strings(key)
        elif hasattr(value, "decode"):
            value.decode()
    for name, info in ours.tensors.items():
        if FORMATS[info.fmt].runs:
            assert sum(part.nbytes for part in ours.rows(name, 64)) == info.nbytes


def test_two_thousand_mutated_headers() -> None:
    """Only typed errors come out, quickly and without a large allocation, whatever the header says."""
    base = small(
        {"general.architecture": "llama", "n": 3, "f": 1.5, "flag": True, "tokens": ["a", "bc", "def"], "types": [1, 2, 3], "z": "end"},
        [norm("a", 64), RawTensor("b", "q4_1", 2, 64, bytes(80)), RawTensor("c", "q8_0", 3, 32, bytes(102))],
    )
    header = open_gguf(base).tensors["a"].offset
    extremes = [0, 1, 0x7F, 0xFF, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, len(base)]
    rng = random.Random(7)
    outcomes = {"read": 0, "refused": 0}
    tracemalloc.start()
    try:
        for _ in range(2000):
            raw = bytearray(base)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(header - 8)
                match rng.randrange(4):
                    case 0:
                        raw[at] ^= 1 << rng.randrange(8)
                    case 1:
                        raw[at] = rng.randrange(256)
                    case 2:
                        raw[at : at + 8] = U64(rng.choice(extremes))
                    case _:
                        raw[at : at + 4] = struct.pack("<I", rng.choice(extremes) & 0xFFFFFFFF)
            if rng.randrange(8) == 0:
                del raw[rng.randrange(len(raw)) :]
            try:
                touch_everything(open_gguf(bytes(raw)))
                outcomes["read"] += 1
            except WeightsError as error:
                assert "\n" not in str(error) or "\\n" in str(error)
                outcomes["refused"] += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert outcomes["read"] > 50 and outcomes["refused"] > 500


def test_a_million_strings_open() -> None:
    item = U64(6) + b"abcdef"
    pairs = struct.pack("<QQ", 0, 1) + U64(1) + b"k" + LIST(9, 8, 1_000_000) + item * 1_000_000
    raw = b"GGUF" + struct.pack("<I", 3) + pairs
    ours = open_gguf(raw)
    assert len(ours.metadata.strings("k")) == 1_000_000


def test_smollm2() -> None:
    with open_gguf(default_model()) as ours:
        ours.check_runnable()
        assert (ours.metadata.str("general.architecture"), ours.metadata.int("llama.block_count")) == ("llama", 30)
        assert len(ours.tensors) == 272 and len(ours.metadata.strings("tokenizer.ggml.merges")) == 48900
        assert ours.tensors["token_embd.weight"].shape == (49152, 576)
        assert ours.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
