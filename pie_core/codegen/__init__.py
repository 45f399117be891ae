"""codegen: Programs to kernels. WGSL for WebGPU, word lists for the cpu device, NumPy for the tests (`codegen.oracle`)."""

from __future__ import annotations

from pie_core.codegen.cpu import CpuProgram, emit_epilogue_cpu
from pie_core.codegen.layout import LaneLayout, lane_layout
from pie_core.codegen.maps import emit_map_cpu, emit_map_wgsl
from pie_core.codegen.wgsl import WgslKernel, emit_epilogue_wgsl
from pie_core.codegen.wgsl_split import emit_epilogue_wgsl_split
from pie_core.codegen.wgsl_text import wgsl_text
from pie_core.codegen.wgsl_unroll import keep_loops
from pie_core.eta.program import RENDERERS

RENDERERS["wgsl"] = wgsl_text

__all__ = [
    "CpuProgram",
    "LaneLayout",
    "WgslKernel",
    "emit_epilogue_cpu",
    "emit_epilogue_wgsl",
    "emit_epilogue_wgsl_split",
    "emit_map_cpu",
    "emit_map_wgsl",
    "keep_loops",
    "lane_layout",
    "wgsl_text",
]
