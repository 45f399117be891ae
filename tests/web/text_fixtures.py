"""What Python's op table, tokenizer and chat templates say, written down for the page's JavaScript ones."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

from pie_core.host.ops import OPS
from pie_core.text.chat import ChatEncoder
from pie_core.text.stream import TextError
from pie_core.text.template import ChatTemplate
from pie_core.text.tokenizer import TEMPLATE_KEYS, TokenizerSpec
from pie_core.weights.metadata import Metadata
from pie_server.adapters.tokenizer import HfTokenizer
from tests.text.test_chat import ALTERNATING, CHATML, INJECTIONS, MERGING, QUESTIONS
from tests.text.test_template import ATTACKS, SIZE_BOMBS, TIME_BOMBS
from tests.web.refusals import refusals

RANDOM_TEXTS = 400
# Where the two hosts' Unicode tables may be of different years: only characters that both know.
_KNOWN = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) not in ("Cn", "Cs", "Co")]
_LIKELY = "abc ABC 012 .,;'\"\n\t<|im_end|>'s 're 日本語 é ñ ü ٣ ½ ² \u0085 \ufeff \u00a0 \u3000 😀 👩‍👩‍👧 \u200d \u0301 ß İ ǅ"

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "system", "content": "S"}, {"role": "user", "content": " q <|im_end|>"}, {"role": "assistant", "content": "a\n"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [{"role": "developer", "content": "d"}, {"role": "user", "content": ""}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, None, True, "<"]}}}]}],
    *([{"role": role, "content": text} for role in ("system", "user", "assistant")] for text in INJECTIONS),
]  # fmt: skip
BAD: list[Any] = [
    [], "x", None, {}, [None], [3], [{"content": "x"}], [{"role": "robot", "content": "x"}], [{"role": 1, "content": "x"}],
    [{"role": "user"}], [{"role": "user", "content": None}], [{"role": "assistant", "content": None, "tool_calls": []}],
    [{"role": "user", "content": 3}],
    [{"role": "user", "content": {}}], [{"role": "user", "content": [3]}], [{"role": "user", "content": [{"type": "image"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 1.5}]}], [{"role": "user", "content": "x"}, {"role": "user", "content": True}],
]  # fmt: skip


def text_spec(metadata: Metadata, spec: TokenizerSpec, tokenizer: HfTokenizer) -> dict[str, Any]:
    """As pie_web.boot makes it."""
    ids = {key: metadata.optional_int(f"tokenizer.ggml.{name}_token_id", None) for key, name in TEMPLATE_KEYS.items()}
    tokens = {key: tokenizer.decode([index]) for key, index in ids.items() if index is not None}
    return {"spec": spec, "template": metadata.optional_str("tokenizer.chat_template", None), "tokens": tokens}


def random_texts(seed: int = 7) -> list[str]:
    """Short texts of every kind of character that Unicode assigns, likely ones often."""
    chance = random.Random(seed)
    return [
        "".join(chance.choice(_LIKELY) if chance.random() < 0.6 else chr(chance.choice(_KNOWN)) for _ in range(chance.randint(1, 40)))
        for _ in range(RANDOM_TEXTS)
    ]


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """{"value"} or {"error", "message"} of a call."""
    try:
        return {"value": call(*args, **kwargs)}
    except TextError as error:
        return {"error": type(error).__name__, "message": str(error)}


def chats(tokenizer: HfTokenizer, spec: TokenizerSpec, own: ChatEncoder, own_source: str) -> list[dict[str, Any]]:
    """Templates with what `ChatEncoder` answers: conversations, turns, cue and seal."""
    specials = spec["specials"]
    bos = "<|endoftext|>" + CHATML
    made: list[tuple[str, ChatEncoder, int | None]] = [(own_source, own, None)]
    made += [(source, ChatEncoder(tokenizer, ChatTemplate(source), specials, bos=0), 0) for source in (CHATML, bos)]
    others = (ALTERNATING, MERGING, CHATML.replace("{{ m.content }}", "{{ m.content | trim }}"), "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.name }}{{ m.content }}<|{{ m.content }}|>{% endfor %}",
        "{% for t in tools %}{{ t.function | tojson }}{% endfor %}"
        "{{ messages[0].tool_calls | tojson if messages[0].tool_calls }}")  # fmt: skip
    made += [(source, ChatEncoder(tokenizer, ChatTemplate(source), specials), None) for source in others]
    tool = {"type": "function", "function": {"name": "name", "description": "a <|im_end|> b"}}
    rows = []
    for source, chat, first in made:
        cases = [
            {"messages": messages, "cue": cue, "tools": tools, "ids": outcome(chat.encode, messages, cue=cue, tools=tools),
             "text": outcome(chat.text, messages, cue=cue, tools=tools)}
            for messages in [*CONVERSATIONS, *BAD] for cue, tools in ((True, None), (False, [tool] if "tools" in source else None))
        ]  # fmt: skip
        turns = [
            {"role": role, "content": content, "ids": outcome(chat.role, role, content)}
            for role in ("system", "user", "assistant", "tool", "robot") for content in ("Hi there", " q <|im_end|>", "")
        ]  # fmt: skip
        rows.append(
            {"template": source, "bos": first, "cases": cases, "turns": turns, "cue": outcome(chat.cue), "seal": outcome(chat.seal)}
        )
    return rows


def fixtures(metadata: Metadata, spec: TokenizerSpec, tokenizer: HfTokenizer, chat: ChatEncoder, goldens: dict[str, Any]) -> dict[str, Any]:
    """Everything that the tests of web/src/inferlet compare with."""
    cases = [
        *(case["text"] for case in goldens["tokenizer_cases"]),
        *random_texts(),
        *INJECTIONS,
        *(f"a{name}b" for name in spec["specials"]),
    ]
    source = metadata.optional_str("tokenizer.chat_template", None)
    assert source is not None
    chance = random.Random(3)
    rows = [[chance.randrange(tokenizer.vocab_size) for _ in range(12)] for _ in range(200)]
    encoded = {text: tokenizer.encode(text) for text in cases}
    golden = {QUESTIONS[name]: goldens[name] for name in QUESTIONS}
    return {
        "refusals": refusals(),
        "ops": {name: [op.kind, list(op.fields), dict(op.defaults)] for name, op in OPS.items()},
        "text": text_spec(metadata, spec, tokenizer),
        "golden_cases": goldens["tokenizer_cases"],
        "golden_chats": [{"question": question, "text": row["rendered"], "ids": row["prompt_ids"]} for question, row in golden.items()],
        "texts": [{"text": text, "ids": row, "back": tokenizer.decode(row)} for text, row in encoded.items()],
        "decoded": [{"ids": row, "text": tokenizer.decode(row)} for row in rows],
        "bytes": [tokenizer.token_bytes(index).hex() for index in range(tokenizer.vocab_size)],
        "chats": chats(tokenizer, spec, chat, source),
        "bombs": [*TIME_BOMBS.values(), *SIZE_BOMBS.values(), *ATTACKS],
    }


def dumps(value: Any) -> str:
    """JSON as the engine worker writes it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
