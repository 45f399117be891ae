"""The `pie` command. Exit codes: 0 fine, 1 the inferlet failed, 2 one sentence on stderr says what to fix, 130 interrupted."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from pie_server import memory, terminal
from pie_server.cli_input import parse_pairs, read_input_file, read_source, text_hint, usage_sentence
from pie_server.cli_unread import unread_keys
from pie_server.errors import UserError, one_sentence

if TYPE_CHECKING:
    from rich.progress import Progress

    from pie_server.service import Service

Device = Literal["auto", "cpu", "webgpu"]
ModelOption = Annotated[
    str | None,
    typer.Option(help="A model's name (`pie model list`), hub id or .gguf file (default SmolLM2-135M-Instruct).", show_default=False),
]
DeviceOption = Annotated[
    Device | None, typer.Option(help="auto takes a real GPU, else the cpu; software Vulkan only with webgpu (default auto).")
]
PoemOption = Annotated[Path | None, typer.Option(help="A model file of your own in place of the built-in one; it runs with your rights.")]
PoolOption = Annotated[int | None, typer.Option(help="MB of KV cache on the device (default 512).", show_default=False)]

LEAST_POOL_TOKENS = 128  # of a KV cache that holds a system prompt, a question and an answer of a line
INTERRUPTED = 130  # the exit code of a command that Ctrl-C ended

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
model_app = typer.Typer(no_args_is_help=True, help="Fetch, list and remove models.")
app.add_typer(model_app, name="model")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"pie {version('pie-webgpu')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Pie: an LLM engine that you program."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Bar:
    """A progress line on a terminal; silent where stderr is none."""

    def __init__(self) -> None:
        self._shown = ""
        self._live = sys.stderr.isatty()

    def show(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` (0 = unknown) in the unit of the stage."""
        text = f"{stage} {100 * done // total}%" if total else stage
        if self._live and text != self._shown:
            self._shown = text
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._live and self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@app.command()
def serve(
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks a free one (default 8080).")] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    poem: PoemOption = None,
    kv_pool_mb: PoolOption = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic", help="The same request with the same seed gives the same tokens in any batch (default False)."),
    ] = None,
    timeline: Annotated[
        bool | None, typer.Option("--timeline", help="Answer GET /debug/timeline: what the last steps held (default False).")
    ] = None,
    prewarm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="JSON file of chat messages, such as a system prompt. Computed before the server is ready, and found by all requests "
            "that begin with them, whatever their key. Repeatable, or PIE_PREWARM with commas.",
            show_default=False,
        ),
    ] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Requests at one time; more get 429 (default 64).", show_default=False)] = None,
    max_body_mb: Annotated[float | None, typer.Option(help="Largest request body in MB (default 8).", show_default=False)] = None,
    shutdown_s: Annotated[
        float | None, typer.Option(help="Seconds for running requests after SIGTERM (default 5).", show_default=False)
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Host name that requests may ask for, besides this machine's; repeatable.", show_default=False)
    ] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Web origin that may call; repeatable.", show_default=False)] = None,
    log_format: Annotated[
        Literal["json", "text"] | None, typer.Option(help="Form of the log lines (default text).", show_default=False)
    ] = None,
) -> None:
    """Serve the OpenAI API."""
    from pie_server.config import load_settings
    from pie_server.logs import configure
    from pie_server.serve import bind
    from pie_server.serve import serve as serve_until_signal
    from pie_server.service import Service

    settings = load_settings(
        host=host, port=port, model=model, device=device, poem=poem, kv_pool_mb=kv_pool_mb, max_concurrent=max_concurrent,
        max_body_mb=max_body_mb, shutdown_s=shutdown_s, allowed_hosts=allowed_host or None, cors_origins=cors_origin or None,
        log_format=log_format, deterministic=deterministic, timeline=timeline, prewarm=prewarm or None,
    )  # fmt: skip
    configure(settings.log_format)
    service = Service.from_settings(settings)
    with bind(settings.host, settings.port) as sock:
        if settings.host not in ("127.0.0.1", "::1", "localhost"):
            _say(f"note: {settings.host} can be reached from other machines, and this server asks for no key")
        asyncio.run(serve_until_signal(sock, service, settings, lambda url: _say_ready(url, service), _say_page))


def _say_ready(url: str, service: Service) -> None:
    _say_out(url, lambda: _print_ready(url, service))


def _say_page(url: str) -> None:
    _say_out(url, lambda: print(f"  {url}/hello in a browser: the same engine in the page", flush=True))


def _say_out(url: str, write: Callable[[], None]) -> None:
    try:
        write()
    except (terminal.OutputError, BrokenPipeError) as err:  # a server goes on serving where nobody reads its output
        terminal.drop_output()
        _say(f"note: the server is ready on {url}, but that could not be printed: {err}")


def _print_ready(url: str, service: Service) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32})
    command = "pie" if shutil.which("pie") == str(Path(sys.argv[0]).absolute()) else sys.argv[0]
    print(f"Pie serves {service.card.name} on {url}")
    print(f"device: {service.device_text}")
    print(f"KV cache: {service.pool_text}")
    if service.prewarm_text:
        print(f"prewarmed: {service.prewarm_text}")
    small = service.pool_tokens < LEAST_POOL_TOKENS
    if small:
        need = "a short question and its answer take more than that; use a larger --kv-pool-mb"
        print(f"note: the KV cache has room for {service.pool_tokens:,} tokens, and {need}")
    print("try:")
    if not small:
        print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    print(f'  {command} run inferlet_sdk/examples/hello.py --prompt "The capital of France is"')
    print(f"  curl {url}/health", flush=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    *,
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="The inferlet: a Python file with a main(input).")],
    input: Annotated[str | None, typer.Option(help="JSON file with the input, - for standard input; --key value pairs go over it.")] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    poem: PoemOption = None,
    kv_pool_mb: PoolOption = None,
) -> None:
    """Run one inferlet: `pie run FILE --key value …`. Prints what it sends, then its result as JSON on the last line.

    A value that is JSON (5, true, [1, 2]) arrives as such, any other as text, quotes included. `--key:text 5` passes text whatever
    it looks like, `--key=--value` text that begins with dashes, a lone `--key` is true.
    """
    from pie_server.config import load_settings
    from pie_server.service import Service

    source = read_source(file)
    value = {**(read_input_file(input) if input is not None else {}), **parse_pairs(context.args)}
    settings = load_settings(model=model, device=device, poem=poem, kv_pool_mb=kv_pool_mb)
    bar = _Bar()
    service = Service.from_settings(settings, on_progress=lambda progress: bar.show(progress.stage, progress.done, progress.total))

    async def load_and_run() -> Any:
        interrupted = False
        try:
            await service.load()
            bar.clear()
            if service.status.error is not None:
                raise UserError(service.status.error)
            name = Path(file).name.encode("utf-8", "backslashreplace").decode()
            return await service.run(source, name, value, _print_message, on_log=_print_log)
        except asyncio.CancelledError:
            interrupted = True
            raise
        finally:
            if not interrupted:  # else `main` ends the process, which frees all at once instead of after the steps in flight
                await service.close()

    for key in unread_keys(source, parse_pairs(context.args)):
        _say(f"note: --{key} is not read: {file} never asks its input for {key!r}")
    result = _run_inferlet(load_and_run(), context.args)
    _newline_if_needed()
    print(json.dumps(result, ensure_ascii=False), flush=True)


def _run_inferlet(work: Coroutine[Any, Any, Any], args: Sequence[str]) -> Any:
    from pie_server.api.backend import InferletError

    try:
        return asyncio.run(work)
    except InferletError as error:
        _newline_if_needed()
        _say(one_sentence(str(error)))
        hint = text_hint(args, error.kind, error.message)
        if hint is not None:
            _say(f"note: {one_sentence(hint)}")
        raise typer.Exit(1) from error


_at_line_start = True


async def _print_message(value: Any) -> None:
    global _at_line_start  # noqa: PLW0603  one terminal, one cursor
    if not isinstance(value, str):
        _newline_if_needed()  # a JSON value has a line of its own
    text = value if isinstance(value, str) else f"{json.dumps(value, ensure_ascii=False)}\n"
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
        _at_line_start = text.endswith("\n")


def _newline_if_needed() -> None:
    global _at_line_start  # noqa: PLW0603  as above
    if not _at_line_start:
        print(flush=True)
        _at_line_start = True


def _print_log(level: str, text: str) -> None:
    _say(text if level == "info" else f"{level}: {text}")


@model_app.command("pull")
def model_pull(name: Annotated[str | None, typer.Argument(help="A model's name; the default model when left out.")] = None) -> None:
    """Fetch a model; an interrupted download goes on where it stopped."""
    from pie_server import models

    name = name or models.DEFAULT_MODEL
    with _download_bar() as bar:
        task = bar.add_task(name, total=None)
        path = models.pull(name, lambda done, total: bar.update(task, completed=done, total=total))
    print(path)


def _download_bar() -> Progress:
    """Bytes, rate and remaining time on a terminal; nothing where stderr is none."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


@model_app.command("list")
def model_list() -> None:
    """List the models of the local store."""
    from pie_server import models

    for entry in models.list_models():
        print(entry)


@model_app.command("info")
def model_info(name: Annotated[str, typer.Argument(help="A model's name or the path of a .gguf file.")]) -> None:
    """Show what a checkpoint holds."""
    from pie_server import models

    for key, value in models.info(name).items():
        print(f"{key}: {value}")


@model_app.command("remove")
def model_remove(name: Annotated[str, typer.Argument(help="A model's name.")]) -> None:
    """Delete a model from the local store."""
    from pie_server import models

    models.remove(name)
    print(f"removed {name}")


def _for_the_user(error: Exception) -> bool:
    """Whether `error`'s message is a sentence for the user. The modules that say so are slow to import, so only now."""
    if isinstance(error, UserError):
        return True
    from pie_server.service import USER_ERRORS

    return isinstance(error, USER_ERRORS)


def execute(args: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. What users can cause ends in one sentence on stderr, never in a traceback."""
    try:
        code = app(args, standalone_mode=False)
        sys.stdout.flush()  # here, where a full disk can still be told
        return code if isinstance(code, int) else 0
    except typer.Exit as err:
        return err.exit_code
    except typer.TyperException as err:
        message = usage_sentence(one_sentence(err.format_message()))
        if message:  # empty after the help that a bare `pie` prints
            _say(f"pie: {message}")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away; nothing is left to be told
        terminal.drop_output()
        return 1
    except terminal.OutputError as err:
        terminal.drop_output()
        _say(f"pie: {err}")
    except Exception as err:  # the program's last boundary: sort what users can fix from faults of ours
        if not _for_the_user(err):
            raise
        _say(f"pie: {one_sentence(str(err))}")
    return 2


def main() -> None:
    """Run the command line and end the process."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # entry.py's
        signal.signal(signal.SIGINT, signal.default_int_handler)
    memory.limit_arenas()
    terminal.use_utf8()
    _end(execute())


def _end(code: int) -> NoReturn:
    """End the process at once. The interpreter's own end frees what the system frees faster (a second for a model), and a thread may
    still be inside a step of the cpu device after Ctrl-C, or in a guest that calls back into Python."""
    atexit._run_exitfuncs()  # folders of a build that was broken off
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
