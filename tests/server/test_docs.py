"""What the README shows runs as shown."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import pytest
from conftest import ROOT, LiveServer

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(info: str) -> list[str]:
    """The code blocks whose fence line is ```info."""
    return re.findall(rf"^```{re.escape(info)}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_client_example(live: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python")
    assert "http://127.0.0.1:8080/v1" in block
    real = openai.OpenAI
    clients = []

    def at_the_test_server(base_url: str, api_key: str) -> openai.OpenAI:
        clients.append(real(base_url=base_url.replace("http://127.0.0.1:8080", live.url), api_key=api_key))
        return clients[-1]

    monkeypatch.setattr(openai, "OpenAI", at_the_test_server)
    exec(block, {"__name__": "readme"})
    clients[0].close()
    assert len(capsys.readouterr().out) > 10


def test_the_curl_example(live: LiveServer) -> None:
    """Sends what the curl command would; curl itself need not be installed."""
    command = shlex.split(next(block for block in blocks("sh") if block.startswith("curl")).replace("\\\n", " "))
    assert [command[0], command[2], command[4]] == ["curl", "-H", "-d"]
    name, _, value = command[3].partition(": ")
    url = command[1].replace("http://127.0.0.1:8080", live.url)
    with urllib.request.urlopen(urllib.request.Request(url, data=command[5].encode(), headers={name: value})) as response:
        assert json.load(response)["choices"][0]["message"]["content"]


def test_the_inferlet_example(tmp_path: Path) -> None:
    (block,) = blocks("python inferlet")
    file = tmp_path / "inferlet.py"
    file.write_text(block, encoding="utf-8")
    command = next(block for block in blocks("sh") if block.startswith("pie run"))
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PIE_DEVICE": "cpu"}
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True)
    *streamed, last = done.stdout.rstrip("\n").rsplit("\n", 1)
    result = json.loads(last)
    assert result["text"].startswith(" Paris")
    assert "".join(streamed) == result["text"].rstrip("\n")


def test_commands_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for path in set(re.findall(r"`((?:inferlet_sdk|tests|bench|docs|server|pie_core|kernels_w[a-z]+)/[\w./]*)`", README)):
        assert (ROOT / path).exists(), path
