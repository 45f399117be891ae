"""Pages that are read back and written elsewhere, through staging buffers of every size."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from pie_core.device.cpu import CpuDevice
from pie_core.device.protocol import PAGE_TOKENS, Device
from pie_core.engine import page_io
from pie_core.engine.page_io import PageIO, runs
from pie_server.adapters.cpu_module import open_cpu_device
from tests.support.lavapipe import lavapipe

PAGES, WIDTHS = 8, (4, 12)


@pytest.fixture(scope="module")
def cpu() -> Iterator[CpuDevice]:
    opened = open_cpu_device()
    yield opened
    opened.close()


@pytest.fixture(params=["cpu", "webgpu"])
def device(request: pytest.FixtureRequest, cpu: CpuDevice) -> Device:
    return cpu if request.param == "cpu" else lavapipe()


@pytest.mark.parametrize(("pages", "want"), [([], []), ([3], [(3, 1)]), ([3, 4, 5, 1, 0, 1, 2], [(3, 3), (1, 1), (0, 3)])])
def test_runs(pages: list[int], want: list[tuple[int, int]]) -> None:
    assert runs(pages) == want


@pytest.mark.parametrize("staged", [1, 3000, 1 << 20])
async def test_pages_come_back_elsewhere(device: Device, staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_io, "STAGED_BYTES", staged)
    caches = []
    for layer, width in enumerate(WIDTHS):
        pair = tuple(device.create_buffer(4 * PAGES * PAGE_TOKENS * width, f"{kind}{layer}") for kind in "kv")
        for k, cache in enumerate(pair):
            n = PAGES * PAGE_TOKENS * width
            device.write(cache, 0, struct.pack(f"<{n}I", *(1000000 * (2 * layer + k) + i for i in range(n))))
        caches.append((pair[0], pair[1]))
    io = PageIO(device, caches, WIDTHS)
    assert io.page_bytes == 2 * 4 * PAGE_TOKENS * sum(WIDTHS)
    before = [await device.read(cache, 0, cache.size) for pair in caches for cache in pair]
    reading = io.read([5, 6, 2])
    io.write([6, 0, 1], await io.read([1, 0, 7]))
    data = await reading
    assert len(data) == 3 * io.page_bytes, "as it was at the call"
    io.write([3, 4, 7], data)
    after = [await device.read(cache, 0, cache.size) for pair in caches for cache in pair]
    moved = {6: 1, 0: 0, 1: 7, 3: 5, 4: 6, 7: 2}
    for old, new, width in zip(before, after, [w for w in WIDTHS for _ in "kv"], strict=True):
        size = 4 * PAGE_TOKENS * width
        for page in range(PAGES):
            source = moved.get(page, page)
            assert new[page * size : (page + 1) * size] == old[source * size : (source + 1) * size], page
    assert await io.read([]) == b""
    with pytest.raises(ValueError, match="10 bytes for 1 pages"):
        io.write([0], bytes(10))
    for pair in caches:
        for cache in pair:
            cache.destroy()
