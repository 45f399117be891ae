"""Reductions in WGSL: each thread's part, and parts joined in a fixed tree, through workgroup memory or through scratch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pie_core.codegen.schedule import Schedule, Sink
from pie_core.codegen.wgsl_writer import Writer, note_of, value_of, word_of
from pie_core.eta.ops import OPS, Fold, variant

TREE = 16  # partial results that one thread joins in the first step of a reduction
ONE_STEP = 64  # largest workgroup whose parts are joined in one step
SLOTS = 8  # workgroup arrays for reductions that share their barriers
THREADS = "threads"  # a let of the kernel that holds a join in one step
NAN_FOLD = Fold("u32", "0u", "f_nan({0})", "max({0}, {1})", "{0}")


class Accumulator:
    """One reduction of a loop: its variables and the code of each step. `id` is the reduction, or the read-out whose NaN it looks for."""

    def __init__(self, writer: Writer, plan: Schedule, sink: Sink) -> None:
        self.sink = sink
        self.id = sink.id
        self.slot = 0
        self.acc = writer.name(f"{'nan' if sink.kind == 'nan' else 'fold'}_{sink.id}")
        self.arg = f"{self.acc}_at"
        node = plan.node(sink.id)
        if sink.kind == "nan":
            self.rule, self.source, self.note = NAN_FOLD, sink.id, f"1 for a NaN in %{sink.id}"
        else:
            self.note = note_of(sink.id, node)
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
        writer.line(f"var {self.acc}: {self.rule.acc} = {self.rule.init};  // {self.note}")
        if self.rule.arg:
            writer.line(f"var {self.arg} = 0u;")

    def step(self, writer: Writer, value: str, index: str, acc: str = "") -> None:
        """Take one element, into another variable if `acc` names one."""
        lifted = self.rule.lift.format(value)
        if self.rule.arg:
            key = writer.let(lifted, f"key_{self.id}")
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
        key, at = writer.let(other, f"other_{self.id}"), writer.let(words[1], f"other_{self.id}_at")
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


class Joiner:
    """Joins the accumulators of all threads of a workgroup in a fixed tree; knows the workgroup arrays that this took.

    A small workgroup joins in one step (barriers are what a software adapter pays for), each join in the other half of its arrays, so that
    one barrier does. A large one joins parts of TREE threads, then the parts."""

    def __init__(self, workgroup: int) -> None:
        self.workgroup = workgroup
        self.single = workgroup <= ONE_STEP
        self._used: set[tuple[str, int]] = set()
        self._half = 0

    @property
    def iterations(self) -> int:
        """Loop iterations of one join."""
        return self.workgroup if self.single else TREE - 1 + self.workgroup // TREE - 1

    def join(self, writer: Writer, folds: Sequence[Accumulator]) -> None:
        """Write the joins; every thread ends with the results."""
        for batch in batches(folds):
            writer.line(f"// the parts of all threads joined: {', '.join(fold.acc for fold in batch)}")
            if self.single:
                self._one_step(writer, batch)
            else:
                self._two_steps(writer, batch)

    def again(self, writer: Writer) -> None:
        """Stands at the end of a loop around a join: the next round writes the same arrays."""
        if self.single:
            writer.line("workgroupBarrier();")

    def head(self, word: str) -> list[str]:
        """Lets at the top of the kernel. `word`: an index of something, below 2^31. Where Mesa knows how often a join loops, it unrolls it:
        three quarters of the time that lavapipe takes to compile a kernel."""
        if not self.single or not self._used:
            return []
        return [
            f"  let {THREADS} = min({self.workgroup}u, {word} + {self.workgroup}u);  // {self.workgroup}, but no compiler may count on it"
        ]

    def declarations(self) -> list[str]:
        """The workgroup arrays."""
        sizes = {"part": self.workgroup, "whole": self.workgroup // TREE}
        return [f"var<workgroup> {name}{n}: array<u32, {sizes[name]}>;" for name, n in sorted(self._used, key=lambda u: (u[1], u[0]))]

    def _arrays(self, name: str, fold: Accumulator) -> list[str]:
        first = fold.slot + SLOTS * self._half
        self._used |= {(name, first + w) for w in range(fold.words)}
        return [f"{name}{first + w}" for w in range(fold.words)]

    def _one_step(self, writer: Writer, batch: Sequence[Accumulator]) -> None:
        for fold in batch:
            fold.save(writer, self._arrays("part", fold), "lid")
        writer.line("workgroupBarrier();")
        for fold in batch:
            fold.load(writer, self._arrays("part", fold), "0u")
        with writer.loop(f"var j = 1u; j < {THREADS}; j += 1u", self.workgroup - 1):
            for fold in batch:
                fold.join(writer, [f"{a}[j]" for a in self._arrays("part", fold)])
        self._half = 1 - self._half

    def _two_steps(self, writer: Writer, batch: Sequence[Accumulator]) -> None:
        groups = self.workgroup // TREE
        for fold in batch:
            fold.save(writer, self._arrays("part", fold), "lid")
        writer.line("workgroupBarrier();")
        with writer.block(f"if (lid < {groups}u)"):
            for fold in batch:
                fold.load(writer, self._arrays("part", fold), f"lid * {TREE}u")
            with writer.loop(f"var j = 1u; j < {TREE}u; j += 1u", TREE - 1):
                for fold in batch:
                    fold.join(writer, [f"{a}[lid * {TREE}u + j]" for a in self._arrays("part", fold)])
            for fold in batch:
                fold.save(writer, self._arrays("whole", fold), "lid")
        writer.line("workgroupBarrier();")
        for fold in batch:
            fold.load(writer, self._arrays("whole", fold), "0u")
        with writer.loop(f"var j = 1u; j < {groups}u; j += 1u", groups - 1):
            for fold in batch:
                fold.join(writer, [f"{a}[j]" for a in self._arrays("whole", fold)])
