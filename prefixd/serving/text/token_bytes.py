"""The bytes of single tokens, as a list of logprobs shows them: a token may be half a character."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenBytes:
    """Bytes of a tokenizer's tokens.

    Tokenizers write a token in one of two ways: each byte as a printable character (GPT-2 and most later models), or as
    text with a sign for the space, and `<0x0A>` for a byte that has no token (SentencePiece).

    Args:
        tokenizer: the model's.
        added: ids of the tokens that are written as they are, such as the end of a turn.
    """

    def __init__(self, tokenizer: Tokenizer, added: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._added = added
        decoder = json.loads(tokenizer.to_str())["decoder"]
        kinds = {part["type"] for part in _parts(decoder)}
        self._bytes = _byte_of_character() if "ByteLevel" in kinds else None
        self._pieces = bool(kinds & {"ByteFallback", "Metaspace"})

    def of(self, token: int) -> bytes:
        """The bytes of a token."""
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""  # a model's vocabulary may be longer than its tokenizer's
        if token in self._added:
            return written.encode()
        if self._bytes is not None:
            known = self._bytes
            if all(character in known for character in written):
                return bytes(known[character] for character in written)
        elif self._pieces:
            byte = _BYTE.fullmatch(written)
            return bytes([int(byte[1], 16)]) if byte else written.replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()


def _parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes are written as themselves, the others as the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
