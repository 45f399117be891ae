"""The `pie` command: what it prints, and its exit codes. Errors that users can cause are one sentence, never a traceback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pie_server.cli import execute
from pie_server.config import Settings
from pie_server.models import DEFAULT_MODEL
from tests.server.conftest import ROOT

EXAMPLES = ROOT / "inferlet_sdk" / "examples"


def pie(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pie_server.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, cwd=ROOT, timeout=120, check=False)


def assert_one_sentence(text: str) -> None:
    assert text.startswith("pie: ")
    assert text.count("\n") == 1 and text.endswith("\n")
    assert "Traceback" not in text


def write(path: Path, source: str) -> str:
    path.write_text(source, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("device", ["cpu", "webgpu"])
def test_hello_continues_the_prompt(device: str) -> None:
    done = pie("run", str(EXAMPLES / "hello.py"), "--prompt", "The capital of France is", "--device", device)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["text"].startswith(" Paris")


CHATTY = """
from inferlet import send

async def main(input: dict) -> dict:
    send("one ")
    send("two 가")
    send({"three": 3})
    print("to the log")
    send("four")
    return {"input": input}
"""


def test_prints_what_it_sends_then_the_result(tmp_path: Path, tiny_model: Path) -> None:
    file = write(tmp_path / "chatty.py", CHATTY)
    (tmp_path / "in.json").write_text('{"a": 1, "b": "x"}')
    done = pie("run", file, "--model", str(tiny_model), "--device", "cpu", "--input", str(tmp_path / "in.json"), "--b", "2", "--go")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:-1] == ["one two 가", '{"three": 3}', "four"]
    assert json.loads(lines[-1]) == {"input": {"a": 1, "b": 2, "go": True}}
    assert "to the log" in done.stderr


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("async def main(input):\n    x = {}\n    return x['key']\n", "KeyError: 'key' (bad.py, line 3)\n"),
        ("async def main(input):\n    return (\n", "SyntaxError: "),
        ("x = 1\n", "MainMissing: "),
        ("def main(input):\n    return {1, 2}\n", "ResultNotJson: "),
    ],
)
def test_the_authors_exception_exits_with_1(
    tmp_path: Path, tiny_model: Path, source: str, match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["run", write(tmp_path / "bad.py", source), "--model", str(tiny_model), "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert match in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["run"], "file"),
        (["nonsense"], "nonsense"),
        (["run", "none.py"], "none.py"),
        (["run", __file__, "stray"], "stray"),
        (["run", __file__, "--device", "tpu"], "tpu"),
        (["run", __file__, "--model", "no-such-model"], "--model: unknown model 'no-such-model'"),
        (["run", ""], "the inferlet's path is empty"),
        (["run", __file__, "--poem", "."], "the model file . given with --poem is a directory"),
        (["run", __file__, "--i", "1e999"], "--i: 1e999 is too large"),
        (["run", __file__, "--model", "/no/such/file.gguf"], "/no/such/file.gguf"),
        (["run", __file__, "--kv-pool-mb", "0"], "--kv-pool-mb (or PIE_KV_POOL_MB) is '0'; use a whole number from 1"),
        (["run", __file__, "--input", "none.json"], "none.json"),
        (["serve", "--port", "x"], "port"),
        (["serve", "--port", "70000"], "70000"),
        (["serve", "--model", "no-such-model"], "no-such-model"),
        (["model", "info", "no-such-model"], "no-such-model"),
        (["model", "remove", "no-such-model"], "no-such-model"),
        (["model", "pull", "no-such-model"], "no-such-model"),
    ],
)
def test_what_the_user_can_fix_exits_with_2_and_one_sentence(args: list[str], match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(args) == 2
    captured = capsys.readouterr()
    assert_one_sentence(captured.err)
    assert match in captured.err
    assert captured.out == ""


def test_broken_checkpoints_exit_with_2(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tiny_model.read_bytes()
    truncated, other, not_gguf = tmp_path / "truncated.gguf", tmp_path / "other.gguf", tmp_path / "not.gguf"
    truncated.write_bytes(data[: len(data) // 2])
    assert data.count(b"llama") > 1  # the architecture's name is a prefix of its keys too
    other.write_bytes(data.replace(b"llama", b"zebra"))
    not_gguf.write_bytes(b"hello")
    for path, match in ((truncated, "truncated.gguf"), (other, "zebra"), (not_gguf, "not.gguf")):
        for command in (["run", __file__], ["serve", "--port", "0"]):
            assert execute([*command, "--model", str(path)]) == 2
            err = capsys.readouterr().err
            assert_one_sentence(err)
            assert match in err


def test_a_poem_that_does_not_exist_or_load(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = write(tmp_path / "broken.py", "1/0\n")
    for poem, match in ((str(tmp_path / "none.py"), "none.py"), (broken, "ZeroDivisionError")):
        assert execute(["run", __file__, "--model", str(tiny_model), "--poem", poem]) == 2
        err = capsys.readouterr().err
        assert_one_sentence(err)
        assert match in err


def test_a_taken_port_exits_with_2(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert execute(["serve", "--port", port, "--model", str(tiny_model)]) == 2
    err = capsys.readouterr().err
    assert_one_sentence(err)
    assert f"port {port}" in err


def test_help_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", "--help"]) == 0
    assert "--model" in capsys.readouterr().out


def test_the_help_tells_each_default(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line knows them by heart: the settings take too long to import for a `--help`."""
    monkeypatch.setenv("COLUMNS", "300")  # one line an option
    assert execute(["serve", "--help"]) == 0
    shown = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("│ --")}
    defaults = {name: field.default for name, field in Settings.model_fields.items() if isinstance(field.default, str | int | float)}
    for name, default in {**defaults, "model": DEFAULT_MODEL}.items():
        option = f"--{name.replace('_', '-')}"
        if name != "retry_after_s":  # set in the environment only
            assert f"(default {f'{default:g}' if isinstance(default, float) else default})" in shown[option]


def test_a_bare_pie_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([]) == 2
    captured = capsys.readouterr()
    assert "serve" in captured.out
    assert captured.err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pie 0.")


def test_model_info_of_a_path(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["model", "info", str(tiny_model)]) == 0
    out = capsys.readouterr().out
    assert "llama" in out and "512" in out


def test_ctrl_c_ends_a_run_with_130(tmp_path: Path, tiny_model: Path) -> None:
    source = "import asyncio\nfrom inferlet import send\nasync def main(input):\n    send('begun\\n')\n    await asyncio.sleep(60)\n"
    command = [
        sys.executable,
        "-m",
        "pie_server.cli",
        "run",
        write(tmp_path / "slow.py", source),
        "--model",
        str(tiny_model),
        "--device",
        "cpu",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert "Traceback" not in process.stderr.read()


ECHO = "async def main(input):\n    return input\n"


def test_output_is_utf8_whatever_the_locale(tmp_path: Path, tiny_model: Path) -> None:
    command = [sys.executable, "-m", "pie_server.cli", "run", write(tmp_path / "echo.py", ECHO), "--model", str(tiny_model)]
    env = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "--device", "cpu", "--a", "é"], capture_output=True, cwd=ROOT, env=env, timeout=60, check=False)
    assert (done.returncode, done.stdout.decode()) == (0, '{"a": "é"}\n'), done.stderr


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["model", "list"]])
def test_output_that_cannot_be_written_is_one_sentence(args: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "pie_server.cli", *args]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "pie: cannot write the output: No space left on device\n")


def test_text_that_looks_like_a_number(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "async def main(input):\n    return input['prompt'] + '!'\n"
    command = ["run", write(tmp_path / "text.py", source), "--model", str(tiny_model), "--device", "cpu"]
    assert execute([*command, "--prompt:text", "5"]) == 0
    assert capsys.readouterr().out == '"5!"\n'
    assert execute([*command, "--prompt=--dashes"]) == 0
    assert capsys.readouterr().out == '"--dashes!"\n'
    assert execute([*command, "--prompt", "5"]) == 1
    error, note = capsys.readouterr().err.splitlines()
    assert error.startswith("TypeError: ")
    assert note == "note: --prompt was passed as 5, not as text; --prompt:text VALUE passes text"


def test_an_input_that_the_inferlet_never_reads_is_noted(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "asks.py", "async def main(input):\n    return input.get('prompt', 'none')\n")
    assert execute(["run", file, "--model", str(tiny_model), "--device", "cpu", "--promt", "x"]) == 0
    captured = capsys.readouterr()
    assert captured.out == '"none"\n'
    assert captured.err == f"note: --promt is not read: {file} never asks its input for 'promt'\n"


def test_a_number_that_is_out_of_range_is_no_matter_of_text(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "from inferlet.eta import Channel\ndef main(input):\n    Channel.counter(input['seed'])\n"
    assert execute(["run", write(tmp_path / "seed.py", source), "--model", str(tiny_model), "--device", "cpu", "--seed", "-1"]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("UsageError: Channel.counter: seed is -1")


SILENT = """
import asyncio
from inferlet import send
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax

async def main(input):
    ws, pipe = WorkingSet(), Pipeline()
    fwd = ForwardPass()
    fwd.embed([5] * input["n"])
    fwd.state([ws], StateGeometry.folding())
    out = fwd.epilogue(lambda: reduce_argmax(intrinsics.output(0, "logits")))
    pipe.submit(fwd)
    send("begun\\n")
    return await out
"""


def test_ctrl_c_does_not_wait_for_a_long_prefill(tmp_path: Path) -> None:
    long = write(tmp_path / "long.py", SILENT)  # a prefill of 6,000 tokens, which takes far longer than what it may take here
    command = [sys.executable, "-m", "pie_server.cli", "run", long, "--device", "cpu", "--n", "6000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        assert process.stderr.read() == ""


@pytest.mark.parametrize("delay", [0.06, 0.1, 0.15, 0.25])
def test_ctrl_c_while_the_command_is_imported(delay: float) -> None:
    command = [sys.executable, "-c", "from pie_server.entry import main; print(flush=True); main()", "model", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        time.sleep(delay - 0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (130, -signal.SIGINT, 0)
        assert process.stderr.read() == ""
