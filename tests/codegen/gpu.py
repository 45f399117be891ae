"""Runs generated WGSL for tests: lavapipe through wgpu in this process, and Tint + SwiftShader through wgpudawn in a child process.

`python -m tests.codegen.gpu` is that child: it reads pickled jobs from standard input and writes their buffers to standard output.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pie_core.codegen import emit_epilogue_wgsl, emit_epilogue_wgsl_split, emit_map_wgsl, keep_loops
from pie_core.codegen.wgsl import WgslKernel
from pie_core.eta.program import Program
from tests.codegen.batch import Answer, Batch, MapLaunch

Array = Any
POISON = 0x7FC00ABC  # a NaN: scratch as some other program may leave it


class Job(NamedTuple):
    """Dispatches over the same bindings: (WGSL, workgroups) of each, arrays by binding order, "rw" where they come back. `groups` is what a
    0 in a grid stands for."""

    launches: tuple[tuple[str, tuple[int, int, int]], ...]
    arrays: tuple[Array, ...]
    access: tuple[str, ...]
    groups: int = 1


class Gpu:
    """A device of wgpu or wgpudawn (same API) that runs jobs one at a time."""

    def __init__(self, module: Any, device: Any) -> None:
        self.gpu = module
        self.device = device
        self._pipelines: dict[str, Any] = {}
        self._layouts: dict[tuple[str, ...], tuple[Any, Any]] = {}

    def run(self, job: Job) -> list[Array]:
        """The arrays after the dispatches, "rw" ones as written."""
        usage = self.gpu.BufferUsage
        device = self.device
        buffers = []
        for array in job.arrays:
            data = np.ascontiguousarray(array).tobytes() or bytes(4)
            buffer = device.create_buffer(size=len(data), usage=usage.STORAGE | usage.COPY_DST | usage.COPY_SRC)
            device.queue.write_buffer(buffer, 0, data)
            buffers.append(buffer)
        entries = [{"binding": i, "resource": {"buffer": b, "offset": 0, "size": b.size}} for i, b in enumerate(buffers)]
        group = device.create_bind_group(layout=self._layout(job.access)[0], entries=entries)
        encoder = device.create_command_encoder()
        step = encoder.begin_compute_pass()
        step.set_bind_group(0, group)
        for source, grid in job.launches:
            step.set_pipeline(self.pipeline(source, job.access))
            step.dispatch_workgroups(*[n or job.groups for n in grid])
        step.end()
        device.queue.submit([encoder.finish()])
        out = []
        for array, buffer, access in zip(job.arrays, buffers, job.access, strict=True):
            if access == "rw":
                out.append(np.frombuffer(bytes(device.queue.read_buffer(buffer)), array.dtype)[: array.size].reshape(array.shape))
            else:
                out.append(array)
            buffer.destroy()
        return out

    def pipeline(self, source: str, access: tuple[str, ...]) -> Any:
        """The pipeline of a text, compiled once."""
        made = self._pipelines.get(source)
        if made is None:
            module = self.device.create_shader_module(code=source)
            compute = {"module": module, "entry_point": "main"}
            made = self._pipelines[source] = self.device.create_compute_pipeline(layout=self._layout(access)[1], compute=compute)
        return made

    def _layout(self, access: tuple[str, ...]) -> tuple[Any, Any]:
        made = self._layouts.get(access)
        if made is None:
            entries = [
                {
                    "binding": i,
                    "visibility": self.gpu.ShaderStage.COMPUTE,
                    "buffer": {"type": "storage" if a == "rw" else "read-only-storage"},
                }
                for i, a in enumerate(access)
            ]
            group = self.device.create_bind_group_layout(entries=entries)
            made = self._layouts[access] = (group, self.device.create_pipeline_layout(bind_group_layouts=[group]))
        return made


@lru_cache(maxsize=1)
def lavapipe_gpu() -> Gpu:
    """lavapipe in this process."""
    from tests.support.lavapipe import lavapipe

    device = lavapipe()
    return Gpu(device.gpu, device.raw)


def lavapipe(jobs: Sequence[Job]) -> list[list[Array]]:
    """Run jobs on lavapipe (naga compiles)."""
    gpu = lavapipe_gpu()
    return [gpu.run(job) for job in jobs]


def swiftshader(jobs: Sequence[Job]) -> list[list[Array]]:
    """Run jobs on SwiftShader (Tint compiles), all in one child process."""
    from tests.support.tint import ROOT
    from tests.support.tint import swiftshader as icd

    environment = {**os.environ, "VK_ICD_FILENAMES": str(icd()), "VK_DRIVER_FILES": str(icd())}
    command = [sys.executable, "-m", "tests.codegen.gpu"]
    given = pickle.dumps(list(jobs))
    done = subprocess.run(command, input=given, capture_output=True, cwd=ROOT, env=environment, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    answers: list[list[Array]] = pickle.loads(done.stdout)
    return answers


MACHINES = {"lavapipe": lavapipe, "swiftshader": swiftshader}


def kernels_of(program: Program, workgroup: int, groups: int, split: bool) -> tuple[WgslKernel, ...]:
    """The launches of a program in one form."""
    if split:
        return emit_epilogue_wgsl_split(program, groups, workgroup)
    kernel = emit_epilogue_wgsl(program, workgroup, groups)
    return (keep_loops(kernel) if workgroup <= 64 else kernel,)  # as software adapters get it


def epilogue_job(batch: Batch, workgroup: int = 256, groups: int = 1, split: bool = False) -> tuple[Job, WgslKernel]:
    """The dispatches of a batch; scratch is full of NaN."""
    kernels = kernels_of(batch.program, workgroup, groups, split)
    kernel = kernels[0]
    scratch = np.full(kernel.scratch_words * len(batch.lanes) + 4, POISON, np.uint32)
    given = {"logits": batch.logits, "hidden": batch.hidden, "arena": batch.arena, "lanes": batch.table, "results": batch.results}
    given["scratch"] = scratch
    arrays = tuple(given[name] for name, _ in kernel.bindings)
    return Job(tuple((k.source, k.grid) for k in kernels), arrays, tuple(a for _, a in kernel.bindings), len(batch.lanes)), kernel


def run_batches(
    machine: str, batches: Sequence[Batch], workgroup: int = 256, groups: int = 1, *, split: bool = False
) -> list[list[Answer]]:
    """The answers of several launches, each alone on the machine."""
    jobs = [epilogue_job(batch, workgroup, groups, split) for batch in batches]
    answers = []
    for batch, (_, kernel), arrays in zip(batches, jobs, MACHINES[machine]([j for j, _ in jobs]), strict=True):
        after = {name: array for (name, _), array in zip(kernel.bindings, arrays, strict=True)}
        assert "scratch" not in after or (after["scratch"][-4:] == POISON).all(), "scratch was written behind the last lane"
        answers.append(batch.answers(after.get("arena", batch.arena), after["results"]))
    return answers


def map_job(launch: MapLaunch) -> Job:
    """The dispatch of a map program; the last array is the output."""
    kernel = emit_map_wgsl(launch.program, launch.n, launch.inputs, launch.rows, launch.bucket)
    return Job(((kernel.source, kernel.grid),), (launch.step, *launch.arrays, launch.out), tuple(a for _, a in kernel.bindings))


def _child() -> None:
    import wgpudawn as dawn

    jobs = pickle.loads(sys.stdin.buffer.read())
    adapter = dawn.gpu.request_adapter_sync(power_preference="high-performance")
    assert adapter.info["backend_type"] == "Vulkan" and "SwiftShader" in adapter.info["device"], dict(adapter.info)
    gpu = Gpu(dawn, adapter.request_device_sync())
    sys.stdout.buffer.write(pickle.dumps([gpu.run(job) for job in jobs]))


if __name__ == "__main__":
    _child()
