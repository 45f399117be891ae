"""What the README shows runs as shown."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from pie_core.codegen import cpu_work, schedule, wgsl, wgsl_bounds
from pie_core.device import cpu, webgpu
from pie_core.device.protocol import PAGE_TOKENS
from pie_core.engine.geometry import MAX_MASK_BITS
from pie_core.engine.metrics import TIMELINE_STEPS, StepRecord
from pie_core.engine.model_runner import ARENA_WORDS, MASK_WORDS, MAX_READS, RESULTS_WORDS
from pie_core.engine.saved_sets import MEMORY_CAP
from pie_core.engine.set_files import DISK_CAP
from pie_core.eta import json_text, program
from pie_core.host import ops
from pie_core.host.budget import Budget
from pie_core.text.tokenizer import MAX_CHARS
from pie_server import cli_input, listener, prewarm, recovery, service
from pie_server.api import openai_schema
from pie_server.api.openai import builtin_source
from pie_server.cli import model_app
from pie_server.config import Settings
from pie_server.connection import Patience
from pie_server.sandbox import STACK_BYTES, Limits
from tests.server.conftest import ROOT, LiveServer

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


async def test_the_inferlet_example_streams_whole_characters(tiny_model: Path) -> None:
    """The tokens of the tiny model's characters are their bytes."""
    (block,) = blocks("python inferlet")
    assert block.count("range(8)") == block.count("fresh = [await out]") == 1
    forced = "await out; fresh = [model.encode('\u65e5\U0001f600')[_]]"
    source = block.replace("range(8)", "range(7)").replace("fresh = [await out]", forced)
    sent: list[str] = []

    async def keep(message: Any) -> None:
        sent.append(message)

    server = service.Service.from_settings(Settings(model=str(tiny_model), device="cpu", kv_pool_mb=4))
    try:
        await server.load()
        assert await server.run(source, "inferlet.py", {"prompt": "x"}, keep) == {"text": "\u65e5\U0001f600"}
    finally:
        await server.close()
    assert sent == ["", "", "\u65e5", "", "", "", "\U0001f600"]


def test_commands_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)", README, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for path in set(re.findall(r"`((?:inferlet_sdk|tests|bench|docs|server|pie_core|kernels_w[a-z]+)/[\w./]*)`", README)):
        assert (ROOT / path).exists(), path


# The chat inferlet runs in the sandbox only; its constants are literals.
CHAT = {
    node.targets[0].id: ast.literal_eval(node.value)
    for node in ast.parse(builtin_source("openai_chat.py")).body
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
}
BUDGET, LIMITS, SETTINGS, PATIENCE = Budget(), Limits(), Settings.model_fields, Patience()
PAGE_SENT, PAGE_OPS, PAGE_CHARS = 8 << 20, 8192, 32 << 20
PAGE_DELAYS, PAGE_STALL_S, PAGE_MANIFEST_S, PAGE_STEP_S, PAGE_POOL_MIB = [500, 1000, 2000, 4000, 8000], 30, 15, 86_400, 65_536
PAGE_SOURCES = {  # what stands for these numbers in the page's sources
    "inferlet/limits.ts": [f"stepSent: {PAGE_SENT >> 20} << 20,", f"stepOps: {PAGE_OPS},", f"stepChars: {PAGE_CHARS >> 20} << 20,"],
    "model/download.ts": [f"DELAYS = {PAGE_DELAYS};", f"STALL_MS = {PAGE_STALL_S}_000;"],
    "model/manifest.ts": [f"TIMEOUT_MS = {PAGE_MANIFEST_S}_000;"],
    "pie.ts": [f"LONGEST_STEP = {PAGE_STEP_S:_};", f"bytesBetween(MIB, {PAGE_POOL_MIB:_} * MIB)"],
}
DOCUMENTED = [  # beginning of a row, the limit as it is written there
    ("CPU time without", f"{LIMITS.step_cpu_s:g} s"),
    ("CPU time in total", f"{LIMITS.total_cpu_s:g} s"),
    ("memory,", f"{LIMITS.memory_bytes >> 20} MiB"),
    ("nesting of calls", f"1,000 of Python's, {STACK_BYTES >> 20} MiB of stack"),
    ("source file", f"{cli_input.SOURCE_BYTES >> 20} MiB"),
    ("input file", f"{cli_input.INPUT_BYTES >> 20} MiB"),
    ("forward passes", f"{BUDGET.outstanding}"),
    ("working sets,", f"{BUDGET.handles:,}"),
    ("different epilogues", f"{BUDGET.programs}"),
    ("takes,", f"{BUDGET.futures:,}"),
    ("`print()`", f"{BUDGET.log_bytes:,} characters in all"),
    ("the result of `main`", f"{LIMITS.text_chars:,} characters"),
    ("sent and not read", f"{BUDGET.unread_bytes >> 20} MiB"),
    ("in a page instead: sent", f"{PAGE_SENT:,} characters of JSON"),
    ("in a page: calls to the host", f"{PAGE_OPS:,}, and {PAGE_CHARS:,} characters"),
    ("sent in all", f"{BUDGET.output_bytes >> 20} MiB"),
    ("messages of the client", f"{BUDGET.inbox:,}"),
    ("nesting of what", f"{json_text.MAX_NESTING - 1} levels"),
    ("nesting of a page's", f"{json_text.MAX_NESTING - 1} levels"),
    ("text of one `model.encode`", f"{MAX_CHARS:,} characters"),
    ("cells of one channel", f"{program.MAX_CAPACITY:,}"),
    ("elements of one channel cell", f"{program.MAX_CELL_WORDS:,}"),
    ("elements of all channel cells", f"{BUDGET.cell_words:,}; a channel has capacity + 1 cells"),
    ("elements of the channel cells of all inferlets", f"{ARENA_WORDS:,}"),
    ("results of one pass", f"{RESULTS_WORDS:,} elements"),
    ("mask of one pass", f"{MAX_MASK_BITS:,} bits, one working set"),
    ("masks and trees of one step", f"{MASK_WORDS:,} words: 2 a token, and 1 for 32 hidden or buffered tokens"),
    ("a path given to", f"{ops.MAX_PATH:,} tokens"),
    ("name of a saved", f"1 to {ops.MAX_NAME} letters, digits, `_`, `-`, `.`; no `.` first"),
    ("read-outs of one pass", f"{MAX_READS}"),
    ("tokens from the earliest read-out", f"{cpu.TOKEN_BUCKETS[-1]} on cpu, {webgpu.TOKEN_BUCKETS[-1]} on webgpu"),
    ("elements of one value", f"{program.MAX_ELEMENTS:,}"),
    ("operations", f"{program.MAX_OPS:,}"),
    ("outputs of", f"{program.MAX_OUTS}"),
    ("channels of", f"{program.MAX_CHANS}"),
    ("time of one pass's epilogue", f"{cpu_work.MAX_WORK / 1e9:g} s on cpu and on a software adapter; a GPU is taken for 64 cores"),
    (
        "loop iterations of one GPU thread",
        f"{wgsl_bounds.MAX_TOTAL_ITERATIONS:,} in all its launches, a fourth of what drivers allow a slow GPU; {wgsl.MAX_ITERATIONS:,} in "
        "one launch: rows of a sort or selection are spread over several, one row of some 900,000, or a scatter of "
        "some 59,000 indices, has too many",
    ),
    (
        "barriers of an epilogue's code",
        f"{wgsl_bounds.MAX_BARRIERS}: some 20 sorts, or 60 reductions that depend on each other; all samplers at once take 54",
    ),
    ("lines of WGSL", f"{schedule.MAX_LINES:,}"),
    ("scratch of an epilogue", f"{schedule.MAX_SCRATCH_WORDS:,} words; on webgpu also what the device binds at once"),
    ("Python numbers in", f"{program.MAX_PARAMS}"),
    ("`kvPoolBytes`", f"{1 << 20:,} to {PAGE_POOL_MIB << 20:,}, a whole number"),
    ("`stepSeconds`", f"above 0, at most {PAGE_STEP_S:,}"),
    ("tries of a download", "5 more, after 0.5, 1, 2, 4 and 8 s; told by `onProgress` as `retrying`"),
    ("a download that stalls", f"{PAGE_STALL_S} s without a byte"),
    ("a server that answers a range", f"the same {len(PAGE_DELAYS)} tries, whatever they bring"),
    ("the model's manifest", f"{PAGE_MANIFEST_S} s"),
    ("inference requests", f"{SETTINGS['max_concurrent'].default}"),
    ("request body", f"{SETTINGS['max_body_mb'].default:g} MB"),
    ("a request head,", f"{PATIENCE.head_s:g} s, 8,190 bytes a line"),
    ("a connection between", f"{PATIENCE.idle_s:g} s"),
    ("a request body that stalls", f"{PATIENCE.body_s:g} s without a byte"),
    ("open connections", f"the limit of open files less a quarter of it, {listener.OWN_FILES} at most"),
    ("messages of one request", f"{openai_schema.MAX_MESSAGES:,}"),
    ("answers of one request", f"{openai_schema.MAX_N}"),
    ("a file of `--prewarm`", f"{prewarm._FILE_BYTES >> 20} MiB, and less than the context"),
    ("`stop`", f"{openai_schema.MAX_STOPS}, of 1 to {openai_schema.MAX_STOP_CHARS:,} characters each"),
    ("`max_tokens`", f"{2**31 - 1:,}"),
    ("`temperature`", "0 to 2"),
    ("`top_p`", "0 to 1"),
    ("`frequency_penalty`", f"-{openai_schema.MAX_PENALTY} to {openai_schema.MAX_PENALTY}"),
    ("tokens of the answer that penalties", f"{CHAT['HISTORIES'][-1]:,}"),
    ("`logit_bias`", f"{openai_schema.MAX_BIASES:,} tokens, of -{openai_schema.MAX_BIAS} to {openai_schema.MAX_BIAS} each"),
    ("`top_logprobs`", f"{openai_schema.MAX_TOP_LOGPROBS}"),
    ("log-probabilities of one answer", f"{CHAT['MAX_LOGPROBS']:,}"),
    ("text of all messages", f"{MAX_CHARS:,} characters"),
    ("requests that run", f"{service.TELL_S:g} s"),
    ("waits between rebuilds", f"0, {recovery.FIRST_S:g}, 2, 4 … {recovery.MOST_S:g} s"),
    ("running requests", f"{SETTINGS['shutdown_s'].default:g} s"),
]


def test_the_limits_are_the_codes_own() -> None:
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "what"]
    for (beginning, limit), row in zip(DOCUMENTED, rows, strict=True):
        assert row[0].startswith(beginning)
        assert row[1] == limit, row[0]
    for source, words in PAGE_SOURCES.items():
        found = (ROOT / "web/src" / source).read_text(encoding="utf-8")
        assert [word for word in words if word not in found] == [], source
    assert f"`$PIE_CACHE/sets`, {DISK_CAP >> 30} GiB" in text and f"closed, {MEMORY_CAP >> 20} MiB" in text
    assert f"`--kv-pool-mb`, {SETTINGS['kv_pool_mb'].default} MB" in text
    assert f"pages of {PAGE_TOKENS} tokens" in text
    assert "docs/limits.md" in README


def test_the_columns_of_the_timeline_are_documented() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("| column |")[1].split("\n\n")[0]
    named = [name for line in text.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(named) == sorted(StepRecord._fields)
    assert f"{TIMELINE_STEPS:,} (`most`)" in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_readme_names_every_model_command() -> None:
    assert {command.name for command in model_app.registered_commands} == set(re.findall(r"pie model (\w+)", README))


def test_the_largest_places_of_the_chat_inferlet_hold_what_the_schema_lets_in() -> None:
    assert CHAT["BIASES"][-1] == openai_schema.MAX_BIASES
    assert list(CHAT["BIASES"]) == sorted(CHAT["BIASES"]) and list(CHAT["HISTORIES"]) == sorted(CHAT["HISTORIES"])
