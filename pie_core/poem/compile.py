"""A lowered model on a device: weights uploaded, activations and KV caches allocated, plans built per bucket on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from struct import pack

from pie_core.device.protocol import PAGE_TOKENS, Buffer, Device, KernelSpec, Launch, MapSpec, Plan, Weight
from pie_core.device.templates import template
from pie_core.poem.errors import PoemError
from pie_core.poem.graph import Graph
from pie_core.poem.lower import Lowered, Ref, Step, lower
from pie_core.weights import Checkpoint

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Tables:
    """Buffers that the runtime owns and kernels read: the step buffer and the channel arena."""

    step: Buffer
    arena: Buffer


class CompiledModel:
    """Body and head plans of one model on one device. `logits` is f32 [max_reads, vocab], `hidden` f32 [max_reads, width].
    `caches` and `cache_widths` are those of the layers that have one; `state` is f32 [slots, state width] of a recurrent model."""

    def __init__(
        self,
        device: Device,
        graph: Graph,
        checkpoint: Checkpoint,
        tables: Tables,
        *,
        pages: int,
        max_reads: int,
        slots: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.device = device
        self.max_tokens = device.token_buckets[-1]
        self.max_reads = min(max_reads, self.max_tokens)
        self._lowered: Lowered = lower(graph)
        self._tables = tables
        self._plans: dict[tuple[str, int], Plan] = {}
        self.weights = _upload(device, graph, self._lowered, checkpoint, progress)
        self._freqs = {r: self._freq_table(r.index, r.base) for r in _refs(self._lowered, "freqs")}
        heads = {s.bindings["out"].index for s in self._lowered.head if "out" in s.bindings}
        self._acts = [
            device.create_buffer(4 * width * (self.max_reads if i in heads else self.max_tokens), f"act{i}")
            for i, width in enumerate(self._lowered.widths)
        ]
        rows = pages * PAGE_TOKENS
        self._caches = {
            i: (device.create_buffer(4 * rows * width, f"k{i}"), device.create_buffer(4 * rows * width, f"v{i}"))  # [pages*16, width]
            for i, width in enumerate(graph.cache_widths)
            if width
        }
        self.caches = list(self._caches.values())
        self.cache_widths = tuple(width for width in graph.cache_widths if width)
        self.state = device.create_buffer(4 * slots * graph.state_width, "state") if graph.state_width else None
        self.logits = self._acts[self._lowered.outputs["logits"]]
        self.hidden = self._acts[self._lowered.outputs["hidden"]]

    @staticmethod
    def page_bytes(graph: Graph) -> int:
        """Bytes of one KV page over all layers, K and V, f32."""
        return sum(2 * 4 * PAGE_TOKENS * w for w in graph.cache_widths)

    @staticmethod
    def slot_bytes(graph: Graph) -> int:
        """Bytes of one slot of recurrent state, all layers together; 0 where the model has none."""
        return 4 * graph.state_width

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the device."""
        return sum(w.nbytes for w in {id(w): w for w in self.weights.values()}.values())

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds `rows`. Raises PoemError when none does."""
        for b in self.device.token_buckets:
            if rows <= b:
                return b
        raise PoemError(f"{rows} rows are over the largest bucket {self.max_tokens}")

    def body(self, rows: int) -> Plan:
        """The plan that takes `rows` tokens through all layers."""
        return self._plan("body", self._lowered.body, self.bucket(rows))

    def head(self, rows: int) -> Plan:
        """The plan from the residual stream of `rows` read-outs to hidden and logits."""
        return self._plan("head", self._lowered.head, min(self.bucket(rows), self.max_reads))

    def rebind(self, tables: Tables) -> None:
        """Other tables from now on: plans that name a replaced one are built again when they are used next."""
        replaced = {kind for kind in ("step", "arena") if getattr(tables, kind) is not getattr(self._tables, kind)}
        self._tables = tables
        for part, steps in (("body", self._lowered.body), ("head", self._lowered.head)):
            if any(r.kind in replaced for s in steps for r in s.bindings.values()):
                self._plans = {key: plan for key, plan in self._plans.items() if key[0] != part}

    def launches(self, rows: int, reads: int) -> list[Launch]:
        """All launches of a step, for benches that time kernels alone."""
        steps = [(s, self.bucket(rows)) for s in self._lowered.body]
        steps += [(s, min(self.bucket(reads), self.max_reads)) for s in self._lowered.head] if reads else []
        return [self._launch(s, b) for s, b in steps]

    def copy_page(self, src: int, dst: int) -> None:
        """Copy one KV page of every layer."""
        for (k, v), width in zip(self.caches, self.cache_widths, strict=True):
            size = 4 * PAGE_TOKENS * width
            self.device.copy(k, src * size, k, dst * size, size)
            self.device.copy(v, src * size, v, dst * size, size)

    # --- building

    def _plan(self, part: str, steps: list[Step], bucket: int) -> Plan:
        plan = self._plans.get((part, bucket))
        if plan is None:
            plan = self._plans[part, bucket] = self.device.compile_plan([self._launch(s, bucket) for s in steps])
        return plan

    def _launch(self, step: Step, bucket: int) -> Launch:
        spec: KernelSpec
        if step.template is None:
            assert step.program is not None
            spec = MapSpec(step.program, step.n, step.inputs, step.rows, bucket)
        else:
            spec = template(step.template, **step.params, bucket=bucket)
        return Launch(self.device.compile(spec), {name: self._resolve(r) for name, r in step.bindings.items()})

    def _resolve(self, r: Ref) -> Buffer:
        if r.kind == "act":
            return self._acts[r.index]
        if r.kind in ("quants", "vector"):
            return self.weights[r.names].quants
        if r.kind == "scales":
            w = self.weights[r.names]
            return w.scales or w.quants
        if r.kind in ("k_cache", "v_cache"):
            k, v = self._caches[r.index]
            return k if r.kind == "k_cache" else v
        if r.kind == "freqs":
            return self._freqs[r]
        if r.kind == "state":
            assert self.state is not None  # the graph has a recurrence
            return self.state
        return self._tables.step if r.kind == "step" else self._tables.arena

    def _freq_table(self, dim: int, base: float) -> Buffer:
        data = pack(f"<{dim // 2}f", *(base ** (-2 * j / dim) for j in range(dim // 2)))  # [dim/2]
        buffer = self.device.create_buffer(len(data), "freqs")
        self.device.write(buffer, 0, data)
        return buffer


def _refs(lowered: Lowered, *kinds: str) -> list[Ref]:
    """Distinct bindings of these kinds, in order of first use."""
    return list(dict.fromkeys(r for s in (*lowered.body, *lowered.head) for r in s.bindings.values() if r.kind in kinds))


def _upload(
    device: Device, graph: Graph, lowered: Lowered, checkpoint: Checkpoint, progress: Progress | None
) -> dict[tuple[str, ...], Weight]:
    """Upload every distinct (merged) parameter once; a tied matrix is shared."""
    keys = [r.names for r in _refs(lowered, "quants", "vector")]
    total = sum(checkpoint.tensor(name).nbytes for key in keys for name in key)
    done = 0

    def rows(names: tuple[str, ...]) -> Iterator[memoryview]:
        nonlocal done
        for chunk in chain.from_iterable(checkpoint.rows(name) for name in names):
            yield chunk
            done += len(chunk)
            if progress:
                progress(done, total)

    weights: dict[tuple[str, ...], Weight] = {}
    for key in keys:
        first = graph.parameters[key[0]]
        count = sum(graph.parameters[n].rows for n in key)
        weights[key] = device.upload(first.fmt, count, first.cols, rows(key), label="+".join(key))
    return weights
