"""Loops of a few trips, hidden from the compiler of a software adapter: unrolled they are most of the time that it takes."""

from __future__ import annotations

import re
from dataclasses import replace

from pie_core.codegen.wgsl_writer import WgslKernel

UNROLLED = 32  # trips up to which Mesa unrolls a loop
FEW = "fn few(n: u32) -> u32 { return min(n, (lanes[0] & 1u) + n); }  // n, but no compiler may count on it"
_LOOP = re.compile(r"\bfor \(var (\w+) = 0u; \1 < (\d+)u; \1 \+= 1u\)")


def keep_loops(kernel: WgslKernel) -> WgslKernel:
    """The kernel of an epilogue, equal but for the bound of its loops of 2 to UNROLLED trips: `few(n)` for n."""

    def bound(match: re.Match[str]) -> str:
        name, trips = match[1], int(match[2])
        return f"for (var {name} = 0u; {name} < few({trips}u); {name} += 1u)" if 1 < trips <= UNROLLED else match[0]

    source = _LOOP.sub(bound, kernel.source)
    return kernel if source == kernel.source else replace(kernel, source=source.replace("@compute", f"{FEW}\n@compute", 1))
