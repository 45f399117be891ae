"""Epilogue programs as word lists for the virtual machine of the cpu device (kernels_wasm/vm.c); the words are in cpu_code.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pie_core.codegen.access import access
from pie_core.codegen.cpu_code import (
    ARENA,
    HIDDEN,
    INPUT,
    LANES,
    LOGITS,
    LOOP,
    ONCE,
    OUT,
    RESULTS,
    SCRATCH,
    WHOLE,
    Code,
    CpuProgram,
    operand_word,
)
from pie_core.codegen.cpu_memory_ops import emit_lookup, emit_skeleton, emit_view
from pie_core.codegen.cpu_work import MAX_WORK, ROW, block_work, skeleton_work
from pie_core.codegen.layout import ROW as FIRST_ROW
from pie_core.codegen.layout import STATUS
from pie_core.codegen.schedule import (
    Loop,
    Place,
    Schedule,
    Sink,
    Skeleton,
    Target,
    local_args,
    loop_values,
    scalar_args,
    scalar_key,
    scalar_order,
    schedule,
)
from pie_core.eta.errors import ProgramError
from pie_core.eta.ops import OPS, variant
from pie_core.eta.program import Node, Program

__all__ = ["INPUT", "LOOP", "MAX_WORK", "ONCE", "OUT", "Code", "CpuProgram", "apply", "emit_epilogue_cpu", "operand_word"]

REGIONS = {"arena": ARENA, "results": RESULTS, "logits": LOGITS, "hidden": HIDDEN, "scratch": SCRATCH}


def apply(code: Code, program: Program, node: Node, d: int, operands: Sequence[int], *, element: int = 0) -> None:
    """Append one elementwise op, generator or repeated scalar; `element` is the index a scalar generator starts at."""
    row = OPS[node.name]
    if row.kind == "view":
        code.emit("copy", d, operands[0])
        return
    if "" in row.c:
        key = ""
    else:
        dtypes = [program.ops[a].dtype for a in node.args]
        key = f"{dtypes[0]}>{node.dtype}" if node.name == "cast" else dtypes[-1]
    a, b, c = [*operands, 0, 0, 0][:3]
    code.emit(node.name, d, a, b, c=c, key=key, imm=element)


class _Epilogue:
    def __init__(self, plan: Schedule) -> None:
        self.plan = plan
        self.code = Code()
        self.number = 0  # of the phase
        self.known: dict[tuple[int, int], int] = {}  # (value, element) -> scalar slot
        self.pivots = {s.id: s.result[0] for phase in plan.phases for s in phase.skeletons}
        self.work = 0
        self.looping = False  # inside of a loop scalars are known already

    # Operands -----------------------------------------------------------------------------------------------------------------

    def source(self, value: int) -> int | None:
        """Operand of a resolved value that lies in memory now."""
        place = self.plan.loads(value, self.number)
        return None if place is None else _operand(place)

    def whole(self, value: int) -> int:
        """Operand of all of a value in memory."""
        place = self.plan.loads(self.plan.resolve(value), self.number)
        assert place is not None, f"value {value} is not in memory in phase {self.number}"
        return _operand(place) | WHOLE

    def scalar(self, value: int, element: int = 0) -> int:
        """Slot of one element of a value, computed in the current ONCE block."""
        key = scalar_key(self.plan, value, element)
        if key not in self.known:
            assert not self.looping, f"element {element} of value {value} is computed inside of a loop"
            for step in scalar_order(self.plan, *key, self.known, self.number):
                self.known[step] = self.compute(*step)
        return self.known[key]

    def compute(self, value: int, element: int) -> int:
        """A new slot with one element of a value whose operands are known."""
        node, code = self.plan.node(value), self.code
        d = code.slot()
        source = self.source(value)
        if source is not None:
            code.emit("load_bool" if node.dtype == "bool" else "load", d, source, imm=element)
        elif node.name == "param":
            load = "load_bool" if node.dtype == "bool" else "load"
            code.emit(load, d, operand_word(LANES, self.plan.layout.param(int(node.attrs["slot"]))))
        elif node.name == "const":
            bits = int(node.attrs["bits"])
            code.emit("const", d, imm=0xFFFFFFFF if node.dtype == "bool" and bits else bits)
        else:
            self.make(value, d, lambda a: self.scalar(a, element), element)
            if OPS[node.name].kind != "elementwise":
                code.emit("splat", d, d)  # only the first element is the one wanted
        return d

    def make(self, value: int, d: int, same: Callable[[int], int], element: int = 0) -> None:
        """Append what computes a value from its operands; `same` gives operands that are read at the same element."""
        plan, code = self.plan, self.code
        node, program = plan.node(value), plan.program
        kind = OPS[node.name].kind
        if kind == "generator":
            seeds = [self.scalar(node.args[0], 0), self.scalar(node.args[0], 1)] if node.args else []
            if node.name == "rng_gumbel":
                # Three walks over the chunk: the chain of one expression is longer than a core looks ahead, and half as fast.
                code.emit("rng_uniform", d, *seeds, imm=element)
                code.emit("neg_log", d, d)
                code.emit("neg_log", d, d)
            else:
                apply(code, program, node, d, seeds, element=element)
            return
        operands = []
        for position, arg in enumerate(node.args):
            how = access(program, value, position)
            operands.append(self.whole(arg) if how == "memory" else self.scalar(arg) if how == "scalar" else same(arg))
        if kind == "view" and access(program, value, 0) == "memory":
            emit_view(code, node, program.ops[node.args[0]].shape, d=d, a=operands[0], element=element)
        elif kind in ("lookup", "pivot"):
            pivot = operand_word(SCRATCH, self.pivots[value]) | WHOLE if kind == "pivot" else 0
            emit_lookup(code, program, node, d=d, operands=operands, pivot=pivot, element=element)
        else:
            apply(code, program, node, d, operands, element=element)

    # Phases -------------------------------------------------------------------------------------------------------------------

    def phase(self, loops: Sequence[Loop], skeletons: Sequence[Skeleton]) -> list[int]:
        """One phase; returns the slots of its NaN flags."""
        code = self.code
        values = [loop_values(self.plan, loop) for loop in loops]
        accumulators: dict[Sink, int] = {}
        for loop, inside in zip(loops, values, strict=True):
            for value in inside:
                for key in scalar_args(self.plan, value, self.number):
                    self.scalar(*key)
            for sink in loop.sinks:
                if sink.kind != "store":
                    accumulators[sink] = code.slot()
                    if not sink.targets:
                        self.fold(sink, "init", accumulators[sink])
        code.close(ONCE)
        flags: list[int] = []
        for loop, inside in zip(loops, values, strict=True):
            by_row = [s for s in loop.sinks if s.kind == "reduce" and s.targets]
            if by_row:
                self.rows(loop, inside, by_row, accumulators)
            else:
                self.loop(loop, inside, accumulators)
                self.count(loop)
                code.close(LOOP, loop.n)
        for sink, slot in accumulators.items():
            if not sink.targets:
                d = code.slot()
                self.fold(sink, "final", d, slot)
                if sink.kind == "nan":
                    flags.append(d)
                else:
                    self.known[sink.id, 0] = d
        for skeleton in skeletons:
            self.skeleton(skeleton)
        return flags

    def rows(self, loop: Loop, values: Sequence[int], sinks: Sequence[Sink], accumulators: dict[Sink, int]) -> None:
        """A ROWS block: reductions of the rows of matrices, one word a row to scratch."""
        code = self.code
        for sink in sinks:
            self.fold(sink, "init", accumulators[sink])
        first = code.cut()
        self.loop(loop, values, accumulators)
        self.count(loop)
        self.spend(ROW * len(sinks) * loop.rows)
        body = code.cut()
        for sink in sinks:
            d = code.slot()
            self.fold(sink, "final", d, accumulators[sink])
            for target in sink.targets:
                code.emit("store", _operand(target), d)
        code.close_rows(loop.n, loop.rows, [first, body, code.cut()])

    def skeleton(self, skeleton: Skeleton) -> None:
        """One instruction from memory to memory."""
        plan = self.plan
        node = plan.node(skeleton.id)
        operands = [self.scalar(arg) if place is None else _operand(place) for arg, place in zip(node.args, skeleton.operands, strict=True)]
        emit_skeleton(self.code, plan.program, skeleton, operands)
        self.spend(skeleton_work(plan.program, node))

    def count(self, loop: Loop) -> None:
        """Account for the block being written as the body of a loop."""
        self.spend(block_work(self.code.block, loop.rows, loop.n))

    def spend(self, work: int) -> None:
        """Raise ProgramError when the program's work passes the bound."""
        self.work += work
        if self.work > MAX_WORK:
            raise ProgramError(
                f"a pass of the program would take some {self.work // 1_000_000} ms or more on the cpu device, the bound is "
                f"{MAX_WORK // 1_000_000} ms, since everybody's token waits for it: use fewer ops over large tensors, or smaller ones, or "
                "split the program over several passes"
            )

    def fold(self, sink: Sink, part: str, d: int, a: int = 0) -> None:
        """init, step or final of a reduction or NaN check."""
        if sink.kind == "nan":
            self.code.emit(f"nan_{part}", d, a)
            return
        node = self.plan.node(sink.id)
        dtype = self.plan.program.ops[node.args[0]].dtype
        rule = variant(node.name, (dtype,), node.dtype, OPS[node.name].c)
        if isinstance(rule, str):
            self.code.emit(rule if part == "step" else f"argmax_{part}", d, a)
        else:
            self.code.emit(f"{node.name}.{part}", d, a, key=dtype)

    # Loops --------------------------------------------------------------------------------------------------------------------

    def loop(self, loop: Loop, values: Sequence[int], accumulators: dict[Sink, int]) -> None:
        """The instructions of one chunk."""
        self.looping = True
        self.chunk(loop, values, accumulators)
        self.looping = False

    def chunk(self, loop: Loop, values: Sequence[int], accumulators: dict[Sink, int]) -> None:
        """Values in order, each into a temp unless it lies in memory, and what consumes them."""
        code, plan = self.code, self.plan
        local: dict[int, int] = {}
        sinks: dict[int, list[Sink]] = {}
        for sink in loop.sinks:
            operand = plan.resolve(plan.node(sink.id).args[0] if sink.kind == "reduce" else sink.id)
            sinks.setdefault(operand, []).append(sink)
        last: dict[int, int] = {}
        strided = set(sinks)  # read by more than elementwise ops, which alone can repeat a scalar
        for value in values:
            for arg in local_args(plan, value, self.number):
                last[arg] = value
                if OPS[plan.node(value).name].kind != "elementwise":
                    strided.add(arg)

        def same(arg: int) -> int:
            arg = plan.resolve(arg)
            return local[arg] if plan.node(arg).shape else self.scalar(arg)

        for value in values:
            node = plan.node(value)
            source = self.source(value)
            if source is not None and node.dtype != "bool":
                local[value] = source
            elif source is not None:
                local[value] = code.temp()
                code.emit("mask", local[value], source)
            elif value not in strided and OPS[node.name].kind == "view" and access(plan.program, value, 0) == "scalar":
                local[value] = self.scalar(node.args[0])
            else:
                for arg in set(local_args(plan, value, self.number)):
                    if last[arg] == value and arg in local:
                        code.release(local[arg])  # an op may write over an operand that ends here
                local[value] = code.temp()
                self.make(value, local[value], same)
            for sink in sinks.get(value, ()):
                if sink.kind == "store":
                    self.store(sink, local[value])
                else:
                    self.fold(sink, "step", accumulators[sink], local[value])
            if value not in last:
                code.release(local[value])

    def store(self, sink: Sink, operand: int) -> None:
        """Store a value to the targets of a sink."""
        masks = int(self.plan.node(self.plan.resolve(sink.id)).dtype == "bool")
        for target in sink.targets:
            self.code.emit("store", _operand(target), operand, imm=masks)

    def run(self) -> CpuProgram:
        """The whole program."""
        code, plan = self.code, self.plan
        flags: list[int] = []
        for self.number, phase in enumerate(plan.phases):
            flags += self.phase(phase.loops, phase.skeletons)
        self.number = len(plan.phases)
        for sink in plan.stores:
            self.store(sink, self.scalar(sink.id))
        status = code.slot()
        code.emit("const", status)
        for flag in flags:
            code.emit("or", status, status, flag, key="bool")
        code.emit("store", operand_word(RESULTS, STATUS), status)
        code.close(ONCE)
        widths = [plan.program.width("logits") or 0, plan.program.width("hidden") or 0]
        return replace(code.program([plan.layout.words, *widths], scratch_words=plan.scratch_words), work=self.work)


def _operand(place: Place | Target) -> int:
    return operand_word(REGIONS[place.region], place.word)


def emit_epilogue_cpu(program: Program) -> CpuProgram:
    """The word list of an epilogue for `vm_epilogue`. Raises ProgramError when the stage is another one or a cap is exceeded."""
    assert FIRST_ROW == 0, "vm.c reads the first row from lane word 0"
    return _Epilogue(schedule(program)).run()
