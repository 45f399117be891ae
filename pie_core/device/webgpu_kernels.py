"""Kernel specs to compute pipelines, each compiled once; epilogue kernels are kept in a bounded cache."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import kernels_wgsl
from pie_core.codegen import WgslKernel, emit_map_wgsl, lane_layout
from pie_core.device.kept import Kept
from pie_core.device.protocol import DeviceError, EpilogueSpec, KernelError, KernelSpec, LimitError, MapSpec, TemplateSpec
from pie_core.device.templates import TEMPLATES, template
from pie_core.device.webgpu_errors import translate
from pie_core.device.webgpu_forms import epilogue_forms
from pie_core.eta.errors import ProgramError

EPILOGUE_KERNELS = 256  # most epilogue pipelines kept; a program beyond that compiles again


@dataclass(frozen=True)
class EpilogueForm:
    """One way to run an epilogue: (pipeline, workgroups) of each launch in order, a 0 stands for the lanes; `scratch_bytes` a lane."""

    steps: tuple[tuple[Any, tuple[int, int, int]], ...]
    layout: Any
    bindings: tuple[tuple[str, str], ...]
    scratch_bytes: int


@dataclass(frozen=True)
class WebGpuKernel:
    """A compiled spec: `pipeline` with `grid` workgroups, or an epilogue's forms (`grid` is None then, `lane_words` the length of a lane in
    u32 words)."""

    spec: KernelSpec
    pipeline: Any
    layout: Any
    bindings: tuple[tuple[str, str], ...]
    grid: tuple[int, int, int] | None
    lane_words: int = 0
    fused: EpilogueForm | None = None
    split: EpilogueForm | None = None
    work: int = 0
    first_work: int = 0
    size: int = 1

    def form(self, *, split: bool) -> EpilogueForm:
        """The form of an epilogue: the split one where it exists and is asked for."""
        form = self.split if split and self.split is not None else self.fused
        if form is None:
            raise DeviceError(f"{self.spec} is no epilogue")
        return form

    @property
    def buffers(self) -> tuple[str, ...]:
        """Bindings that a launch has to give; scratch is the device's own."""
        return tuple(name for name, _ in self.bindings if name != "scratch")


class KernelCache:
    """Compiles specs on one raw device. `adapter_class` chooses the variant of each template; `scratch_limit`: bytes that an epilogue's
    scratch may take."""

    def __init__(self, gpu: Any, device: Any, adapter_class: Literal["software", "gpu"], scratch_limit: int) -> None:
        self._gpu = gpu
        self._scratch_limit = scratch_limit
        self._device = device
        self._adapter_class: Literal["software", "gpu"] = adapter_class
        self._kernels: dict[KernelSpec, WebGpuKernel] = {}
        self._epilogues: Kept[WebGpuKernel] = Kept(EPILOGUE_KERNELS)
        self._pipelines: dict[str, Any] = {}  # by source: buckets often share one text
        self._layouts: dict[tuple[tuple[str, bool], ...], tuple[Any, Any]] = {}

    def get(self, spec: KernelSpec) -> WebGpuKernel:
        """The kernel of `spec`, compiled at most once while cached. Raises KernelError when it is unknown or does not compile."""
        if isinstance(spec, EpilogueSpec):
            kernel = self._epilogues.find(spec)
            if kernel is None:
                kernel = self._epilogue(spec)
                self._epilogues.keep(spec, kernel, kernel.size)
            return kernel
        kernel = self._kernels.get(spec)
        if kernel is None:
            kernel = self._kernels[spec] = self._map(spec) if isinstance(spec, MapSpec) else self._template(spec)
        return kernel

    def repack(self, fmt: str, blocks: int) -> WebGpuKernel:
        """The kernel that repacks up to `blocks` raw blocks of `fmt`; the true count travels in its `job` buffer."""
        rendered = kernels_wgsl.render("repack", {"fmt": fmt, "blocks": blocks}, self._adapter_class)
        spec = TemplateSpec("repack", (("blocks", blocks), ("fmt", fmt)))  # the device's own; not in the catalogue
        return self._build(spec, rendered.source, rendered.bindings, rendered.grid, f"repack {fmt}")

    def grids(self, grids: Sequence[tuple[int, int, int]]) -> WebGpuKernel:
        """The kernel that writes dispatch arguments: `grids`, or zeros when the step holds no tokens."""
        rendered = kernels_wgsl.render("grids", {"grids": tuple(grids)}, self._adapter_class)
        spec = TemplateSpec("grids", (("count", len(grids)),))  # the device's own; not in the catalogue
        return self._build(spec, rendered.source, rendered.bindings, rendered.grid, "dispatch arguments")

    def prepare(self, spec: TemplateSpec) -> Awaitable[None]:
        """Begin to compile `spec` beside the queue, which a plain `get` would hold up; the call enqueues, awaiting it raises KernelError.
        `get` finds the pipeline from then on."""
        rendered = self._rendered(spec)
        what = f"template {spec.name}"
        try:
            module, layout, pipeline_layout = self._module(rendered.source, rendered.bindings, what)
            compute = {"module": module, "entry_point": "main"}
            compiling = self._device.create_compute_pipeline_async(label=what, layout=pipeline_layout, compute=compute)
        except self._gpu.GPUError as error:
            raise translate(error, f"compile the {what}", kernel=True) from error
        return self._keep(rendered.source, compiling, layout, what)

    async def _keep(self, source: str, compiling: Awaitable[Any], layout: Any, what: str) -> None:
        try:
            self._pipelines.setdefault(source, (await compiling, layout))
        except self._gpu.GPUError as error:
            raise translate(error, f"compile the {what}", kernel=True) from error

    def _template(self, spec: TemplateSpec) -> WebGpuKernel:
        rendered = self._rendered(spec)
        return self._build(spec, rendered.source, rendered.bindings, rendered.grid, f"template {spec.name}")

    def _rendered(self, spec: TemplateSpec) -> kernels_wgsl.WgslKernel:
        template(spec.name, **dict(spec.params))  # an unknown name or parameter set is refused by the catalogue
        try:
            rendered = kernels_wgsl.render(spec.name, dict(spec.params), self._adapter_class)
        except kernels_wgsl.TemplateError as error:
            raise KernelError(str(error)) from error
        if rendered.bindings != TEMPLATES[spec.name].bindings:
            raise KernelError(f"template {spec.name} binds {rendered.bindings}, the catalogue says {TEMPLATES[spec.name].bindings}")
        return rendered

    def _map(self, spec: MapSpec) -> WebGpuKernel:
        try:
            emitted = emit_map_wgsl(spec.program, spec.n, spec.inputs, spec.rows, spec.bucket)
        except ProgramError as error:
            raise KernelError(str(error)) from error
        return self._build(spec, emitted.source, emitted.bindings, emitted.grid, "map program")

    def _epilogue(self, spec: EpilogueSpec) -> WebGpuKernel:
        program = spec.program
        try:
            found = epilogue_forms(program, self._adapter_class)
        except ProgramError as error:
            raise KernelError(str(error)) from error
        needs = 4 * found.fused[0].scratch_words
        if needs > self._scratch_limit:
            raise LimitError(
                f"a pass of this program needs {needs} bytes of scratch, the device binds at most {self._scratch_limit}: "
                "use shorter vectors or fewer sorts"
            )
        fused = self._form(found.fused)
        fits = found.split and 4 * found.split[0].scratch_words <= self._scratch_limit
        split = fused if found.split is found.fused else self._form(found.split) if fits else None
        bindings = {name: access for form in (fused, split) if form is not None for name, access in form.bindings}
        words = lane_layout(program).words
        return WebGpuKernel(spec, None, None, tuple(bindings.items()), None, words, fused, split, found.work, found.first_work, found.lines)

    def _form(self, kernels: Sequence[WgslKernel]) -> EpilogueForm:
        first = kernels[0]
        made = [self._pipeline(k.source, k.bindings, "epilogue program") for k in kernels]
        steps = tuple((pipeline, kernel.grid) for (pipeline, _), kernel in zip(made, kernels, strict=True))
        return EpilogueForm(steps, made[0][1], first.bindings, first.scratch_words * 4)

    def _build(
        self, spec: KernelSpec, source: str, bindings: tuple[tuple[str, str], ...], grid: tuple[int, int, int], what: str
    ) -> WebGpuKernel:
        made = self._pipelines.get(source)
        if made is None:
            made = self._pipelines[source] = self._pipeline(source, bindings, what)
        return WebGpuKernel(spec, made[0], made[1], bindings, grid)

    def _pipeline(self, source: str, bindings: Sequence[tuple[str, str]], what: str) -> tuple[Any, Any]:
        """(pipeline, bind group layout) of WGSL text that this repository generated."""
        try:
            module, layout, pipeline_layout = self._module(source, bindings, what)
            compute = {"module": module, "entry_point": "main"}
            return self._device.create_compute_pipeline(label=what, layout=pipeline_layout, compute=compute), layout
        except self._gpu.GPUError as error:
            raise translate(error, f"compile the {what}", kernel=True) from error

    def _module(self, source: str, bindings: Sequence[tuple[str, str]], what: str) -> tuple[Any, Any, Any]:
        """(shader module, bind group layout, pipeline layout)."""
        layout, pipeline_layout = self._layout(bindings)
        return self._device.create_shader_module(label=what, code=source), layout, pipeline_layout

    def _layout(self, bindings: Sequence[tuple[str, str]]) -> tuple[Any, Any]:
        key = tuple((access, name == "lanes") for name, access in bindings)
        made = self._layouts.get(key)
        if made is None:
            entries = [
                {
                    "binding": index,
                    "visibility": self._gpu.ShaderStage.COMPUTE,
                    "buffer": {"type": "read-only-storage" if access == "r" else "storage", "has_dynamic_offset": dynamic},
                }
                for index, (access, dynamic) in enumerate(key)
            ]
            layout = self._device.create_bind_group_layout(entries=entries)
            made = self._layouts[key] = (layout, self._device.create_pipeline_layout(bind_group_layouts=[layout]))
        return made


def owned_kernel(kernel: object) -> WebGpuKernel:
    """`kernel` as one of this device. Raises DeviceError for another device's kernel."""
    if not isinstance(kernel, WebGpuKernel):
        raise DeviceError(f"{kernel!r} was not compiled by this WebGPU device; compile its spec here")
    return kernel
