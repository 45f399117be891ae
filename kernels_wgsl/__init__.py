"""WGSL kernel templates and their loader: `render(name, params, adapter_class) -> WgslKernel`."""

from kernels_wgsl.loader import render
from kernels_wgsl.rules import MAX_ITERATIONS, AdapterClass, TemplateError, WgslKernel

__all__ = ["MAX_ITERATIONS", "AdapterClass", "TemplateError", "WgslKernel", "render"]
