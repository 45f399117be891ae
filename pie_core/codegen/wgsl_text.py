"""WGSL of a program for people to read: every op as a comment line, then the kernel with its phases."""

from __future__ import annotations

from pie_core.codegen.maps import emit_map_wgsl
from pie_core.codegen.wgsl import emit_epilogue_wgsl
from pie_core.eta.errors import ProgramError
from pie_core.eta.program import Program


def wgsl_text(program: Program) -> str:
    """The ops of an epilogue or map program as comments, then its kernel: fused, 256 threads a lane (a map over one row). Raises
    ProgramError for a stage that has no kernel, or when a bound does not hold."""
    if program.stage == "epilogue":
        kernel = emit_epilogue_wgsl(program)
    elif program.stage == "map":
        inputs = {int(n.attrs["index"]): n.shape[0] for n in program.ops if n.name == "input"}
        n = next(iter(inputs.values()))
        kernel = emit_map_wgsl(program, n, [(n, 0)] * len(inputs), "tokens", 1)
    else:
        raise ProgramError(f"a program of stage {program.stage!r} has no kernel yet: epilogue and map programs do")
    ops = [f"//   {line}" for line in program.listing().splitlines()]
    return "\n".join([f"// Program {program.hash[:12]}, {program.stage}:", *ops, kernel.source])
