"""Programs as word lists for the virtual machine of the cpu device (kernels_wasm/vm.c).

Words: header [magic, words in all, lane words, logits width, hidden width, scalar slots, temps, 0], then blocks [kind, words of code, n]
followed by instructions of six words [opcode, imm, d, a, b, c]. A block of kind ONCE runs once, LOOP runs over n elements in chunks of
1,024, END ends the program. An operand word is kind << 28 | index. A map program's header has [magic, words, rows, inputs, n, scalar slots,
temps, 0] and then stride and offset of each input; its LOOP blocks run once a row.

A scalar is a slot of 16 bytes that holds its word four times; a temp is one chunk of a vector. Bools are masks of ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pie_core.codegen.cpu_source import opcodes
from pie_core.codegen.layout import ROW, STATUS
from pie_core.codegen.schedule import Loop, Schedule, Sink, loop_values, scalar_key, scalar_order, schedule
from pie_core.eta.errors import ProgramError
from pie_core.eta.ops import OPS, variant
from pie_core.eta.program import Node, Program

MAGIC = 0x31454950
CHUNK = 1024  # elements
ONCE, LOOP, END = 0, 1, 2
SCALAR, TEMP, LOGITS, HIDDEN, ARENA, INPUT, RESULTS, OUT, LANES = range(9)
REGIONS = {"arena": ARENA, "results": RESULTS, "logits": LOGITS, "hidden": HIDDEN}
MAX_SCRATCH = 1 << 20  # bytes

Instruction = tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class CpuProgram:
    """`words`: the program, u32. `scratch_bytes`: what `vm_epilogue` or `vm_map` needs at `scratch`, 16-byte aligned.
    Row widths need no padding, but a vector load may touch up to 12 bytes behind the last row: allocate in multiples of 16 bytes."""

    words: tuple[int, ...]
    scratch_bytes: int


def operand_word(kind: int, index: int) -> int:
    """An operand: SCALAR slot, TEMP, row of LOGITS or HIDDEN, INPUT, or the lane word of an ARENA, RESULTS or LANES place."""
    return kind << 28 | index


class Code:
    """Instructions of the block being written, scalar slots, and temps with reuse."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.block: list[Instruction] = []
        self.scalars = 0
        self.temps = 0
        self.free: list[int] = []

    def emit(self, name: str, d: int, a: int = 0, b: int = 0, *, c: int = 0, key: str = "", imm: int = 0) -> None:
        """Append an instruction to the block."""
        self.block.append((opcodes()[name, key], imm, d, a, b, c))

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

    def release(self, operand: int) -> None:
        """Give a temp back; other operands are left alone."""
        if operand >> 28 == TEMP:
            self.free.append(operand & 0xFFFFFFF)

    def close(self, kind: int, n: int = 1) -> None:
        """End the block as `kind` over n elements; an empty one is dropped."""
        if self.block or kind == END:
            self.blocks += [kind, 6 * len(self.block), n]
            for instruction in self.block:
                self.blocks += instruction
            self.block = []

    def program(self, header: Sequence[int], extra: Sequence[int] = ()) -> CpuProgram:
        """The whole program behind a header; `extra` words stand between header and blocks. Raises ProgramError over the scratch cap."""
        self.close(END)
        scratch = 16 * self.scalars + 4 * CHUNK * self.temps
        if scratch > MAX_SCRATCH:
            raise ProgramError(f"the program needs {scratch} bytes of scratch on the cpu device, the cap is {MAX_SCRATCH}")
        body = [*extra, *self.blocks]
        return CpuProgram((MAGIC, 8 + len(body), *header, self.scalars, self.temps, 0, *body), scratch)


def apply(code: Code, program: Program, node: Node, d: int, operands: Sequence[int], *, element: int = 0) -> None:
    """Append one elementwise op or generator; `element` is the index a scalar generator starts at."""
    row = OPS[node.name]
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

    def source(self, node: Node) -> int | None:
        """Operand of a vector that lies in memory."""
        if node.name == "output":
            return operand_word(REGIONS[str(node.attrs["name"])], int(node.attrs["index"]))
        if "chan" in node.attrs:
            return operand_word(ARENA, self.plan.layout.take(int(node.attrs["chan"])))
        return None

    def scalar(self, value: int, element: int = 0) -> int:
        """Slot of one element of a value, computed in the current ONCE block."""
        key = scalar_key(self.plan, value, element)
        for step in scalar_order(self.plan, *key, self.known, self.number):
            self.known[step] = self.compute(*step)
        return self.known[key]

    def compute(self, value: int, element: int) -> int:
        node, code = self.plan.node(value), self.code
        d = code.slot()
        load = "load_bool" if node.dtype == "bool" else "load"
        source = self.source(node)
        if source is not None:
            code.emit(load, d, source, imm=element)
        elif node.name == "param":
            code.emit(load, d, operand_word(LANES, self.plan.layout.param(int(node.attrs["slot"]))))
        elif node.name == "const":
            bits = int(node.attrs["bits"])
            code.emit("const", d, imm=0xFFFFFFFF if node.dtype == "bool" and bits else bits)
        elif OPS[node.name].kind == "generator":
            seeds = [self.scalar(node.args[0], 0), self.scalar(node.args[0], 1)] if node.args else []
            apply(code, self.plan.program, node, d, seeds, element=element)
            code.emit("splat", d, d)
        else:
            apply(code, self.plan.program, node, d, [self.scalar(a, element) for a in node.args])
        return d

    def prepare(self, values: Sequence[int], loop: Loop) -> None:
        """Scalars that a loop reads."""
        for value in values:
            node = self.plan.node(value)
            if node.name.startswith("rng_"):
                self.scalar(node.args[0], 0)
                self.scalar(node.args[0], 1)
            elif OPS[node.name].kind == "elementwise":
                for arg in node.args:
                    if not self.plan.node(self.plan.resolve(arg)).shape:
                        self.scalar(arg)
        for sink in loop.sinks:
            value = self.operand_of(sink)
            if not self.plan.node(value).shape:
                self.scalar(value)

    def operand_of(self, sink: Sink) -> int:
        """Resolved value that a sink consumes."""
        return self.plan.resolve(self.plan.node(sink.id).args[0] if sink.kind == "reduce" else sink.id)

    def phase(self, loops: Sequence[Loop]) -> list[int]:
        """One phase; returns the slots of its NaN flags."""
        code, accumulators = self.code, {}
        values = [loop_values(self.plan, loop) for loop in loops]
        for loop, inside in zip(loops, values, strict=True):
            self.prepare(inside, loop)
            for sink in loop.sinks:
                if sink.kind != "store":
                    accumulators[sink] = code.slot()
                    self.fold(sink, "init", accumulators[sink])
        code.close(ONCE)
        for loop, inside in zip(loops, values, strict=True):
            self.loop(loop, inside, accumulators)
            code.close(LOOP, loop.n)
        flags = []
        for sink, slot in accumulators.items():
            d = code.slot()
            self.fold(sink, "final", d, slot)
            if sink.kind == "nan":
                flags.append(d)
            else:
                self.known[sink.id, 0] = d
        return flags

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

    def loop(self, loop: Loop, values: Sequence[int], accumulators: dict[Sink, int]) -> None:
        code, plan = self.code, self.plan
        local: dict[int, int] = {}
        sinks: dict[int, list[Sink]] = {}
        for sink in loop.sinks:
            sinks.setdefault(self.operand_of(sink), []).append(sink)
        last: dict[int, int] = {}
        for value in values:
            node = plan.node(value)
            if OPS[node.name].kind == "elementwise":
                last.update({plan.resolve(a): value for a in node.args})
        for value in [v for v in sinks if not plan.node(v).shape]:  # a scalar stored over a vector
            temp = code.temp()
            code.emit("copy", temp, self.scalar(value))
            self.consume(sinks[value], temp, accumulators)
            code.release(temp)
        for value in values:
            node = plan.node(value)
            source = self.source(node)
            if source is not None and node.dtype != "bool":
                local[value] = source
            elif source is not None:
                local[value] = code.temp()
                code.emit("mask", local[value], source)
            elif OPS[node.name].kind == "generator":
                local[value] = code.temp()
                seeds = [self.scalar(node.args[0], 0), self.scalar(node.args[0], 1)] if node.args else []
                apply(code, plan.program, node, local[value], seeds)
            else:
                args = [plan.resolve(a) for a in node.args]
                operands = [local[a] if plan.node(a).shape else self.scalar(a) for a in args]
                for a in set(args):
                    if last.get(a) == value and a in local:
                        code.release(local[a])  # an op may write over an operand that ends here
                local[value] = code.temp()
                apply(code, plan.program, node, local[value], operands)
            self.consume(sinks.get(value, ()), local[value], accumulators)
            if value not in last:
                code.release(local[value])

    def consume(self, sinks: Sequence[Sink], operand: int, accumulators: dict[Sink, int]) -> None:
        for sink in sinks:
            if sink.kind == "store":
                self.store(sink, operand)
            else:
                self.fold(sink, "step", accumulators[sink], operand)

    def store(self, sink: Sink, operand: int) -> None:
        masks = int(self.plan.node(sink.id).dtype == "bool")
        for target in sink.targets:
            self.code.emit("store", operand_word(REGIONS[target.region], target.word), operand, imm=masks)

    def run(self) -> CpuProgram:
        code, plan = self.code, self.plan
        flags: list[int] = []
        for self.number, phase in enumerate(plan.phases):
            flags += self.phase(phase.loops)
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
        return code.program([plan.layout.words, *widths])


def emit_epilogue_cpu(program: Program) -> CpuProgram:
    """The word list of an epilogue for `vm_epilogue`. Raises ProgramError when the stage is another one or a cap is exceeded."""
    assert ROW == 0, "vm.c reads the first row from lane word 0"
    return _Epilogue(schedule(program)).run()
