"""Writes conformance.json: inputs and NumPy's answers for every kernel template and a set of Programs, for devices in the page.

Run it when a template, an op or a lowering changes: `python -m tests.web.make_conformance`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pie_core.codegen.layout import NONE
from pie_core.codegen.oracle import run_map, to_words
from pie_core.device.protocol import ParamValue
from pie_core.eta import OPS, Traced, intrinsics
from pie_core.eta.program import Program
from tests.codegen.author import Chan, F, counter, greedy, map_program, over_cells, traced
from tests.codegen.batch import Batch, Lane
from tests.codegen.test_codegen_ops import CASES as OP_CASES
from tests.device import oracles
from tests.device.oracles import Raw, Step, Token
from tests.web import memory_programs

TARGET = Path(__file__).with_name("conformance.json")
FORMATS = ("f32", "f16", "q4_1", "q8_0")
CPU_TOLERANCE = {"f32": 2e-6, "f16": 2e-6, "q4_1": 5e-5, "q8_0": 5e-5}  # of the largest value; int16 activations, as in tests/device
TOLERANCE = 2e-6
OP_CELLS = 361  # all pairs of special values and some more
VOCAB, HIDDEN, ROWS = 1029, 96, 4  # over a chunk of 1,024, odd
NUMPY = {"f32": np.float32, "i32": np.int32, "bool": np.bool_, "u32": np.uint32}
Array = Any


class Writer:
    """Cases, and their arrays stored once each."""

    def __init__(self) -> None:
        self.blobs: dict[str, str] = {}
        self.cases: list[dict[str, Any]] = []

    def blob(self, data: bytes | Array) -> str:
        """The name of these bytes."""
        raw = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
        name = hashlib.sha256(raw).hexdigest()[:12]
        self.blobs[name] = base64.b64encode(zlib.compress(raw, 9)).decode()
        return name

    def buffer(self, array: Array) -> dict[str, Any]:
        """A buffer with this content."""
        return {"blob": self.blob(array)}

    def weight(self, raw: Raw) -> dict[str, Any]:
        """An uploaded weight."""
        rows, cols = raw.matrix.shape
        return {"fmt": raw.fmt, "rows": rows, "cols": cols, "blob": self.blob(raw.data)}

    def check(self, buffer: str, want: Array, at: int = 0, *, cpu: float = 0, webgpu: float = 0, rtol: float = 0) -> dict[str, Any]:
        """`buffer` from word `at` must be `want`: floats within an absolute tolerance plus `rtol` of the value, the rest bit for bit."""
        array = np.asarray(want)
        kind = "f32" if array.dtype in (np.float32, np.float64) else "words"
        words = array.astype(np.float32).ravel() if kind == "f32" else to_words(np, array)
        return {"buffer": buffer, "at": at, "kind": kind, "want": self.blob(words), "atol": {"cpu": cpu, "webgpu": webgpu}, "rtol": rtol}

    def template(
        self,
        title: str,
        name: str,
        params: Mapping[str, ParamValue],
        buffers: Mapping[str, Any],
        checks: Sequence[dict[str, Any]],
        *,
        weight: dict[str, Any] | None = None,
    ) -> None:
        """A template's case."""
        case: dict[str, Any] = {"title": title, "template": name, "params": dict(params), "buffers": dict(buffers), "checks": list(checks)}
        self.cases.append(case if weight is None else {**case, "weight": weight})


def padded(array: Array, rows: int, value: float = np.nan) -> Array:
    """`array` as f32 with rows of `value` below: padding must be neither read nor written."""
    below = np.full((rows - len(array), *array.shape[1:]), value, np.float32)
    return np.concatenate([array.astype(np.float32), below])


def rows_step(count: int, reads: tuple[int, ...] = ()) -> Step:
    """`count` tokens of no interest."""
    return Step([Token(pos=i % 16) for i in range(count)], reads)


def largest(want: Array, tolerance: float) -> float:
    """That part of the largest value."""
    return tolerance * float(np.nanmax(np.abs(want)))


def embeds(w: Writer) -> None:
    for fmt in FORMATS:
        width = 96 if fmt in ("q4_1", "q8_0") else 97
        raw = oracles.raw_weight(np.random.default_rng(1), fmt, 11, width)
        tokens = [Token(10), Token(99, src=1), Token(11), Token(0), Token(0, src=2)]
        want = padded(np.stack([raw.matrix[10], raw.matrix[3], np.full(width, np.nan), raw.matrix[0], np.full(width, np.nan)]), 8, 5)
        buffers = {
            "step": w.buffer(Step(tokens).words()),
            "arena": w.buffer(np.array([7, 3, 11], np.uint32)),
            "out": w.buffer(np.full((8, width), 5, np.float32)),
        }
        params: dict[str, ParamValue] = {"fmt": fmt, "vocab": 11, "width": width, "bucket": 8}
        w.template(f"embed {fmt}", "embed", params, buffers, [w.check("out", want)], weight=w.weight(raw))


def norms(w: Writer) -> None:
    for width in (7, 64, 1030):
        rng = np.random.default_rng(width)
        x, gain = rng.standard_normal((3, width)).astype(np.float32) * 3, rng.standard_normal(width).astype(np.float32)
        for rows, chosen in (("tokens", [0, 1, 2]), ("reads", [2, 2, 0, 1])):
            want = oracles.rms_norm(x, gain, 1e-5)[chosen]
            buffers = {
                "step": w.buffer(rows_step(3, (2, 2, 0, 1)).words()),
                "x": w.buffer(padded(x, 8)),
                "weight": w.buffer(gain),
                "out": w.buffer(np.full((8, width), np.nan, np.float32)),
            }
            slack = largest(want, TOLERANCE)
            check = w.check("out", padded(want, 8), cpu=slack, webgpu=slack)
            w.template(f"rms_norm {width} {rows}", "rms_norm", {"width": width, "eps": 1e-5, "rows": rows, "bucket": 8}, buffers, [check])


def linears(w: Writer) -> None:
    """Every format in every bucket. A software adapter has three kernels a format (1, 2, and 4 rows at a time), which SwiftShader compiles
    for half a second each; `add` and `rows` change with format and kernel, so that each pair of choices is there."""
    for place, fmt in enumerate(FORMATS):
        raw = oracles.raw_weight(np.random.default_rng(2), fmt, 37, 96)
        every = np.random.default_rng(3).standard_normal((64, 96)).astype(np.float32)
        sums = np.random.default_rng(4).standard_normal((64, 37)).astype(np.float32)
        for bucket, count in ((1, 1), (2, 2), (4, 3), (8, 8), (16, 13), (32, 31), (64, 33)):
            kernel = min(bucket.bit_length() - 1, 2)
            add, rows = bool((place + kernel) % 2), "reads" if (place // 2 + kernel) % 2 else "tokens"
            x, before = every[:count], sums[:count]
            want = x @ raw.matrix.T + (before if add else 0)
            step = rows_step(count) if rows == "tokens" else rows_step(1, tuple([0] * count))
            out = padded(before if add else np.full((count, 37), np.nan), bucket)
            buffers = {"step": w.buffer(step.words()), "x": w.buffer(padded(x, bucket)), "out": w.buffer(out)}
            params: dict[str, ParamValue] = {"fmt": fmt, "m": 37, "k": 96, "add": add, "rows": rows, "bucket": bucket}
            slack = {"cpu": largest(want, CPU_TOLERANCE[fmt]), "webgpu": largest(want, TOLERANCE)}
            title = f"linear {fmt}, {count} rows in {bucket}{', added' if add else ''}, {rows}"
            w.template(title, "linear", params, buffers, [w.check("out", padded(want, bucket), **slack)], weight=w.weight(raw))


def ropes(w: Writer) -> None:
    for style in ("interleaved", "half"):
        rng = np.random.default_rng(4)
        step = Step([Token(pos=15), Token(pos=16), Token(pos=0, seq=1)], tables=[(5, 2), (0,)])
        qkv = rng.standard_normal((3, 8, 16)).astype(np.float32)
        freqs = (10_000.0 ** (-np.arange(8) / 8)).astype(np.float32)
        turned = oracles.rotate(qkv[:, :6], np.array([t.pos for t in step.tokens]), freqs, style)
        k, v = (np.full((96, 2, 16), np.nan, np.float32) for _ in range(2))
        slots = [step.slot(t) for t in step.tokens]
        k[slots], v[slots] = turned[:, 4:], qkv[:, 6:]
        empty = w.buffer(np.full((96, 2, 16), np.nan, np.float32))
        buffers = {
            "step": w.buffer(step.words()),
            "qkv": w.buffer(padded(qkv, 4)),
            "freqs": w.buffer(freqs),
            "k_cache": empty,
            "v_cache": empty,
        }
        buffers["q"] = w.buffer(np.full((4, 4, 16), np.nan, np.float32))
        slack = largest(turned, TOLERANCE)
        checks = [w.check("q", padded(turned[:, :4], 4), cpu=slack, webgpu=slack), w.check("k_cache", k, cpu=slack, webgpu=slack)]
        params: dict[str, ParamValue] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "style": style, "bucket": 4}
        w.template(f"rope_append {style}", "rope_append", params, buffers, [*checks, w.check("v_cache", v)])


def attentions(w: Writer) -> None:
    for head_dim, heads, kv_heads in ((4, 2, 1), (32, 3, 1), (80, 2, 2), (128, 2, 1)):
        rng = np.random.default_rng(head_dim)
        long = 12 if head_dim == 32 else 2  # pages
        tables = [tuple(range(3, 3 + long)), (1, 0)]
        tokens = [
            Token(pos=16 * long - 1),
            Token(pos=17, seq=1),
            Token(pos=5, window=3, sinks=1),
            Token(pos=30, seq=1, window=9),
            Token(pos=0),
        ]
        step = Step(tokens, tables=tables)
        q = rng.standard_normal((5, heads, head_dim)).astype(np.float32)
        caches = [(np.round(rng.standard_normal((16 * (3 + long), kv_heads, head_dim)) * 4) / 4).astype(np.float32) for _ in range(2)]
        want = oracles.attention(step, q, (caches[0], caches[1]), kv_heads, head_dim**-0.5)
        buffers = {
            "step": w.buffer(step.words()),
            "q": w.buffer(padded(q, 8)),
            "k_cache": w.buffer(caches[0]),
            "v_cache": w.buffer(caches[1]),
        }
        buffers["out"] = w.buffer(np.full((8, heads, head_dim), np.nan, np.float32))
        params: dict[str, ParamValue] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "scale": head_dim**-0.5, "bucket": 8}
        slack = largest(want, 5e-6)
        checks = [w.check("out", padded(want, 8), cpu=slack, webgpu=slack)]
        w.template(f"attention of {heads} heads of {head_dim}", "attention", params, buffers, checks)


def moves(w: Writer) -> None:
    """A path to lower slots, a run that repeats its first row, and rows outside the caches."""
    pairs = [(20, 17), (23, 18), (24, 19), (1, 2), (2, 3), (3, 4), (48, 5), (6, 48)]
    words = Step([Token(source) for source, _ in pairs]).words()
    for t, (_, target) in enumerate(pairs):
        words[16 + 8 * t + 3] = target
    caches = np.random.default_rng(6).standard_normal((2, 48, 20)).astype(np.float32)
    want = caches.copy()
    for source, target in pairs[:6]:
        want[:, target] = want[:, source]
    buffers = {"step": w.buffer(words), "k_cache": w.buffer(caches[0]), "v_cache": w.buffer(caches[1])}
    w.template("move_slots", "move_slots", {"width": 20, "bucket": 8}, buffers, [w.check("k_cache", want[0]), w.check("v_cache", want[1])])


def recurrences(w: Writer) -> None:
    """Runs from zeros and from slots, one folded by the host's count and one by the device's, and a row of no run."""
    runs = [(3, NONE, 0, 3, NONE), (5, 1, 2, 1, NONE), (9, 1, 3, 3, 2)]  # end, start, write, limit, cell
    step = np.concatenate([rows_step(10).words(), np.array(runs, np.uint32).reshape(-1)])
    step[6:8] = len(step) - 5 * len(runs), len(runs)
    rng = np.random.default_rng(8)
    x, state = (rng.standard_normal(shape).astype(np.float32) for shape in ((10, 68), (4, 204)))
    decay, gain = rng.uniform(-1, 1, (2, 68)).astype(np.float32)
    out, kept = np.full((10, 68), np.nan), state.astype(np.float64)
    for (end, start, write, limit, _), folded, begin in zip(runs, (3, 1, 2), (0, 3, 5), strict=True):
        states = [state[start, 64:132].astype(np.float64) if start != NONE else np.zeros(68)]
        for t in range(begin, end):
            states.append(decay * states[folded if t - begin == limit else -1] + gain * x[t].astype(np.float64))
            out[t] = states[-1]
        kept[write, 64:132] = states[folded]
    buffers = {"step": w.buffer(step), "arena": w.buffer(np.array([7, 7, 2], np.uint32)), "x": w.buffer(x), "decay": w.buffer(decay)}
    buffers |= {"gain": w.buffer(gain), "state": w.buffer(state), "out": w.buffer(np.full((10, 68), 7, np.float32))}
    checks = [
        w.check("out", out.astype(np.float32), cpu=1e-5, webgpu=1e-5),
        w.check("state", kept.astype(np.float32), cpu=1e-5, webgpu=1e-5),
    ]
    w.template("recur", "recur", {"width": 68, "stride": 204, "offset": 64, "bucket": 10}, buffers, checks)


def gates(w: Writer) -> None:
    """A pass that is masked by its cell, one that stopped before, one that goes on; then a step that empties."""
    for title, free, cells in (("gate", 1, (0, 1, 0, 0, 1, 0)), ("gate of an empty step", 0, (1, 1, 0, 1, 1, 0))):
        step = rows_step(3).words()
        rows = [16 + 8 * t + 3 for t in range(3)]
        entries = [(0, 1, len(step), 1), (2, 3, len(step) + 1, 1), (4, 5, len(step) + 2, 1)]
        step = np.concatenate([step, np.array(rows, np.uint32), np.array(entries, np.uint32).reshape(-1)])
        step[8:11] = len(step) - 12, 3, free
        want, arena = step.copy(), np.array(cells, np.uint32)
        after = arena.copy()
        for row, (word, cell, _, _) in zip(rows, entries, strict=True):
            after[word] |= after[cell]
            if after[word]:
                want[row] = NONE
        if after[[0, 2, 4]].all() and not free:
            want[:2] = 0
        buffers = {"step": w.buffer(step), "arena": w.buffer(arena)}
        w.template(title, "gate", {"bucket": 8}, buffers, [w.check("step", want), w.check("arena", after)])


def shifts(w: Writer) -> None:
    """Rows that go back over a page's edge by a fresh total, by an old one, behind a replayed row; one without a slot, one that stays."""
    pages, rows = (9, 4, 7), 8
    positions = np.arange(28, 28 + rows)

    def slots(pos: Array) -> Array:
        return np.array([NONE if t == 1 else pages[p // 16] * 16 + p % 16 for t, p in enumerate(pos)], np.uint32)

    words = rows_step(rows).words()[: 16 + 8 * rows]
    moved = np.array([3, 3, 3, 3, 2, 7, 7, 0])  # 5 - 2; 6 - 4 of the early row; 6 + 5 - 4
    entries = [(0, 1, 1, 5, 0, 0, 0, 4), (2, 0, 3, 5, 4, 4, 1, 3)]  # total, fresh, cell, limit, known, first, early, rows
    step = np.concatenate([words, np.array(pages, np.uint32), np.array(entries, np.uint32).reshape(-1)])
    table = step[16 : 16 + 8 * rows].reshape(rows, 8)
    table[:, 2], table[:, 3], table[:, 4] = positions, slots(positions), len(words)
    step[11:13] = len(words) + len(pages), len(entries)
    want = step.copy()
    after = want[16 : 16 + 8 * rows].reshape(rows, 8)
    after[:, 2], after[:, 3] = positions - moved, slots(positions - moved)
    arena = np.array([99, 2, 6, NONE], np.uint32)
    totals = w.check("arena", np.array([3, 2, 11, NONE], np.uint32))
    w.template("shift", "shift", {"bucket": 8}, {"step": w.buffer(step), "arena": w.buffer(arena)}, [w.check("step", want), totals])


def epilogue(w: Writer, title: str, batch: Batch, rtol: float, atol: float) -> None:
    """A batch: statuses, outputs, put cells and their copies for the host."""
    checks = []
    for (status, channels, outs), answer in zip(batch.places, batch.oracle(), strict=True):
        checks.append(w.check("results", np.array([answer.status], np.uint32), status))
        places = [("results", at, value) for at, value in zip(outs, answer.outs, strict=True)]
        for chan, value in answer.puts.items():
            places += [("arena", channels[chan][1], value), ("results", channels[chan][2], value)]
        checks += [w.check(name, np.asarray(value), at, cpu=atol, webgpu=atol, rtol=rtol) for name, at, value in places]
    lanes = np.concatenate([np.full(64, NONE, np.uint32), batch.table])  # a lane table in the middle of a step buffer
    buffers = {"lanes": w.buffer(lanes), "arena": w.buffer(batch.arena), "results": w.buffer(batch.results)}
    for name, rows in (("logits", batch.logits), ("hidden", batch.hidden)):
        if batch.program.width(name):
            buffers[name] = w.buffer(rows)
    w.cases.append(
        {
            "title": title,
            "epilogue": batch.program.text,
            "lanes": len(batch.lanes),
            "lane_offset": 256,
            "buffers": buffers,
            "checks": checks,
        }
    )


def shapes(x: Any) -> Any:
    top = F["reduce_max"](x)
    return F["reshape"](x, (19, 19)) + 1.0, F["broadcast"](top, (2, 5)), F["iota"](OP_CELLS), F["reshape"](F["broadcast"](top, 1), ())


def ops(w: Writer) -> None:
    """Every elementwise op and reduction by dtype, over special values."""
    for name, (given, cells, rtol, atol) in OP_CASES.items():
        fn = shapes if name == "shapes" else given  # the suite's own counts on its number of cells
        result = over_cells(fn, *[(dtype, (OP_CELLS,)) for (dtype, _), _ in cells])
        lane = Lane(0, result.params, {i: values[:OP_CELLS] for i, (_, values) in enumerate(cells)})
        epilogue(w, f"ops: {name}", Batch(result.program, [lane]), rtol, atol)


def gumbel() -> Traced:
    rng = counter()
    return traced(lambda: F["gumbel_max"](intrinsics.output(0) / 0.7, rng.take()), VOCAB, HIDDEN)


def penalised() -> Traced:
    """Counts in a channel, a masked row, an entropy, a probability."""
    rng, counts, allowed, best = counter(), Chan("f32", (VOCAB,)), Chan("bool", (VOCAB,)), Chan("i32")

    def fn() -> Any:
        seen, mask = counts.take(), allowed.read()
        logits = F["select"](mask, intrinsics.output(1) - 0.5 * seen, float("-inf"))
        token = F["gumbel_max"](logits, rng.take())
        counts.put(seen + F["select"](F["iota"](VOCAB).cast("i32") == token, 1.0, 0.0))
        best.put(token)
        return token, F["reduce_max"](F["softmax"](logits)), F["entropy"](logits)

    return traced(fn, VOCAB, HIDDEN)


def mixed() -> Traced:
    """Both kinds of rows, vectors as outputs, random numbers."""
    rng = counter()

    def fn() -> Any:
        hidden = F["l2norm"](intrinsics.output(0, "hidden"))
        state = rng.take()
        return (
            hidden,
            F["reduce_max"](intrinsics.output(0)) + F["reduce_sum"](hidden),
            F["normal"](state, 7),
            F["rng_gumbel"](state, (2, 3)),
        )

    return traced(fn, VOCAB, HIDDEN)


PROGRAMS: dict[str, Callable[[], Traced]] = {
    "greedy": lambda: traced(greedy, VOCAB, HIDDEN),
    "gumbel": gumbel,
    "penalised": penalised,
    "mixed": mixed,
    "log_softmax": lambda: traced(lambda: F["log_softmax"](intrinsics.output(0)), VOCAB, HIDDEN),
    "min_p": lambda: traced(lambda: F["masked_argmax"](-intrinsics.output(0), F["min_p"](intrinsics.output(0), 0.02)), VOCAB, HIDDEN),
}


def programs(w: Writer) -> None:
    """Samplers and channels: three lanes a launch, one row with a NaN."""
    rng = np.random.default_rng(1)
    logits, hidden = rng.normal(0, 4, (ROWS, VOCAB)).astype(np.float32), rng.normal(0, 1, (ROWS, HIDDEN)).astype(np.float32)
    broken = logits.copy()
    broken[0, 700] = np.nan
    for name, make in PROGRAMS.items():
        result = make()
        lanes = []
        for i in range(3):
            cells: dict[int, Array] = {}
            for chan, (_, dtype, shape) in enumerate(result.program.chans):
                drawn = np.random.default_rng(i).integers(0, 2, shape).astype(NUMPY[dtype])
                cells[chan] = np.array([i, 0xFFFFFFFF - i], np.uint32) if dtype == "u32" else drawn
            lanes.append(Lane((2, 0, 1)[i], result.params, cells))
        epilogue(w, f"program: {name}", Batch(result.program, lanes, logits, hidden), 2e-6, 2e-6)
        if name == "greedy":
            epilogue(w, "program: greedy over a NaN", Batch(result.program, lanes, broken, hidden), 0, 0)


def memory_ops(w: Writer) -> None:
    """Ops that read and write memory at other elements."""
    for name, batch, rtol, atol in memory_programs.batches():
        epilogue(w, f"memory: {name}", batch, rtol, atol)


def maps(w: Writer) -> None:
    """Map programs, joined inputs, both kinds of rows."""
    chains: dict[str, tuple[Callable[..., Any], tuple[tuple[int, int], ...]]] = {
        "silu gate": (lambda g, u: g / (1.0 + F["exp"](-g)) * u, ((200, 1), (200, 103))),
        "sum": (lambda a, b: a + b, ((96, 0), (96, 0))),
    }
    for name, (fn, inputs) in chains.items():
        program: Program = map_program(fn, 2, 96)
        for rows, count in (("tokens", 3), ("reads", 8)):
            stride = inputs[0][0]
            joined = np.random.default_rng(count).standard_normal((8, stride)).astype(np.float32)
            step = rows_step(count) if rows == "tokens" else rows_step(1, tuple([0] * count))
            columns = [joined[:count, offset : offset + 96] for _, offset in inputs]
            want = padded(np.stack([run_map(program, [c[t] for c in columns]) for t in range(count)]), 8, 7)
            source = w.buffer(padded(joined[:count], 8))
            buffers = {"step": w.buffer(step.words()), "in0": source, "in1": source, "out": w.buffer(np.full((8, 96), 7, np.float32))}
            spec = {"program": program.text, "n": 96, "inputs": inputs, "rows": rows, "bucket": 8}
            check = w.check("out", want, cpu=1e-6, webgpu=1e-6, rtol=2e-6)
            w.cases.append({"title": f"map: {name}, {rows}", "map": spec, "buffers": buffers, "checks": [check]})


def text() -> str:
    """The whole file; the same on every run."""
    w = Writer()
    for part in (embeds, norms, linears, ropes, attentions, moves, recurrences, gates, shifts, ops, programs, memory_ops, maps):
        part(w)
    covered = {op.name for op in OPS.values() if op.kind in ("elementwise", "reduce", "view", "lookup", "pivot", "skeleton", "pick")}
    used = {node[0] for case in w.cases if "epilogue" in case for node in json.loads(case["epilogue"])["ops"]}
    assert covered <= used, f"no case runs {sorted(covered - used)}"
    lines = [json.dumps(case, separators=(",", ":")) for case in w.cases]
    blobs = [f"{json.dumps(name)}:{json.dumps(data)}" for name, data in sorted(w.blobs.items())]
    return '{"cases":[\n' + ",\n".join(lines) + '\n],"blobs":{\n' + ",\n".join(blobs) + "\n}}\n"


if __name__ == "__main__":
    TARGET.write_text(text())
    print(f"{TARGET.name}: {TARGET.stat().st_size} bytes")
