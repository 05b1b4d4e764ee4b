"""Makes an answer of the events of a request: all at once, or as a stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from prefixd.base.errors import InvalidArgumentError
from prefixd.server.http.openai.answer_shapes import Shape
from prefixd.server.http.openai.error_answers import RequestCancelledError, answer_of
from prefixd.server.http.openai.json_pieces import JsonPieces, encode_list, encode_object
from prefixd.server.http.openai.several_prompts import AnswerEvent, Usage
from prefixd.serving.generation import SequenceFinished, Tokens

MOST_LOGPROBS_KEPT = 1 << 19
"""Logprobs of an answer that is no stream: some 45 MiB of JSON, kept and sent in pieces."""
_DONE = b"data: [DONE]\n\n"
_LINE_ENDS = tuple((character.encode(), rb"\u%04x" % ord(character)) for character in "\x85\u2028\u2029")
"""JSON need not escape them, but clients that read lines of text (httpx's `iter_lines`) end a line there."""


@dataclass(slots=True)
class Answer:
    """The answer to one request.

    Attributes:
        shape: how its choices look.
        request_id: the daemon's name for the request.
        model: the model's name.
        created: seconds since 1970.
        events: of the request, behind `Accepted`. Reading the answer to its end closes them.
        prompt_tokens: of all prompts together.
        usage: whether a stream ends with the usage.
        running_usage: whether each piece of a stream has the usage up to then.
    """

    shape: Shape
    request_id: str
    model: str
    created: int
    events: AsyncGenerator[AnswerEvent, None]
    prompt_tokens: int
    usage: bool = False
    running_usage: bool = False
    _texts: dict[int, list[str]] = field(default_factory=dict)
    _logprobs: dict[int, dict[str, JsonPieces]] = field(default_factory=dict)
    _values: int = 0

    async def whole(self) -> JsonPieces:
        """The whole answer. Raises as `Generation.run`, RequestCancelledError, and InvalidArgumentError for an
        answer that is too large."""
        choices: dict[int, JsonPieces] = {}
        usage = Usage()
        async with aclosing(self.events) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    self._keep(event)
                elif isinstance(event, SequenceFinished):
                    choices[event.index] = self._choice(event)
                elif isinstance(event, Usage):
                    usage = event
        fields = self._object(self.shape.whole, encode_list(choices[index] for index in sorted(choices)))
        return encode_object(fields | {"usage": _usage(usage)})

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. An error becomes the last of them."""
        begun: set[int] = set()
        output_tokens = 0
        try:
            async with aclosing(self.events) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        output_tokens += len(event.token_ids)
                        if event.index not in begun:
                            begun.add(event.index)
                            if (first := self.shape.begin(event.index)) is not None:
                                yield self._piece(first, output_tokens)
                        logprobs = self.shape.logprobs(event) if event.logprobs else None
                        yield self._piece(self.shape.delta(event.index, event.text, logprobs), output_tokens)
                    elif isinstance(event, SequenceFinished):
                        yield self._piece(self.shape.end(event.index, _reason(event)), output_tokens)
                    elif isinstance(event, Usage) and self.usage:
                        last = self._object(self.shape.piece, []) | {"usage": _usage(event)}
                        yield _event(last)
        except Exception as error:
            yield _event(answer_of(error).body)
        yield _DONE

    def _keep(self, tokens: Tokens) -> None:
        """Keeps text, and logprobs as JSON, which takes less memory and is put together quickly."""
        self._texts.setdefault(tokens.index, []).append(tokens.text)
        if not tokens.logprobs:
            return
        self._values += sum(1 + len(each.token_ids) for each in tokens.logprobs)
        if self._values > MOST_LOGPROBS_KEPT:
            raise InvalidArgumentError(
                f"the answer has more than {MOST_LOGPROBS_KEPT} logprobs; ask for fewer, or for a stream"
            )
        kept = self._logprobs.setdefault(tokens.index, {})
        for name, values in self.shape.logprobs(tokens).items():
            text = msgspec.json.encode(values)[1:-1]
            if name in kept:
                kept[name].add(b"," + text)
            else:
                kept[name] = JsonPieces()
                kept[name].add(b"[" + text)

    def _choice(self, end: SequenceFinished) -> JsonPieces:
        text, reason = "".join(self._texts.pop(end.index, ())), _reason(end)
        logprobs = self._logprobs.pop(end.index, None)
        if logprobs is None:
            return encode_object(self.shape.choice(end.index, text, None, reason))
        for each in logprobs.values():
            each.add(b"]")
        return encode_object(self.shape.choice(end.index, text, encode_object(logprobs), reason))

    def _piece(self, choice: dict[str, Any], output_tokens: int) -> bytes:
        piece = self._object(self.shape.piece, [choice])
        if self.running_usage:
            piece["usage"] = _usage(Usage(self.prompt_tokens, output_tokens))
        elif self.usage:
            piece["usage"] = None
        return _event(piece)

    def _object(self, kind: str, choices: list[dict[str, Any]] | JsonPieces) -> dict[str, Any]:
        return {
            "id": f"{self.shape.prefix}{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class EventStream(Response):
    """A response of server-sent events. They are closed with it, also when the client goes away.

    Args:
        pieces: the events.
        headers: more headers.
    """

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events as they come."""
        async with aclosing(self._pieces) as pieces:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _reason(end: SequenceFinished) -> str:
    """Raises RequestCancelledError for a sequence that was cancelled: half an answer must not look like a whole one."""
    if end.reason == "cancelled":
        raise RequestCancelledError
    return end.reason


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _event(value: dict[str, Any]) -> bytes:
    event = msgspec.json.encode(value)
    for character, escaped in _LINE_ENDS:
        event = event.replace(character, escaped)
    return b"data: " + event + b"\n\n"
