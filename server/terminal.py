"""The process's standard output: UTF-8 whatever the locale, and one sentence when it cannot be written."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from pie_server.errors import UserError


class OutputError(UserError):
    """Standard output cannot be written (a full disk, a closed file)."""


class _Stdout(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:  # the reader went away; nothing is wrong
            raise
        except OSError as error:
            raise OutputError(f"cannot write the output: {error.strerror}") from error


def use_utf8() -> None:
    """Write UTF-8 to standard output and error from now on. What no encoding holds (lone surrogates) is written as an escape."""
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        raw = _Stdout(sys.stdout.fileno(), "w", closefd=False)
        buffered = io.BufferedWriter(raw)
        sys.stdout = io.TextIOWrapper(buffered, encoding="utf-8", errors="backslashreplace", line_buffering=raw.isatty())


def drop_output() -> None:
    """Let what is still buffered for standard output go nowhere: the interpreter writes it once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
