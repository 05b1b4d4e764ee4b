"""Prompts of a completion: text, token ids, or a list of either.

A list of a million token ids takes tens of milliseconds to read, during which no other thread runs Python. So it is
read in pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np

from prefixd.server.http.openai.sampling_fields import FieldError

MOST_PROMPTS = 128
"""Prompts of one request."""
_PIECE_BYTES = 32 << 10
_BETWEEN = re.compile(r"[ \t\r\n,]*")
_BETWEEN_BYTES = re.compile(rb"[ \t\r\n,]*")
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_WRONG = "send a text, a list of token ids, or a list of texts or of lists of token ids"


def read_prompts(raw: bytes) -> list[str | bytes]:
    """The prompts of a request: texts, or token ids as little-endian uint32.

    Args:
        raw: the value of `prompt`, valid JSON.

    Raises:
        FieldError: it is something else, or there are too many prompts.
    """
    raw = raw.strip()
    second = raw[1:].lstrip()[:1]
    if raw[:1] == b'"':
        return [msgspec.json.decode(raw, type=str)]
    if raw[:1] != b"[":
        raise FieldError("prompt", f"prompt is neither a text nor a list; {_WRONG}")
    if second == b"]":
        raise FieldError("prompt", "prompt is an empty list; send at least one prompt")
    if second == b'"':
        return list(_texts(raw))
    if second != b"[":
        return [_token_ids(raw)]
    _check_count(raw.count(b"[") - 1)  # lists of numbers have no other bracket
    return [_token_ids(each) for each in _lists(raw)]


def _token_ids(raw: bytes) -> bytes:
    """A list of token ids as little-endian uint32."""
    inner = raw[1:-1]
    found = bytearray()
    at = 0
    while at < len(inner):
        end = inner.find(b",", at + _PIECE_BYTES)
        end = len(inner) if end < 0 else end
        try:
            ids = msgspec.json.decode(b"[" + inner[at:end] + b"]", type=list[_TokenId])
        except msgspec.DecodeError as error:
            raise FieldError("prompt", f"prompt has something else than token ids ({error}); {_WRONG}") from error
        found += np.array(ids, "<u4").tobytes()
        at = end + 1
    return bytes(found)


def _lists(raw: bytes) -> Iterator[bytes]:
    """The lists in a list, one by one: what follows the first may be millions of numbers."""
    at = 1
    while True:
        between = _BETWEEN_BYTES.match(raw, at)
        at = at if between is None else between.end()
        if raw[at : at + 1] == b"]":
            return
        if raw[at : at + 1] != b"[":
            raise FieldError("prompt", f"prompt is a list of lists and of something else; {_WRONG}")
        end = raw.index(b"]", at) + 1
        yield raw[at:end]
        at = end


def _texts(raw: bytes) -> list[str | bytes]:
    """A list of texts, read one by one: there may be millions."""
    text, decoder = raw.decode(), json.JSONDecoder()
    found: list[str | bytes] = []
    at = 1
    while True:
        between = _BETWEEN.match(text, at)
        at = at if between is None else between.end()
        if text[at] == "]":
            return found
        if text[at] != '"':
            raise FieldError("prompt", f"prompt is a list of texts and of something else; {_WRONG}")
        _check_count(len(found) + 1)
        begin = at
        _, at = decoder.raw_decode(text, begin)
        found.append(msgspec.json.decode(text[begin:at], type=str))  # refuses half a surrogate, as everywhere else


def _check_count(prompts: int) -> None:
    if prompts > MOST_PROMPTS:
        raise FieldError("prompt", f"prompt has more than {MOST_PROMPTS} prompts; send them in several requests")
