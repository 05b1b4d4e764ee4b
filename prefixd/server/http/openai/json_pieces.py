"""JSON in pieces: an answer may have tens of megabytes, and copying them at once would hold the event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PIECE_BYTES = 256 << 10


class JsonPieces:
    """A JSON value as text, in pieces of 256 KiB and the rest."""

    def __init__(self) -> None:
        self.pieces = [bytearray()]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(map(len, self.pieces))

    def add(self, text: bytes | bytearray) -> None:
        """Appends text."""
        if len(self.pieces[-1]) >= _PIECE_BYTES:
            self.pieces.append(bytearray())
        self.pieces[-1] += text

    def extend(self, other: JsonPieces) -> None:
        """Appends the pieces of another value, which has no other use afterwards; only short ones are copied."""
        first, *more = other.pieces
        if more:
            self.pieces += [first, *more]
        else:
            self.add(first)


def encode_object(fields: Mapping[str, Any]) -> JsonPieces:
    """Encodes an object; values that are `JsonPieces` already are not copied if they are long."""
    found = JsonPieces()
    for place, (name, value) in enumerate(fields.items()):
        found.add(b"%b%b:" % (b"," if place else b"{", msgspec.json.encode(name)))
        if isinstance(value, JsonPieces):
            found.extend(value)
        else:
            found.add(msgspec.json.encode(value))
    found.add(b"}" if fields else b"{}")
    return found


def encode_list(values: Iterable[JsonPieces]) -> JsonPieces:
    """Encodes a list of values."""
    found = JsonPieces()
    found.add(b"[")
    for place, value in enumerate(values):
        if place:
            found.add(b",")
        found.extend(value)
    found.add(b"]")
    return found


class PiecesResponse(Response):
    """A response with JSON in pieces.

    Args:
        content: the JSON.
        headers: more headers.
    """

    media_type = "application/json"

    def __init__(self, content: JsonPieces, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**headers, "Content-Length": str(content.nbytes)})
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the pieces one after the other."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._taken():
            await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _taken(self) -> Iterator[bytearray]:
        """The pieces, each freed once it is sent."""
        pieces = self._content.pieces[::-1]
        self._content.pieces = []
        while pieces:
            yield pieces.pop()
