"""Renders epilogue Programs as WGSL, one workgroup a lane.

Every name comes from a counter, every number from the verified program; nothing of a program's text reaches the source as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pie_core.codegen.layout import NONE, ROW, STATUS
from pie_core.codegen.schedule import Loop, Schedule, Sink, loop_values, scalar_key, scalar_order, schedule
from pie_core.codegen.wgsl_lib import helpers_for
from pie_core.eta.dtypes import is_finite_bits
from pie_core.eta.errors import ProgramError
from pie_core.eta.ops import OPS, Fold, variant
from pie_core.eta.program import Node, Program
from pie_core.eta.rules import show

MAX_ITERATIONS = 60_000  # loop iterations of one invocation, all loops together; lavapipe cuts at 65,535
TREE = 16  # partial results that one thread joins in the first step of a reduction
SLOTS = 8  # workgroup arrays for reductions that share their barriers
TYPES = {"f32": "f32", "i32": "i32", "u32": "u32", "bool": "bool"}
NAN_FOLD = Fold("u32", "0u", "f_nan({0})", "max({0}, {1})", "{0}")


@dataclass(frozen=True)
class WgslKernel:
    """WGSL text with entry point `main`. `bindings`: (name, "r" | "rw") in binding order, all in group 0. `grid`: workgroups along x, y, z;
    an epilogue's x is 0 and stands for the number of lanes. `iterations`: proven bound of one invocation."""

    source: str
    workgroup: int
    bindings: tuple[tuple[str, str], ...]
    iterations: int
    grid: tuple[int, int, int]


def word_of(expr: str, dtype: str) -> str:
    """WGSL: a value as its u32 word."""
    return {"f32": f"bitcast<u32>({expr})", "i32": f"bitcast<u32>({expr})", "u32": expr, "bool": f"select(0u, 1u, {expr})"}[dtype]


def value_of(word: str, dtype: str) -> str:
    """WGSL: a u32 word as a value."""
    return {"f32": f"bitcast<f32>({word})", "i32": f"bitcast<i32>({word})", "u32": word, "bool": f"{word} != 0u"}[dtype]


def constant(bits: int, dtype: str) -> str:
    """WGSL of a `const` op; an infinity or NaN is made at run time, WGSL refuses it in constant expressions."""
    word = f"{bits:#010x}u"
    if dtype == "f32" and not is_finite_bits(bits):
        word = f"({word} | runtime_zero)"
    return value_of(word, dtype)


class Writer:
    """Lines, fresh names, and the ops both kinds of kernel share."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.indent = "  "
        self._names = 0

    def line(self, text: str) -> None:
        """Append one line at the present indent."""
        self.lines.append(self.indent + text)

    def name(self) -> str:
        """A fresh name."""
        self._names += 1
        return f"v{self._names}"

    def let(self, expr: str, note: str = "") -> str:
        """Append a let; its name."""
        name = self.name()
        self.line(f"let {name} = {expr};" + (f"  // {note}" if note else ""))
        return name


def note_of(index: int, node: Node) -> str:
    """Comment that names the source op of a line."""
    args = ", ".join(f"%{a}" for a in node.args)
    return f"%{index} {node.name}({args}) {show(node.type)}"


class _Epilogue(Writer):
    def __init__(self, plan: Schedule, workgroup: int) -> None:
        super().__init__()
        self.plan = plan
        self.workgroup = workgroup
        self.scalars: dict[tuple[int, int], str] = {}  # (value, element) -> name
        self.seeds: dict[int, str] = {}
        self.bases: dict[int, str] = {}  # output value -> first element of its row
        self.offsets: dict[int, str] = {}  # lane word -> name
        self.iterations = 0
        self.slots = 0
        self.phase = 0
        self.uses: set[str] = {"lanes", "results"}

    # Scalars: emitted where first needed, at function scope.

    def lane(self, word: int) -> str:
        if word not in self.offsets:
            self.offsets[word] = self.let(f"lanes[lane + {word}u]")
        return self.offsets[word]

    def scalar(self, value: int, element: int = 0) -> str:
        """Name of element `element` of a value (0 for a scalar), as a function-scope let."""
        key = scalar_key(self.plan, value, element)
        for step in scalar_order(self.plan, *key, self.scalars, self.phase):
            node = self.plan.node(step[0])
            self.scalars[step] = self.let(self.scalar_expr(step[0], node, step[1]), note_of(step[0], node))
        return self.scalars[key]

    def scalar_expr(self, value: int, node: Node, element: int) -> str:
        if node.name == "param":
            return value_of(self.lane(self.plan.layout.param(int(node.attrs["slot"]))), node.dtype)
        if node.name == "const":
            return constant(int(node.attrs["bits"]), node.dtype)
        return self.element(value, node, f"{element}u", lambda arg: self.scalar(arg, element))

    def prepare(self, value: int) -> None:
        """Emit what a vector value needs at function scope before its loop starts."""
        node = self.plan.node(value)
        if node.name.startswith("rng_") and value not in self.seeds:
            key, counter = self.scalar(node.args[0], 0), self.scalar(node.args[0], 1)
            self.seeds[value] = self.let(f"rng_seed({key}, {counter})")
        elif node.name == "output":
            self.base(value, node)
        elif "chan" in node.attrs:
            self.lane(self.plan.layout.take(int(node.attrs["chan"])))

    def base(self, value: int, node: Node) -> str:
        if value not in self.bases:
            self.bases[value] = self.let(f"(lanes[lane + {ROW}u] + {node.attrs['index']}u) * {node.shape[0]}u")
        return self.bases[value]

    def element(self, value: int, node: Node, index: str, operand: Callable[[int], str]) -> str:
        """Expression of one element of a vector (or of a scalar op)."""
        self.prepare(value)
        if node.name == "output":
            region = str(node.attrs["name"])
            self.uses.add(region)
            return f"{region}[{self.base(value, node)} + {index}]"
        if "chan" in node.attrs:
            self.uses.add("arena")
            return value_of(f"arena[{self.lane(self.plan.layout.take(int(node.attrs['chan'])))} + {index}]", node.dtype)
        spec = OPS[node.name]
        if spec.kind == "generator":
            template = variant(node.name, (), node.dtype, spec.wgsl)
            return str(template.format(self.seeds.get(value, ""), i=index))
        dtypes = tuple(self.plan.program.ops[a].dtype for a in node.args)
        return str(variant(node.name, dtypes, node.dtype, spec.wgsl).format(*[operand(a) for a in node.args]))

    # Loops.

    def loop(self, loop: Loop, folds: list[_Accumulator]) -> None:
        plan = self.plan
        values = loop_values(plan, loop)
        for value in values:
            self.prepare(value)
            for arg in plan.node(value).args if OPS[plan.node(value).name].kind == "elementwise" else ():
                if not plan.node(plan.resolve(arg)).shape:
                    self.scalar(arg)
        for sink in loop.sinks:
            source = plan.node(sink.id).args[0] if sink.kind == "reduce" else sink.id
            if not plan.node(plan.resolve(source)).shape:
                self.scalar(source)
            for target in sink.targets:
                self.lane(target.word)
        for fold in folds:
            self.line(f"var {fold.acc}: {fold.rule.acc} = {fold.rule.init};")
            if fold.rule.arg:
                self.line(f"var {fold.arg} = 0u;")
        self.iterations += -(-loop.n // self.workgroup)
        self.line(f"for (var i = lid; i < {loop.n}u; i += {self.workgroup}u) {{  // at most {-(-loop.n // self.workgroup)} iterations")
        self.indent += "  "
        local: dict[int, str] = {}

        def operand(arg: int) -> str:
            arg = plan.resolve(arg)
            return local[arg] if arg in local else self.scalar(arg)

        for value in values:
            node = plan.node(value)
            local[value] = self.let(self.element(value, node, "i", operand), note_of(value, node))
        for fold in folds:
            fold.step(self, operand(fold.source))
        for sink in loop.sinks:
            if sink.kind == "store":
                self.store(sink, operand(sink.id), "i")
        self.indent = self.indent[:-2]
        self.line("}")

    def store(self, sink: Sink, value: str, index: str) -> None:
        word = word_of(value, self.plan.program.ops[sink.id].dtype)
        for target in sink.targets:
            self.uses.add(target.region)
            at = self.lane(target.word)
            self.line(f"if ({at} != {NONE:#x}u) {{ {target.region}[{at} + {index}] = {word}; }}")

    # Reductions: each thread's part, joined in two steps of a fixed tree; every thread ends with the result.

    def reduce(self, folds: Sequence[_Accumulator]) -> None:
        while folds:
            batch: list[_Accumulator] = []
            slot = 0
            for fold in folds:
                if slot + 1 + fold.rule.arg > SLOTS:
                    break
                fold.slot = slot
                slot += 1 + fold.rule.arg
                batch.append(fold)
            folds = folds[len(batch) :]
            self.slots = max(self.slots, slot)
            self._join(batch)

    def _join(self, batch: Sequence[_Accumulator]) -> None:
        groups = self.workgroup // TREE
        for fold in batch:
            fold.save(self, "part", "lid")
        self.line("workgroupBarrier();")
        self.line(f"if (lid < {groups}u) {{")
        self.indent += "  "
        for fold in batch:
            fold.load(self, "part", f"lid * {TREE}u")
        self.line(f"for (var j = 1u; j < {TREE}u; j += 1u) {{  // {TREE - 1} iterations")
        for fold in batch:
            fold.join(self, "part", f"lid * {TREE}u + j")
        self.line("}")
        for fold in batch:
            fold.save(self, "whole", "lid")
        self.indent = self.indent[:-2]
        self.line("}")
        self.line("workgroupBarrier();")
        for fold in batch:
            fold.load(self, "whole", "0u")
        if groups > 1:
            self.line(f"for (var j = 1u; j < {groups}u; j += 1u) {{  // {groups - 1} iterations")
            for fold in batch:
                fold.join(self, "whole", "j")
            self.line("}")
        self.iterations += TREE - 1 + groups - 1

    # The whole kernel.

    def run(self) -> None:
        plan = self.plan
        status: list[str] = []
        for number, phase in enumerate(plan.phases):
            self.phase = number
            self.line(f"// phase {number}")
            folds: list[_Accumulator] = []
            for loop in phase.loops:
                mine = [_Accumulator(self, plan, sink) for sink in loop.sinks if sink.kind != "store"]
                self.loop(loop, mine)
                folds += mine
            self.reduce(folds)
            for fold in folds:
                if fold.id is None:
                    status.append(fold.acc)
                    continue
                node = plan.node(fold.id)
                final = fold.rule.final.format(fold.acc)
                self.scalars[fold.id, 0] = self.let(f"bitcast<i32>({fold.arg})" if fold.rule.arg else final, note_of(fold.id, node))
        self.phase = len(plan.phases)
        self.line("// scalar results")
        values = [(sink, self.scalar(sink.id)) for sink in plan.stores]
        for sink in plan.stores:
            for target in sink.targets:
                self.lane(target.word)
        at = self.lane(STATUS)
        self.line("if (lid == 0u) {")
        self.indent += "  "
        for sink, value in values:
            self.store(sink, value, "0u")
        self.line(f"if ({at} != {NONE:#x}u) {{ results[{at}] = {' | '.join(status) or '0u'}; }}")
        self.indent = self.indent[:-2]
        self.line("}")

    def source(self) -> WgslKernel:
        self.run()
        bindings = tuple((n, a) for n, a in BINDINGS if n in self.uses)
        declared = [
            f"@group(0) @binding({i}) var<storage, {'read' if a == 'r' else 'read_write'}> {n}: array<{BINDING_TYPES.get(n, 'u32')}>;"
            for i, (n, a) in enumerate(bindings)
        ]
        shared = []
        for slot in range(self.slots):
            shared.append(f"var<workgroup> part{slot}: array<u32, {self.workgroup}>;")
            shared.append(f"var<workgroup> whole{slot}: array<u32, {self.workgroup // TREE}>;")
        body = "\n".join(self.lines)
        head = [f"// One workgroup of {self.workgroup} a lane; at most {self.iterations} loop iterations an invocation."]
        if "runtime_zero" in body:
            shared.append("var<private> runtime_zero: u32;")
        main = [
            f"@compute @workgroup_size({self.workgroup})",
            "fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lid: u32) {",
            f"  let lane = group.x * {self.plan.layout.words}u;",
            body,
            "}",
        ]
        text = "\n".join(filter(None, [*head, *declared, *shared, helpers_for(body), *main])) + "\n"
        return WgslKernel(text, self.workgroup, bindings, _checked(self.iterations), (0, 1, 1))


BINDINGS = (("logits", "r"), ("hidden", "r"), ("arena", "rw"), ("lanes", "r"), ("results", "rw"))
BINDING_TYPES = {"logits": "f32", "hidden": "f32"}


class _Accumulator:
    """One reduction of a loop in WGSL: its variables and the code of each step."""

    def __init__(self, writer: Writer, plan: Schedule, sink: Sink) -> None:
        self.id = sink.id if sink.kind == "reduce" else None  # None: the NaN flag of a row
        self.slot = 0
        self.acc, self.arg = writer.name(), writer.name()
        if self.id is None:
            self.rule, self.source = NAN_FOLD, sink.id
        else:
            node = plan.node(sink.id)
            self.source = node.args[0]
            self.rule = variant(node.name, (plan.program.ops[self.source].dtype,), node.dtype, OPS[node.name].wgsl)

    def step(self, writer: Writer, value: str) -> None:
        """Take one element."""
        lifted = self.rule.lift.format(value)
        if self.rule.arg:
            key = writer.let(lifted)
            writer.line(f"if ({key} > {self.acc}) {{ {self.acc} = {key}; {self.arg} = i; }}")
        else:
            writer.line(f"{self.acc} = {self.rule.join.format(self.acc, lifted)};")

    def save(self, writer: Writer, array: str, index: str) -> None:
        """Write the accumulator to workgroup memory."""
        writer.line(f"{array}{self.slot}[{index}] = {word_of(self.acc, self.rule.acc)};")
        if self.rule.arg:
            writer.line(f"{array}{self.slot + 1}[{index}] = {self.arg};")

    def load(self, writer: Writer, array: str, index: str) -> None:
        """Read the accumulator from workgroup memory."""
        writer.line(f"{self.acc} = {value_of(f'{array}{self.slot}[{index}]', self.rule.acc)};")
        if self.rule.arg:
            writer.line(f"{self.arg} = {array}{self.slot + 1}[{index}];")

    def join(self, writer: Writer, array: str, index: str) -> None:
        """Join the accumulator with one in workgroup memory."""
        other = value_of(f"{array}{self.slot}[{index}]", self.rule.acc)
        if not self.rule.arg:
            writer.line(f"  {self.acc} = {self.rule.join.format(self.acc, other)};")
            return
        key, at = writer.name(), writer.name()
        writer.line(f"  let {key} = {other};")
        writer.line(f"  let {at} = {array}{self.slot + 1}[{index}];")
        writer.line(f"  if ({key} > {self.acc} || ({key} == {self.acc} && {at} < {self.arg})) {{ {self.acc} = {key}; {self.arg} = {at}; }}")


def _checked(iterations: int) -> int:
    if iterations > MAX_ITERATIONS:
        raise ProgramError(
            f"the kernel would run {iterations} loop iterations an invocation, the bound is {MAX_ITERATIONS}: "
            "use fewer dependent reductions or shorter vectors"
        )
    return iterations


def emit_epilogue_wgsl(program: Program, workgroup: int = 256) -> WgslKernel:
    """The kernel of an epilogue: grid (lanes, 1, 1), one workgroup a lane. Bindings, only those used: logits [R, V] f32, hidden [R, d]
    f32, arena u32 (rw), lanes u32, results u32 (rw). `workgroup` is a multiple of 16 up to 256. Raises ProgramError when a bound does not
    hold."""
    if workgroup % TREE or not TREE <= workgroup <= 256:
        raise ValueError(f"workgroup must be a multiple of {TREE} from {TREE} to 256, got {workgroup}")
    return _Epilogue(schedule(program), workgroup).source()
