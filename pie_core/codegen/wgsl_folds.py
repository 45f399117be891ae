"""Reductions in WGSL: each thread's part, and parts joined in a fixed tree, through workgroup memory or through scratch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pie_core.codegen.schedule import Schedule, Sink
from pie_core.codegen.wgsl_writer import Writer, value_of, word_of
from pie_core.eta.ops import OPS, Fold, variant

TREE = 16  # partial results that one thread joins in the first step of a reduction
SLOTS = 8  # workgroup arrays for reductions that share their barriers
NAN_FOLD = Fold("u32", "0u", "f_nan({0})", "max({0}, {1})", "{0}")


class Accumulator:
    """One reduction of a loop: its variables and the code of each step. `id` is the reduction, or the read-out whose NaN it looks for."""

    def __init__(self, writer: Writer, plan: Schedule, sink: Sink) -> None:
        self.sink = sink
        self.id = sink.id
        self.slot = 0
        self.acc, self.arg = writer.name(), writer.name()
        if sink.kind == "nan":
            self.rule, self.source = NAN_FOLD, sink.id
        else:
            node = plan.node(sink.id)
            self.source = node.args[0]
            self.rule = variant(node.name, (plan.program.ops[self.source].dtype,), node.dtype, OPS[node.name].wgsl)

    @property
    def key(self) -> tuple[str, int]:
        """What it reduces: (kind of sink, id)."""
        return self.sink.kind, self.id

    @property
    def words(self) -> int:
        """u32 words of a partial result."""
        return 1 + self.rule.arg

    @property
    def ordered(self) -> bool:
        """Whether the result depends on the order of joining (a sum of f32)."""
        return bool(self.rule.acc == "f32")

    @property
    def final(self) -> str:
        """The result, out of the accumulator."""
        return f"bitcast<i32>({self.arg})" if self.rule.arg else str(self.rule.final.format(self.acc))

    def start(self, writer: Writer) -> None:
        """Declare the variables at their start."""
        writer.line(f"var {self.acc}: {self.rule.acc} = {self.rule.init};")
        if self.rule.arg:
            writer.line(f"var {self.arg} = 0u;")

    def step(self, writer: Writer, value: str, index: str, acc: str = "") -> None:
        """Take one element, into another variable if `acc` names one."""
        lifted = self.rule.lift.format(value)
        if self.rule.arg:
            key = writer.let(lifted)
            writer.line(f"if ({key} > {self.acc}) {{ {self.acc} = {key}; {self.arg} = {index}; }}")
        else:
            acc = acc or self.acc
            writer.line(f"{acc} = {self.rule.join.format(acc, lifted)};")

    def save(self, writer: Writer, arrays: Sequence[str], index: str) -> None:
        """Write the accumulator at `index` of one array a word."""
        for array, word in zip(arrays, self.partial(), strict=True):
            writer.line(f"{array}[{index}] = {word};")

    def partial(self) -> list[str]:
        """The accumulator as words."""
        return [word_of(self.acc, self.rule.acc), *([self.arg] if self.rule.arg else [])]

    def load(self, writer: Writer, arrays: Sequence[str], index: str) -> None:
        """Read the accumulator."""
        writer.line(f"{self.acc} = {value_of(f'{arrays[0]}[{index}]', self.rule.acc)};")
        if self.rule.arg:
            writer.line(f"{self.arg} = {arrays[1]}[{index}];")

    def join(self, writer: Writer, words: Sequence[str]) -> None:
        """Join the accumulator with another one, given as words."""
        other = value_of(words[0], self.rule.acc)
        if not self.rule.arg:
            writer.line(f"{self.acc} = {self.rule.join.format(self.acc, other)};")
            return
        key, at = writer.let(other), writer.let(words[1])
        writer.line(f"if ({key} > {self.acc} || ({key} == {self.acc} && {at} < {self.arg})) {{ {self.acc} = {key}; {self.arg} = {at}; }}")


def batches(folds: Sequence[Accumulator]) -> Iterator[list[Accumulator]]:
    """Folds that fit the workgroup arrays together; sets their slots."""
    batch: list[Accumulator] = []
    slot = 0
    for fold in folds:
        if slot + fold.words > SLOTS:
            yield batch
            batch, slot = [], 0
        fold.slot = slot
        slot += fold.words
        batch.append(fold)
    if batch:
        yield batch


def tree_iterations(workgroup: int) -> int:
    """Loop iterations of `join_threads`."""
    return TREE - 1 + max(workgroup // TREE - 1, 0)


def join_threads(writer: Writer, folds: Sequence[Accumulator], workgroup: int) -> set[str]:
    """Join the accumulators of all threads in two steps of a fixed tree; every thread ends with the results. The workgroup arrays used."""
    used: set[str] = set()
    for batch in batches(folds):
        used |= {f"{name}{fold.slot + w}" for fold in batch for w in range(fold.words) for name in ("part", "whole")}
        _join(writer, batch, workgroup // TREE)
    return used


def _arrays(name: str, fold: Accumulator) -> list[str]:
    return [f"{name}{fold.slot + w}" for w in range(fold.words)]


def _join(writer: Writer, batch: Sequence[Accumulator], groups: int) -> None:
    for fold in batch:
        fold.save(writer, _arrays("part", fold), "lid")
    writer.line("workgroupBarrier();")
    with writer.block(f"if (lid < {groups}u)"):
        for fold in batch:
            fold.load(writer, _arrays("part", fold), f"lid * {TREE}u")
        with writer.loop(f"var j = 1u; j < {TREE}u; j += 1u", TREE - 1):
            for fold in batch:
                fold.join(writer, [f"{a}[lid * {TREE}u + j]" for a in _arrays("part", fold)])
        for fold in batch:
            fold.save(writer, _arrays("whole", fold), "lid")
    writer.line("workgroupBarrier();")
    for fold in batch:
        fold.load(writer, _arrays("whole", fold), "0u")
    if groups > 1:
        with writer.loop(f"var j = 1u; j < {groups}u; j += 1u", groups - 1):
            for fold in batch:
                fold.join(writer, [f"{a}[j]" for a in _arrays("whole", fold)])


def shared_arrays(used: set[str], workgroup: int) -> list[str]:
    """Declarations of the workgroup arrays that `join_threads` used."""
    sizes = {"part": workgroup, "whole": workgroup // TREE}
    order = sorted(used, key=lambda name: (int(name.lstrip("partwhole")), name))
    return [f"var<workgroup> {name}: array<u32, {sizes[name.rstrip('0123456789')]}>;" for name in order]
