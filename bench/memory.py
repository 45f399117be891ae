"""Memory of a serving process: resident and peak, against weights once + the KV pool + 350 MB.

Starts `pie serve` for the device, runs chats of growing length, and reads the process's own accounting.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench.report import Report, arguments
from tests.support.paths import default_model

POOL_MB = 512  # the default of `pie serve`
ALLOWANCE_MB = 350
MB = 1e6


def resident(pid: int) -> tuple[float, float]:
    """(resident now, peak) of a process in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    now, peak = (int(re.search(rf"^{key}:\s+(\d+) kB", text, re.M).group(1)) for key in ("VmRSS", "VmHWM"))  # type: ignore[union-attr]
    return now * 1024 / MB, peak * 1024 / MB


def call(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """One JSON request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until /health says ok. Raises RuntimeError when the server ended or 120 s went by."""
    for _ in range(1200):
        if process.poll() is not None:
            raise RuntimeError(f"pie serve ended with code {process.returncode}")
        try:
            if call(port, "/health")["status"] == "ok":
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("pie serve was not ready within 120 s")


def chat(port: int, words: int, tokens: int) -> None:
    """One completion over a prompt of about `words` tokens."""
    text = "one two three four five six seven eight " * (words // 8)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 1, "seed": 1}
    call(port, "/v1/chat/completions", body)


def main() -> int:
    """The bench; its exit code."""
    args = arguments(__doc__)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pie = str(Path(sys.executable).with_name("pie"))
    command = [pie, "serve", "--port", str(port), "--device", args.device, "--kv-pool-mb", str(POOL_MB)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_ready(port, process)
        report = Report("memory", args.device)
        weights = os.path.getsize(default_model()) / MB
        bound = weights + POOL_MB * 1024 * 1024 / MB + ALLOWANCE_MB
        report.add("checkpoint, MB", weights)
        report.add("KV pool as configured, MB", POOL_MB * 1024 * 1024 / MB)
        report.target("resident after load, MB", resident(process.pid)[0], "<=", bound)
        # KV pages that no token has used yet are not resident, so this is the stricter reading
        report.target("resident after load - checkpoint, MB", resident(process.pid)[0] - weights, "<=", ALLOWANCE_MB)
        for words in (8, 64, 256) if args.device == "webgpu" else (8, 512, 4096):
            chat(port, words, 8)
            report.target(f"resident after a prompt of {words}, MB", resident(process.pid)[0], "<=", bound)
        report.target("peak, MB", resident(process.pid)[1], "<=", bound)
        return report.finish(args.json)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
