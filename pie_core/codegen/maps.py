"""Map programs, the elementwise tails of models: WGSL with one thread an element, and word lists for the cpu device."""

from __future__ import annotations

from collections.abc import Sequence

from pie_core.codegen.cpu import INPUT, LOOP, ONCE, OUT, Code, CpuProgram, apply, operand_word
from pie_core.codegen.wgsl_lib import helpers_for
from pie_core.codegen.wgsl_writer import WgslKernel, Writer, constant, note_of, value_name
from pie_core.eta.errors import ProgramError
from pie_core.eta.ops import OPS, variant
from pie_core.eta.program import Program

MAX_GRID = 65_535  # workgroups along x


def emit_map_wgsl(
    program: Program, n: int, inputs: Sequence[tuple[int, int]], rows: str, bucket: int, *, workgroup: int = 256
) -> WgslKernel:
    """The kernel of a map program over every row: `out[t*n + i] = f(in{k}[t*stride_k + offset_k + i], …)`, one thread an element, rows
    below `step[0]` (rows="tokens") or `step[1]` ("reads") only. Bindings: step, in0, …, out (rw). Grid: ceil(n * bucket / workgroup)
    along x."""
    check_map(program, n, inputs, rows)
    grid = -(-n * bucket // workgroup)
    if bucket < 1 or grid > MAX_GRID:
        raise ProgramError(f"a map of {n} elements over {bucket} rows needs {grid} workgroups, from 1 to {MAX_GRID} fit one launch")
    writer = Writer()
    names: list[str] = []
    for index, node in enumerate(program.ops):
        dtypes = tuple(program.ops[a].dtype for a in node.args)
        if node.name == "input":
            stride, offset = inputs[int(node.attrs["index"])]
            expr = f"in{node.attrs['index']}[t * {stride}u + {offset}u + i]"
        elif node.name == "const":
            expr = constant(int(node.attrs["bits"]), node.dtype)
        else:
            expr = str(variant(node.name, dtypes, node.dtype, OPS[node.name].wgsl).format(*[names[a] for a in node.args]))
        names.append(writer.let(expr, value_name(index, node), note_of(index, node)))
    bindings = (("step", "r"), *[(f"in{k}", "r") for k in range(len(inputs))], ("out", "rw"))
    types = {"step": "u32"}
    declared = [
        f"@group(0) @binding({i}) var<storage, {'read' if a == 'r' else 'read_write'}> {b}: array<{types.get(b, 'f32')}>;"
        for i, (b, a) in enumerate(bindings)
    ]
    body = "\n".join(writer.lines)
    loops = f"at most {writer.iterations} loop iterations" if writer.iterations else "no loops"
    source = [
        f"// One thread an element of {n} over at most {bucket} rows; {loops}.",
        *declared,
        "var<private> runtime_zero: u32;" if "runtime_zero" in body else "",
        helpers_for(body),
        f"@compute @workgroup_size({workgroup})",
        "fn main(@builtin(global_invocation_id) id: vec3<u32>) {",
        f"  let t = id.x / {n}u;",
        f"  let i = id.x % {n}u;",
        f"  if (t >= step[{0 if rows == 'tokens' else 1}]) {{ return; }}",
        body,
        f"  out[t * {n}u + i] = {names[program.outs[0]]};",
        "}",
    ]
    return WgslKernel("\n".join(filter(None, source)) + "\n", workgroup, bindings, writer.iterations, (grid, 1, 1))


def emit_map_cpu(program: Program, n: int, inputs: Sequence[tuple[int, int]], rows: str, bucket: int) -> CpuProgram:
    """The word list of a map program for `vm_map`: `out[t*n + i] = f(in{k}[t*stride_k + offset_k + i], …)` for all rows of the step
    (`step[0]` for rows="tokens", `step[1]` for "reads"); `bucket` bounds them elsewhere and is not needed here. Raises ProgramError."""
    check_map(program, n, inputs, rows)
    code = Code()
    where: dict[int, int] = {}
    uses: dict[int, int] = {}
    for index, node in enumerate(program.ops):
        uses.update(dict.fromkeys(node.args, index))
    uses[program.outs[0]] = len(program.ops)
    vectors = []
    for index, node in enumerate(program.ops):
        if index not in uses:
            continue
        if node.name == "const":
            where[index] = code.slot()
            code.emit("const", where[index], imm=0xFFFFFFFF if node.dtype == "bool" and node.attrs["bits"] else int(node.attrs["bits"]))
        elif node.name == "input":
            where[index] = operand_word(INPUT, int(node.attrs["index"]))
        elif not node.shape:
            where[index] = code.slot()
            apply(code, program, node, where[index], [where[a] for a in node.args])
        else:
            vectors.append(index)
    code.close(ONCE)
    for index in vectors:
        node = program.ops[index]
        for a in set(node.args):
            if uses[a] == index:
                code.release(where[a])
        where[index] = code.temp()
        apply(code, program, node, where[index], [where[a] for a in node.args])
    result = where[program.outs[0]]
    code.emit("store", operand_word(OUT, 0), result)
    code.close(LOOP, n)
    return code.program([0 if rows == "tokens" else 1, len(inputs), n], [w for pair in inputs for w in pair])


def check_map(program: Program, n: int, inputs: Sequence[tuple[int, int]], rows: str) -> None:
    """Raises ProgramError when a map program does not fit `n`, the number of inputs, or `rows`."""
    if program.stage != "map":
        raise ProgramError(f"a map program is needed here, the program's stage is {program.stage!r}")
    if rows not in ("tokens", "reads"):
        raise ProgramError(f"rows must be tokens or reads, got {rows!r}")
    shapes = {node.shape for node in program.ops if node.name == "input"}
    used = {int(node.attrs["index"]) for node in program.ops if node.name == "input"}
    if shapes != {(n,)} or used != set(range(len(inputs))):
        raise ProgramError(f"the map program has {len(used)} inputs of {sorted(shapes)} elements; asked for {len(inputs)} of {n}")
    for stride, offset in inputs:
        if stride < 0 or offset < 0:
            raise ProgramError(f"an input's stride and offset are 0 or more, got {stride} and {offset}")
