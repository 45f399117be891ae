"""Renders a template file with its rule's header; the one place that turns parameters into WGSL text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kernels_wgsl.rules import AdapterClass, Rule, WgslKernel, rule


@lru_cache(maxsize=1)
def _environment() -> Environment:
    folder = Path(__file__).parent / "templates"
    return Environment(loader=FileSystemLoader(folder), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)


def _header(made: Rule) -> str:
    lines = []
    for index, (name, access, wgsl_type) in enumerate(made.bindings):
        mode = "read" if access == "r" else "read_write"
        lines.append(f"@group(0) @binding({index}) var<storage, {mode}> {name}: {wgsl_type};")
    return "\n".join(lines) + "\n"


def render(name: str, params: Mapping[str, object], adapter_class: AdapterClass) -> WgslKernel:
    """The kernel `name` for `params` on an adapter class. Raises TemplateError when the kernel would not be right."""
    made = rule(name, params, adapter_class)
    body = _environment().get_template(made.file).render(**made.values)
    bindings = tuple((binding, access) for binding, access, _ in made.bindings)
    return WgslKernel(_header(made) + body, made.workgroup, made.grid, bindings, made.iterations)
