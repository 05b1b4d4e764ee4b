"""JSON in pieces: the same text as in one piece, and no piece is long."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from prefixd.server.http.openai.answer_shapes import ChatShape
from prefixd.server.http.openai.answers import Answer
from prefixd.server.http.openai.json_pieces import JsonPieces, PiecesResponse, encode_list, encode_object
from prefixd.server.http.openai.logprob_lists import LogprobLists
from prefixd.server.http.openai.several_prompts import AnswerEvent, Usage
from prefixd.serving.generation import SequenceFinished, Tokens
from prefixd.worker_protocol.protocol import TokenLogprobs


def text_of(value: JsonPieces) -> bytes:
    return b"".join(value.pieces)


def test_objects_and_lists_are_encoded_as_in_one_piece() -> None:
    inner = encode_object({"a": 1, "é\n": None})
    assert text_of(encode_object({})) == b"{}" and text_of(encode_list([])) == b"[]"
    whole = encode_object({"list": encode_list([inner, encode_object({})]), "x": [1.5, "y"]})
    assert json.loads(text_of(whole)) == {"list": [{"a": 1, "é\n": None}, {}], "x": [1.5, "y"]}
    assert whole.nbytes == len(text_of(whole))


async def test_a_long_answer_is_kept_and_sent_in_short_pieces() -> None:
    likely = TokenLogprobs(-0.5, tuple(range(20)), (-1.0,) * 20)

    async def events() -> AsyncGenerator[AnswerEvent, None]:
        for index in (1, 0):
            for _ in range(100):
                yield Tokens([5] * 10, "x", index, (likely,) * 10)
            yield SequenceFinished(index, "length", 1000, 0.0)
        yield Usage(3, 2000)

    answer = Answer(ChatShape(LogprobLists(None)), "r1", "m", 0, events(), 3)
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await PiecesResponse(await answer.whole(), {"X-Request-Id": "r1"})({}, send, send)  # type: ignore[arg-type]
    start, *bodies = sent
    text = b"".join(each["body"] for each in bodies)
    assert dict(start["headers"])[b"content-length"] == str(len(text)).encode()
    assert dict(start["headers"])[b"content-type"] == b"application/json"
    assert len(text) > 2 << 20 and max(len(each["body"]) for each in bodies) < 512 << 10
    assert [each["more_body"] for each in bodies] == [True] * (len(bodies) - 1) + [False]
    choices = json.loads(text)["choices"]
    assert [(each["index"], len(each["logprobs"]["content"])) for each in choices] == [(0, 1000), (1, 1000)]
    assert choices[0]["message"]["content"] == "x" * 100
