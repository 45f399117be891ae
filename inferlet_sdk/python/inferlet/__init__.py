"""The inferlet SDK: `from inferlet import chat, model` and `from inferlet.eta import ForwardPass, Pipeline, ...`.

An inferlet is one file with `async def main(input: dict) -> dict` (plain `def` works too): JSON in, JSON out.
"""

from . import chat, errors, eta, model
from ._io import log, receive, send, sleep
from .errors import InferletError

__all__ = ["InferletError", "chat", "errors", "eta", "log", "model", "receive", "send", "sleep"]
