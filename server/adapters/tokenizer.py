"""The checkpoint's tokenizer, run by the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Sequence

import tokenizers

from pie_core.text.tokenizer import MAX_CHARS, TokenizerError, TokenizerSpec, token_table


class HfTokenizer:
    """A `pie_core.text.tokenizer.Tokenizer`. Thread-safe: the library's object is never changed after construction."""

    def __init__(self, spec: TokenizerSpec) -> None:
        added = [token for token in spec["tokenizer"]["added_tokens"] if not token["special"]]
        # Without its special tokens the library cannot find them in user text; templates look them up in spec["specials"].
        self._engine = tokenizers.Tokenizer.from_str(json.dumps({**spec["tokenizer"], "added_tokens": added}))
        self._bytes = token_table(spec)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special tokens in it stay text. Raises TokenizerError over MAX_CHARS characters or for lone surrogates.

        Bytes for which the checkpoint has no token (in SmolLM2 six control characters and the unassigned planes 4 to 11)
        are left out, as the reference implementation does.
        """
        if len(text) > MAX_CHARS:
            message = f"text of {len(text)} characters is too long to encode; at most {MAX_CHARS} are allowed"
            raise TokenizerError(message, too_long=True)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"character {error.start} of the text is a lone surrogate, which is no Unicode text") from None
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included; bytes that are no UTF-8 become U+FFFD. Raises TokenizerError for an unknown id."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id. Raises TokenizerError for an unknown id."""
        if not 0 <= token < len(self._bytes):
            raise TokenizerError(f"token id {token} is outside the vocabulary; ids are 0 to {len(self._bytes) - 1}")
        return self._bytes[token]
