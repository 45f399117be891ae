"""The served model: its facts, its tokenizer, and what it computes ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from . import _host
from ._call import asks
from ._loop import HostFuture
from ._values import _short, check_tokens
from .errors import UsageError

name: str = ""
vocab: int = 0  # number of token ids; logits have this many elements
hidden: int = 0  # width of the hidden state
kv_width: int = 0  # width of a layer's keys, and of its values; 0 where the host does not tell
context: int = 0  # most tokens of one sequence
pages: int = 0  # pages of the KV cache, which all inferlets share; 0 where the host does not tell
page_tokens: int = 16  # tokens of one page
eos: list[int] = []  # the checkpoint's stop ids; several are normal


def encode(text: str) -> list[int]:
    """Token ids of `text`; adds no special tokens and never parses them."""
    if not isinstance(text, str):
        raise UsageError(f"model.encode: text is {_short(text)}; use a str{', text.decode() for example' * isinstance(text, bytes)}")
    ids: list[int] = _host.call_with("encode", text=text)
    return ids


def decode(ids: Sequence[int] | int) -> str:
    """The text of token ids. A token may hold part of a character: decode many at once, or use `Detokenizer`."""
    text: str = _host.call_with("decode", ids=check_tokens("model.decode: ids", [ids] if type(ids) is int else ids))
    return text


@overload
def token_bytes(ids: int) -> bytes: ...
@overload
def token_bytes(ids: Sequence[int]) -> list[bytes]: ...
def token_bytes(ids: Sequence[int] | int) -> list[bytes] | bytes:
    """The bytes of one token, or of each token of a list."""
    single = type(ids) is int
    cells = _host.call_with("bytes", ids=check_tokens("model.token_bytes: ids", [ids] if single else ids))
    return bytes.fromhex(cells[0]) if single else [bytes.fromhex(c) for c in cells]


@asks("model.prewarm", "await model.prewarm(…)")
async def prewarm(ids: Sequence[int]) -> int:
    """Compute `ids` ahead, as the first tokens of whatever comes: a working set of the same user that begins with them, in this inferlet
    or a later one, goes on from there. How many of them are cached now: those of full pages (`page_tokens`), 0 for less than one and
    for models with recurrent state. They stay until others need the room. Raises InvalidPass, ContextLengthExceeded, OutOfPages,
    BudgetExceeded."""
    fid = _host.new_id()
    _host.call("prewarm", f'{{"ids":{check_tokens("model.prewarm: ids", ids)},"f":{fid}}}')
    n: int = await HostFuture(fid)
    return n


def _configure(facts: dict[str, Any]) -> None:
    """Fill in the facts that `start` brings."""
    globals().update(
        name=str(facts.get("name", "")),
        vocab=int(facts.get("vocab", 0)),
        hidden=int(facts.get("hidden", 0)),
        kv_width=int(facts.get("kv_width", 0)),
        context=int(facts.get("context", 0)),
        pages=int(facts.get("pages", 0)),
        page_tokens=int(facts.get("page_tokens", 16)),
        eos=[int(t) for t in facts.get("eos", [])],
    )
