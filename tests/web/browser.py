"""Debian's Chromium for tests and benches: headless, WebGPU on SwiftShader, through Playwright's own client."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, sync_playwright

FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")


def launch_options(*flags: str) -> dict[str, Any]:
    """What `launch` takes. Raises RuntimeError where there is no chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        raise RuntimeError("no chromium on the PATH: install it (make test does, as root)")
    return {"executable_path": path, "headless": True, "args": [*FLAGS, *flags]}


@contextmanager
def chromium(*flags: str) -> Iterator[Browser]:
    """A browser; closed at the end."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**launch_options(*flags))
        try:
            yield browser
        finally:
            browser.close()
