"""Lowering: a traced model becomes two straight lists of kernel steps, the body (every token) and the head (read-outs).

Fusions, each with the condition it proves:
- linears with one input and one format merge by rows when every reader can take a strided view of the product;
- rope(q), rope(k) and kv.append become one step when q, k, v are exactly one merged product, in that order;
- `h + linear(x)` accumulates into h's buffer when that add is the last reader of h and the only reader of the product;
- elementwise chains become one `map` Program per chain end;
- `rms_norm(read_out(h))` gathers its rows itself.
Buffers are shared by liveness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pie_core.device.protocol import ParamValue
from pie_core.eta.program import Program
from pie_core.poem.errors import PoemError
from pie_core.poem.graph import Graph, Node, map_program
from pie_core.poem.ops import ELEMENTWISE

Rows = Literal["tokens", "reads"]


@dataclass(frozen=True)
class View:
    """`width` elements of every row of a virtual buffer whose rows are `stride` long, from `offset` on."""

    buffer: int
    stride: int
    offset: int
    width: int

    @property
    def whole(self) -> bool:
        """True when the rows are contiguous: what a template kernel takes as input."""
        return self.offset == 0 and self.stride == self.width


@dataclass(frozen=True)
class Ref:
    """A binding of a step: an activation (virtual, later physical, buffer), a weight, a cache, the state slots, or a runtime table."""

    kind: Literal["act", "quants", "scales", "vector", "k_cache", "v_cache", "state", "freqs", "step", "arena"]
    index: int = 0  # act: buffer; caches: layer; freqs: head dimension
    names: tuple[str, ...] = ()  # weights: the parameters, merged by rows
    base: float = 0.0  # freqs: theta


@dataclass
class Step:
    """One kernel launch before buffers and buckets are known. `template` is None for a map Program."""

    template: str | None
    params: dict[str, ParamValue]
    bindings: dict[str, Ref]
    rows: Rows
    program: Program | None = None
    inputs: tuple[tuple[int, int], ...] = ()
    n: int = 0


@dataclass
class Lowered:
    """Steps of the body and the head, widths of the physical activation buffers, and where the outputs lie."""

    body: list[Step] = field(default_factory=list)
    head: list[Step] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)


def lower(graph: Graph) -> Lowered:
    """Lower a traced model. Raises PoemError for a use of an op that no kernel covers, naming the op."""
    return _Lowering(graph).run()


class _Lowering:
    def __init__(self, graph: Graph) -> None:
        self.g = graph
        self.uses: dict[int, list[Node]] = {n.id: [] for n in graph.nodes}
        for n in graph.nodes:
            for a in n.args:
                self.uses[a].append(n)
        self.outputs = {v: k for k, v in graph.outputs.items()}
        self.view: dict[int, View] = {}
        self.widths: list[int] = []  # of virtual buffers
        self.steps: list[Step] = []
        self.done: set[int] = set()
        self.rows: dict[int, Rows] = {}
        for n in graph.nodes:
            reads = n.op == "read_out" or any(self.rows[a] == "reads" for a in n.args)
            self.rows[n.id] = "reads" if reads else "tokens"

    # --- helpers

    def node(self, i: int) -> Node:
        return self.g.nodes[i]

    def fresh(self, width: int) -> View:
        self.widths.append(width)
        return View(len(self.widths) - 1, width, 0, width)

    def act(self, i: int, user: Node) -> Ref:
        v = self.view[i]
        if not v.whole:
            raise PoemError(f"{user.op} needs a contiguous input of width {v.width}, got a slice of a merged product")
        return Ref("act", v.buffer)

    def emit(self, node: Node, template: str, params: Mapping[str, ParamValue], **bindings: Ref) -> None:
        rows = self.rows[node.id]
        self.steps.append(Step(template, dict(params), bindings, rows))

    # --- the walk

    def run(self) -> Lowered:
        handlers = {
            "embed": self.embed,
            "rms_norm": self.rms_norm,
            "linear": self.linear,
            "kv_append": self.kv_append,
            "attention": self.attention,
            "recur": self.recur,
        }
        for n in self.g.nodes:
            if n.id in self.done:
                continue
            if n.op in handlers:
                handlers[n.op](n)
            elif n.op in ELEMENTWISE:
                self.elementwise(n)
            elif n.op == "read_out":
                for u in self.uses[n.id]:
                    if u.op != "rms_norm":
                        raise PoemError(f"read_out must be followed by rms_norm, got {u.op}")
            elif n.op not in ("tokens", "rope", "const"):  # rope is part of kv_append/attention, const of its chain
                raise PoemError(f"no kernel covers op {n.op!r}")
        return self.allocate()

    def embed(self, n: Node) -> None:
        w = n.matrix
        out = self.view[n.id] = self.fresh(n.width)
        self.emit(
            n,
            "embed",
            {"fmt": w.fmt, "vocab": w.rows, "width": w.cols},
            step=Ref("step"),
            arena=Ref("arena"),
            quants=Ref("quants", names=(w.name,)),
            scales=Ref("scales", names=(w.name,)),
            out=Ref("act", out.buffer),
        )

    def rms_norm(self, n: Node) -> None:
        source = self.node(n.args[0])
        x = self.node(source.args[0]) if source.op == "read_out" else source
        out = self.view[n.id] = self.fresh(n.width)
        self.emit(
            n,
            "rms_norm",
            {"width": n.width, "eps": n.attrs["eps"], "rows": self.rows[n.id]},
            step=Ref("step"),
            x=self.act(x.id, n),
            weight=Ref("vector", names=(n.matrix.name,)),
            out=Ref("act", out.buffer),
        )

    def linear(self, n: Node) -> None:
        add = self.residual(n)
        group = [n] if add else self.siblings(n)
        w = [m.matrix for m in group]
        m_total = sum(x.rows for x in w)
        if add:
            target, result = add
            out = self.view[result.id] = self.view[target]
            self.done.add(result.id)
        else:
            out = self.fresh(m_total)
            offset = 0
            for node in group:
                self.view[node.id] = View(out.buffer, m_total, offset, node.width)
                offset += node.width
                self.done.add(node.id)
        names = tuple(x.name for x in w)
        self.emit(
            n,
            "linear",
            {"fmt": w[0].fmt, "m": m_total, "k": w[0].cols, "add": bool(add), "rows": self.rows[n.id]},
            step=Ref("step"),
            x=self.act(n.args[0], n),
            quants=Ref("quants", names=names),
            scales=Ref("scales", names=names),
            out=Ref("act", out.buffer),
        )

    def residual(self, n: Node) -> tuple[int, Node] | None:
        """(id of h, the add node) when `h + n` may accumulate in h's buffer."""
        users = self.uses[n.id]
        if len(users) != 1 or users[0].op != "add" or n.id in self.outputs:
            return None
        add = users[0]
        other = [a for a in add.args if a != n.id]
        if len(other) != 1 or other[0] not in self.view or not self.view[other[0]].whole or other[0] in self.outputs:
            return None
        h = other[0]
        if self.rows[h] != self.rows[n.id] or any(u.id > n.id and u is not add for u in self.uses[h]):
            return None
        return h, add

    def siblings(self, n: Node) -> list[Node]:
        """Linears that may share one launch with n: same input, format and depth, and every reader takes slices."""

        def sliceable(m: Node) -> bool:
            return m.id not in self.outputs and all(u.op in ELEMENTWISE or u.op in ("rope", "kv_append") for u in self.uses[m.id])

        def same(m: Node) -> bool:
            return m.op == "linear" and m.id not in self.done and (m.matrix.fmt, m.matrix.cols) == (n.matrix.fmt, n.matrix.cols)

        if not sliceable(n):
            return [n]
        return [m for m in self.uses[n.args[0]] if same(m) and sliceable(m) and self.residual(m) is None]

    def kv_append(self, n: Node) -> None:
        k, v = (self.node(a) for a in n.args)
        layer = int(n.attrs["layer"])
        attn = next((m for m in self.g.nodes if m.op == "attention" and m.attrs["layer"] == layer), None)
        if attn is None:
            raise PoemError(f"layer {layer} appends to its cache but never attends to it")
        q = self.node(attn.args[0])
        if q.op != "rope" or k.op != "rope":
            raise PoemError(f"layer {layer}: attention without rotary positions on q and k has no kernel yet")
        parts = [self.view[q.args[0]], self.view[k.args[0]], self.view[v.id]]
        joint = parts[0].offset == 0 and all(p.buffer == parts[0].buffer for p in parts)
        packed = parts[1].offset == parts[0].width and parts[2].offset == parts[0].width + parts[1].width
        if not (joint and packed and parts[0].stride == sum(p.width for p in parts)):
            raise PoemError(f"layer {layer}: q, k and v must come from one input and share one weight format")
        dim, style, base = (q.attrs[x] for x in ("dim", "style", "base"))
        if any(k.attrs[x] != q.attrs[x] for x in ("dim", "style", "base")):
            raise PoemError(f"layer {layer}: q and k use different rotary settings")
        out = self.view[q.id] = self.fresh(q.width)
        self.emit(
            n,
            "rope_append",
            {"heads": q.width // int(dim), "kv_heads": k.width // int(dim), "head_dim": dim, "style": style},
            step=Ref("step"),
            qkv=Ref("act", parts[0].buffer),
            freqs=Ref("freqs", int(dim), base=float(base)),
            q=Ref("act", out.buffer),
            k_cache=Ref("k_cache", layer),
            v_cache=Ref("v_cache", layer),
        )

    def attention(self, n: Node) -> None:
        layer, dim = int(n.attrs["layer"]), int(n.attrs["dim"])
        out = self.view[n.id] = self.fresh(n.width)
        self.emit(
            n,
            "attention",
            {"heads": n.width // dim, "kv_heads": int(n.attrs["kv"]) // dim, "head_dim": dim, "scale": n.attrs["scale"]},
            step=Ref("step"),
            q=self.act(n.args[0], n),
            k_cache=Ref("k_cache", layer),
            v_cache=Ref("v_cache", layer),
            out=Ref("act", out.buffer),
        )

    def recur(self, n: Node) -> None:
        if self.rows[n.id] == "reads":
            raise PoemError(f"layer {n.attrs['layer']}: a recurrence behind read_out would miss the tokens that are not read out")
        out = self.view[n.id] = self.fresh(n.width)
        self.emit(
            n,
            "recur",
            {"width": n.width, "stride": self.g.state_width, "offset": n.attrs["offset"]},
            step=Ref("step"),
            arena=Ref("arena"),
            x=self.act(n.args[0], n),
            decay=Ref("vector", names=(n.matrix.name,)),
            gain=Ref("vector", names=(str(n.attrs["gain"]),)),
            state=Ref("state"),
            out=Ref("act", out.buffer),
        )

    def elementwise(self, n: Node) -> None:
        """Emit one map for a chain that ends here; inner nodes of a chain emit nothing."""
        users = self.uses[n.id]
        if users and n.id not in self.outputs and all(u.op in ELEMENTWISE for u in users):
            return
        program, leaves = map_program(self.g, n)
        out = self.view[n.id] = self.fresh(n.width)
        views = [self.view[i] for i in leaves]
        bindings = {f"in{k}": Ref("act", v.buffer) for k, v in enumerate(views)}
        self.steps.append(
            Step(
                None,
                {},
                {"step": Ref("step"), **bindings, "out": Ref("act", out.buffer)},
                self.rows[n.id],
                program,
                tuple((v.stride, v.offset) for v in views),
                n.width,
            )
        )

    # --- buffers

    def allocate(self) -> Lowered:
        """Map virtual buffers to as few physical ones as liveness allows; outputs and the residual stream stay live."""
        last = {r.index: i for i, s in enumerate(self.steps) for r in s.bindings.values() if r.kind == "act"}
        pinned = {self.view[i].buffer for i in self.outputs}
        result = Lowered()
        physical: dict[int, int] = {}
        free: dict[int, list[int]] = {}
        for i, s in enumerate(self.steps):
            for r in s.bindings.values():
                if r.kind != "act" or r.index in physical:
                    continue
                width = self.widths[r.index]
                # read-out rows and token rows differ in number: never share a buffer between them
                if s.rows == "tokens" and free.get(width):
                    physical[r.index] = free[width].pop()
                else:
                    physical[r.index] = len(result.widths)
                    result.widths.append(width)
            s.bindings = {k: Ref("act", physical[r.index]) if r.kind == "act" else r for k, r in s.bindings.items()}
            (result.head if s.rows == "reads" else result.body).append(s)
            for v, at in last.items():
                if at == i and v not in pinned and s.rows == "tokens":
                    free.setdefault(self.widths[v], []).append(physical[v])
        result.outputs = {name: physical[self.view[i].buffer] for i, name in self.outputs.items()}
        self.check(result.body, result.head)
        return result

    @staticmethod
    def check(body: Sequence[Step], head: Sequence[Step]) -> None:
        """No step may read and write one buffer, save the accumulator of `linear … add`."""
        for s in (*body, *head):
            written = {"out", "q", "k_cache", "v_cache"} & set(s.bindings)
            outs = {s.bindings[w] for w in written if s.template != "attention" or w == "out"}
            ins = {r for k, r in s.bindings.items() if k not in written}
            if outs & ins:
                raise PoemError(f"lowering aliased a buffer in step {s.template or 'map'}")
