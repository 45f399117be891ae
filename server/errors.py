"""Errors that users see: sentences for the terminal and the OpenAI error shape for HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UserError(Exception):
    """Something the operator can fix. The message is one sentence; the CLI prints it and exits with 2."""


class ApiError(Exception):
    """An HTTP error in the OpenAI shape. `param` names the offending field; `headers` go onto the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @staticmethod
    def from_body(status: int, error: Mapping[str, Any]) -> ApiError:
        """The error an API inferlet answered with; missing fields get the defaults of `status`."""
        return ApiError(status, str(error.get("message", "")), code=error.get("code"), param=error.get("param"), kind=error.get("type"))


def one_sentence(message: str) -> str:
    """`message` on one line, so that neither a terminal nor a log line can be forged by what it quotes."""
    return " ".join("".join(c if c.isprintable() else " " for c in message).split())
