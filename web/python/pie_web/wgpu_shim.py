"""The names of wgpu-py that `device/webgpu*.py` use, over the browser's WebGPU objects.

A browser reports a refused command later, to an error scope or as an uncaptured error; here it is kept and raised by the next read-back,
which comes behind the command in the queue.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import js
from pyodide.ffi import JsException, create_proxy, jsnull, to_js

from pie_core.device.protocol import HostBytes, KernelError
from pie_web.js_bytes import JsBytes


class GPUError(Exception):
    """The browser refused something."""


class GPUOutOfMemoryError(GPUError):
    """An allocation did not fit."""


class GPUPipelineError(GPUError, KernelError):
    """A kernel did not compile."""


class BufferUsage:
    """GPUBufferUsage."""

    MAP_READ, COPY_SRC, COPY_DST, STORAGE = 0x1, 0x4, 0x8, 0x80


class ShaderStage:
    """GPUShaderStage."""

    COMPUTE = 0x4


class MapMode:
    """GPUMapMode."""

    READ = 0x1


def descriptor(value: Any) -> Any:
    """A JavaScript object of nested dicts and lists."""
    return to_js(value, dict_converter=js.Object.fromEntries)


def guarded(call: Callable[..., Any], *arguments: Any) -> Any:
    """`call(*arguments)`; what JavaScript throws becomes a GPUError."""
    try:
        return call(*arguments)
    except JsException as error:
        raise GPUError(_text(error)) from None


def _text(error: Any) -> str:
    return f"{error.name}: {error.message}"


class GPUBuffer:
    """A buffer."""

    __slots__ = ("_device", "js", "size")

    def __init__(self, device: GPUDevice, raw: Any, size: int) -> None:
        self._device, self.js, self.size = device, raw, size

    def map_async(self, mode: int, offset: int, size: int) -> Coroutine[Any, Any, None]:
        """Mapping begins at the call; awaiting raises what the device refused before it."""
        return self._device.mapped(guarded(self.js.mapAsync, mode, offset, size))

    def read_mapped(self, offset: int, size: int) -> bytes:
        """Bytes of the mapped range."""
        data: bytes = guarded(self.js.getMappedRange, offset, size).to_bytes()
        return data

    def unmap(self) -> None:
        """Give the range back."""
        guarded(self.js.unmap)

    def destroy(self) -> None:
        """Free the memory."""
        self._device.freed(self.size)
        guarded(self.js.destroy)


class GPUComputePass:
    """An open compute pass."""

    __slots__ = ("_group", "dispatch_workgroups", "end", "js")

    def __init__(self, raw: Any) -> None:
        self.js = raw
        self._group = raw.setBindGroup
        self.dispatch_workgroups = raw.dispatchWorkgroups
        self.end = raw.end

    def set_pipeline(self, pipeline: GPUComputePipeline) -> None:
        """The kernel of the dispatches that follow."""
        self.js.setPipeline(pipeline.js)

    def set_bind_group(self, index: int, group: Any, offsets: Sequence[int] = ()) -> None:
        """Its buffers, with dynamic offsets."""
        if offsets:
            self._group(index, group, to_js(offsets))
        else:
            self._group(index, group)


class GPUCommandEncoder:
    """An open list of commands."""

    __slots__ = ("_device", "js")

    def __init__(self, device: GPUDevice, raw: Any) -> None:
        self._device, self.js = device, raw

    def begin_compute_pass(self) -> GPUComputePass:
        """A compute pass; end it before the next command."""
        return GPUComputePass(self.js.beginComputePass())

    def copy_buffer_to_buffer(self, src: GPUBuffer, src_offset: int, dst: GPUBuffer, dst_offset: int, size: int) -> None:
        """Copy between buffers."""
        guarded(self.js.copyBufferToBuffer, src.js, src_offset, dst.js, dst_offset, size)

    def finish(self) -> Any:
        """The commands, closed."""
        return self._device.timed(self.js.finish)


class GPUComputePipeline:
    """A compiled kernel."""

    __slots__ = ("js",)

    def __init__(self, raw: Any) -> None:
        self.js = raw


class GPUQueue:
    """The device's queue."""

    __slots__ = ("_device", "_submit", "_write")

    def __init__(self, device: GPUDevice, raw: Any) -> None:
        self._device = device
        self._submit = raw.submit
        self._write = raw.writeBuffer

    def submit(self, commands: Sequence[Any]) -> None:
        """Enqueue closed command lists."""
        self._device.timed(self._submit, to_js(commands))

    def write_buffer(self, buffer: GPUBuffer, offset: int, data: bytes | memoryview | HostBytes) -> None:
        """Enqueue a write; `data` is copied at the call. JavaScript's own arrays never enter Python."""
        guarded(self._write, buffer.js, offset, data.array if isinstance(data, JsBytes) else to_js(memoryview(data)))  # type: ignore[arg-type]


class GPUDevice:
    """A device. `on_lost(message)` is called once when it is gone without having been destroyed."""

    def __init__(self, raw: Any, make_replay: Any, on_lost: Callable[[str], None]) -> None:
        self.js = raw
        self.queue = GPUQueue(self, raw.queue)
        self.allocated = 0  # bytes of all buffers
        self._make_replay = make_replay
        self._on_lost = on_lost
        self._failure: GPUError | None = None
        self._busy = 0.0
        self._maps = 0
        self._since = 0.0
        self._ended = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._uncaptured = create_proxy(self._heard)
        raw.onuncapturederror = self._uncaptured
        self._spawn(self._watch())

    # Time

    @property
    def busy_ms(self) -> float:
        """Milliseconds with a read-back outstanding, or in which the browser took down a step's commands."""
        return self._busy + (js.performance.now() - self._since if self._maps else 0.0)

    def timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """`call(*arguments)`, guarded, as work of the device."""
        if self._maps:
            return guarded(call, *arguments)
        began = js.performance.now()
        try:
            return guarded(call, *arguments)
        finally:
            self._busy += js.performance.now() - began

    # Errors

    def fail(self, error: GPUError) -> None:
        """Remember the first failure until a read-back raises it."""
        self._failure = self._failure or error

    def _heard(self, event: Any) -> None:
        self.fail(_typed(event.error))

    async def _watch(self) -> None:
        info = await self.js.lost
        if info.reason != "destroyed":
            self._on_lost(str(info.message) or "the browser gave no reason")

    async def _scope(self, popped: Any, what: str) -> None:
        try:
            error = await popped
        except JsException:  # the device is gone; `_watch` says so
            return
        if error is not jsnull:
            self.fail(GPUPipelineError(f"the {what} did not compile in this browser: {error.message}"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def mapped(self, promise: Any) -> Coroutine[Any, Any, None]:
        """Wait for a read-back, which is outstanding from now on; raises what was refused since the last one."""
        return self._mapped(promise, js.performance.now())

    async def _mapped(self, promise: Any, began: float) -> None:
        if not self._maps:
            self._since = max(began, self._ended)  # what was counted for others is not counted again
        self._maps += 1
        try:
            await promise
        except JsException as error:
            raise self._taken() or GPUError(_text(error)) from None
        finally:
            self._maps -= 1
            if not self._maps:
                self._ended = js.performance.now()
                self._busy += self._ended - self._since
        failure = self._taken()
        if failure is not None:
            raise failure

    def _taken(self) -> GPUError | None:
        failure, self._failure = self._failure, None
        return failure

    # Objects

    def create_buffer(self, *, label: str = "", size: int, usage: int) -> GPUBuffer:
        """A zeroed buffer; a failed allocation shows at the next read-back."""
        raw = guarded(self.js.createBuffer, descriptor({"label": label, "size": size, "usage": usage}))
        self.allocated += size
        return GPUBuffer(self, raw, size)

    def freed(self, size: int) -> None:
        """A buffer was destroyed."""
        self.allocated -= size

    def create_command_encoder(self) -> GPUCommandEncoder:
        """An open list of commands."""
        return GPUCommandEncoder(self, guarded(self.js.createCommandEncoder))

    def create_shader_module(self, *, label: str = "", code: str) -> Any:
        """A shader; an error in it shows at the next read-back."""
        self.js.pushErrorScope("validation")
        module = guarded(self.js.createShaderModule, descriptor({"label": label, "code": code}))
        self._spawn(self._scope(self.js.popErrorScope(), label))
        return module

    def create_compute_pipeline(self, *, label: str = "", layout: Any, compute: dict[str, Any]) -> GPUComputePipeline:
        """A kernel; an error in it shows at the next read-back."""
        stage = {"module": compute["module"], "entryPoint": compute["entry_point"]}
        self.js.pushErrorScope("validation")
        pipeline = guarded(self.js.createComputePipeline, descriptor({"label": label, "layout": layout, "compute": stage}))
        self._spawn(self._scope(self.js.popErrorScope(), label))
        return GPUComputePipeline(pipeline)

    def create_compute_pipeline_async(
        self, *, label: str = "", layout: Any, compute: dict[str, Any]
    ) -> Coroutine[Any, Any, GPUComputePipeline]:
        """A kernel that is compiled beside the queue; it begins at the call, and awaiting it raises GPUPipelineError."""
        stage = {"module": compute["module"], "entryPoint": compute["entry_point"]}
        promise = guarded(self.js.createComputePipelineAsync, descriptor({"label": label, "layout": layout, "compute": stage}))
        promise.catch(lambda _: None)  # who awaits it hears of it; until somebody does, browsers would write to the console
        return self._compiled(promise, label)

    async def _compiled(self, promise: Any, label: str) -> GPUComputePipeline:
        try:
            return GPUComputePipeline(await promise)
        except JsException as error:
            raise GPUPipelineError(f"the {label} did not compile in this browser: {error.message}") from None

    def create_bind_group_layout(self, *, entries: Sequence[dict[str, Any]]) -> Any:
        """The shape of a bind group."""
        rows = [
            {
                "binding": entry["binding"],
                "visibility": entry["visibility"],
                "buffer": {"type": entry["buffer"]["type"], "hasDynamicOffset": entry["buffer"]["has_dynamic_offset"]},
            }
            for entry in entries
        ]
        return guarded(self.js.createBindGroupLayout, descriptor({"entries": rows}))

    def create_pipeline_layout(self, *, bind_group_layouts: Sequence[Any]) -> Any:
        """The shapes of a kernel's bind groups."""
        return guarded(self.js.createPipelineLayout, descriptor({"bindGroupLayouts": list(bind_group_layouts)}))

    def create_bind_group(self, *, layout: Any, entries: Sequence[dict[str, Any]]) -> Any:
        """Buffers for a kernel."""
        rows = [
            {
                "binding": entry["binding"],
                "resource": {
                    "buffer": entry["resource"]["buffer"].js,
                    "offset": entry["resource"]["offset"],
                    "size": entry["resource"]["size"],
                },
            }
            for entry in entries
        ]
        return guarded(self.js.createBindGroup, descriptor({"layout": layout, "entries": rows}))

    def compile_plan(self, steps: Sequence[tuple[GPUComputePipeline, Any, tuple[int, int, int]]]) -> Callable[[GPUCommandEncoder], None]:
        """A function that records every step into an encoder, in JavaScript (engine/replay.ts)."""
        numbers: dict[int, int] = {}
        pipelines: list[Any] = []
        flat = array("i")
        for index, (pipeline, _, grid) in enumerate(steps):
            number = numbers.get(id(pipeline))
            if number is None:
                number = numbers[id(pipeline)] = len(pipelines)
                pipelines.append(pipeline.js)
            flat.extend((number, index, *grid))
        replay = self._make_replay(to_js(pipelines), to_js([group for _, group, _ in steps]), to_js(flat))
        run = replay.run

        def record(encoder: GPUCommandEncoder) -> None:
            self.timed(run, encoder.js)

        return record

    def destroy(self) -> None:
        """Free the device and everything on it."""
        self.js.onuncapturederror = None
        self._uncaptured.destroy()
        self.js.destroy()


def _typed(error: Any) -> GPUError:
    kind = GPUOutOfMemoryError if error.constructor.name == "GPUOutOfMemoryError" else GPUError
    return kind(str(error.message))
