"""OpenAI's client against the front, in one process."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from prefixd.base.errors import InvalidArgumentError, UnavailableError
from prefixd.cache import TieredCache
from prefixd.server.http.openai import answers, openai_routes
from prefixd.server.http.openai.chat_request import ChatRequest
from prefixd.server.http.openai.completion_request import CompletionRequest
from prefixd.server.http.openai.openai_routes import _read
from prefixd.server.http.openai.sampling_fields import FieldError
from prefixd.server.http.openai.token_lists import read_prompts
from prefixd.serving.request.request_events import Ended, NewTokens
from prefixd.serving.text.chat_template import Chat
from prefixd.worker_protocol.protocol import TokenLogprobs
from tests.server.http.openai.conftest import CONTEXT, Front, prompt_tokens, tokens_of
from tests.waiting import until

HI: Any = [{"role": "user", "content": "hi"}]


async def test_models_are_listed(front: Front) -> None:
    (model,) = [model async for model in await front.client.models.list()]
    assert (model.id, model.object, model.owned_by) == ("model", "model", "prefixd")
    assert model.max_model_len == CONTEXT  # type: ignore[attr-defined]
    assert await front.client.models.retrieve("model") == model
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'; this daemon has model"):
        await front.client.models.retrieve("other")


async def test_a_chat_is_answered(front: Front) -> None:
    answer = await front.client.chat.completions.create(
        model="model", messages=[{"role": "system", "content": "Be."}, *HI]
    )
    assert front.prompt == "<s><system>Be.<user>hi<assistant>", (
        "the template writes the special tokens, and nobody else"
    )
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello")
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "model"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (31, 5)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    sampling = front.dispatcher.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)
    assert sampling.max_tokens == CONTEXT - 31, "as many as the context allows"


async def test_what_does_not_fit_the_gpu_tier_shortens_a_chat_without_a_limit(make_front: Callable[..., Front]) -> None:
    front = make_front(frames=6)
    await front.client.chat.completions.create(model="model", messages=HI)
    request = front.dispatcher.submitted[0]
    assert request.prompt_tokens + request.sampling.max_tokens == 6 * 16
    with pytest.raises(openai.RateLimitError, match="the GPU tier holds"):
        await front.client.chat.completions.create(model="model", messages=HI, max_completion_tokens=200)


async def test_a_stream_has_role_text_reason_and_usage(front: Front) -> None:
    front.dispatcher.answer = [NewTokens(tokens_of("Hel")), NewTokens(tokens_of("lo")), Ended("length")]
    stream = await front.client.chat.completions.create(
        model="model", messages=HI, stream=True, stream_options={"include_usage": True}, max_tokens=5
    )
    first, *texts, end, usage = [chunk async for chunk in stream]
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert [chunk.choices[0].delta.content for chunk in texts] == ["Hel", "lo"]
    assert end.choices[0].finish_reason == "length" and end.usage is None
    assert not usage.choices and usage.usage is not None and usage.usage.completion_tokens == 5
    assert len({chunk.id for chunk in (first, *texts, end, usage)}) == 1
    body = {"model": "model", "prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    raw = await front.http.post("/v1/completions", json=body)
    assert raw.headers["content-type"].startswith("text/event-stream") and "content-length" not in raw.headers
    *events, done, end_of_text = raw.text.split("\n\n")
    assert (done, end_of_text) == ("data: [DONE]", "")
    used = [json.loads(event.removeprefix("data: "))["usage"]["completion_tokens"] for event in events]
    assert used == [3, 5, 5]


async def test_an_event_is_one_line_for_clients_that_read_lines_of_text(front: Front) -> None:
    said = "a\x85b\u2028c\u2029d\x0b\x1ce\u20a8"  # all that `str.splitlines` splits at, and a neighbour
    front.dispatcher.answer = [NewTokens(tokens_of(said)), Ended("stop")]
    body = {"model": "model", "prompt": "x", "stream": True}
    async with front.http.stream("POST", "/v1/completions", json=body) as answer:
        *events, done = [line async for line in answer.aiter_lines() if line]
    assert done == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(texts) == said


async def test_several_prompts_and_answers_have_numbers_in_order(front: Front) -> None:
    answer = await front.client.completions.create(model="model", prompt=["one", "two", "three"], n=2, max_tokens=7)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert {choice.text for choice in answer.choices} == {"Hello"}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3 + 11, 30), "each begins with <s>"
    stream = await front.client.completions.create(model="model", prompt=[[1, 2], [3]], n=2, max_tokens=7, stream=True)
    texts = {index: "" for index in range(4)}
    ends = []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert set(texts.values()) == {"Hello"} and sorted(ends) == [0, 1, 2, 3]
    tokens = [prompt_tokens(request) for request in front.dispatcher.submitted[-4:]]
    assert sorted(tokens) == [[1, 2], [1, 2], [3], [3]]


async def test_one_refused_prompt_refuses_all(front: Front) -> None:
    front.dispatcher.answer = None
    answer = await front.http.post("/v1/completions", json={"prompt": [[1], [2], [9999]]})
    assert answer.status_code == 400 and "token id 9999" in answer.json()["error"]["message"]
    await until(lambda: len(front.dispatcher.cancelled) == len(front.dispatcher.submitted))


async def test_parameters_reach_the_sampler(front: Front) -> None:
    extra = {
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "priority": 3,
        "cache_salt": "salt",
        "unheard_of": 1,
    }
    await front.client.completions.create(
        model="model",
        prompt=[1, 2, 3],
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={},
        user="somebody",
        extra_body=extra,
    )
    (request,) = front.dispatcher.submitted
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 4)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.ignore_eos) == (0.1, 1.2, True)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.stop_token_ids, sampling.seed) == ((7,), (1 << 64) - 1)
    assert (request.queued.priority, request.namespace.spec.salt) == (3, b"salt")


async def test_best_of_and_stop_strings(front: Front) -> None:
    front.dispatcher.answer = [
        NewTokens(tokens_of("Hello"), [TokenLogprobs(-1.0, [], [])] * 5),
        Ended("length"),
    ]
    answer = await front.client.completions.create(model="model", prompt="x", n=2, best_of=4, stop="lo")
    assert [choice.text for choice in answer.choices] == ["Hel", "Hel"]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert len(front.dispatcher.submitted) == 4 and answer.usage is not None and answer.usage.completion_tokens == 20


LIKELY = [TokenLogprobs(-0.5, [*tokens_of("H"), *tokens_of("é")[:1]], [-0.5, -math.inf])]


async def test_logprobs_of_a_chat(front: Front) -> None:
    front.dispatcher.answer = [NewTokens(tokens_of("H"), LIKELY), NewTokens(tokens_of("é"), LIKELY * 2), Ended("stop")]
    whole = await front.client.chat.completions.create(model="model", messages=HI, logprobs=True, top_logprobs=2)
    assert front.dispatcher.submitted[0].sampling.logprobs == 2
    lists = whole.choices[0].logprobs
    assert whole.choices[0].message.content == "Hé" and lists is not None and lists.content is not None
    first, second, third = lists.content
    assert (first.token, first.logprob, first.bytes) == ("H", -0.5, [72])
    assert (second.token, second.bytes, third.bytes) == ("\N{REPLACEMENT CHARACTER}", [0xC3], [0xA9]), (
        "half a character"
    )
    assert [(best.bytes, best.logprob) for best in first.top_logprobs] == [([72], -0.5), ([0xC3], -9999.0)]
    stream = await front.client.chat.completions.create(model="model", messages=HI, logprobs=True, stream=True)
    found = []
    async for chunk in stream:
        if (of_chunk := chunk.choices[0].logprobs) is not None:
            found += of_chunk.content or []
    assert [each.bytes for each in found] == [[72], [0xC3], [0xA9]]


async def test_an_answer_has_a_bounded_number_of_logprobs(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    front.dispatcher.answer = [NewTokens(tokens_of("H"), LIKELY), NewTokens(tokens_of("!"), LIKELY), Ended("stop")]
    monkeypatch.setattr(answers, "MOST_LOGPROBS_KEPT", 5)
    with pytest.raises(openai.BadRequestError, match="more than 5 logprobs; ask for fewer, or for a stream"):
        await front.client.completions.create(model="model", prompt="x", logprobs=2)
    await until(lambda: len(front.dispatcher.cancelled) == 1)


async def test_logprobs_of_a_completion(front: Front) -> None:
    front.dispatcher.answer = [NewTokens(tokens_of("H"), LIKELY), NewTokens(tokens_of("!"), LIKELY), Ended("stop")]
    answer = await front.client.completions.create(model="model", prompt="x", logprobs=2)
    lists = answer.choices[0].logprobs
    assert lists is not None
    assert (lists.tokens, lists.token_logprobs, lists.text_offset) == (["H", "!"], [-0.5, -0.5], [0, 1])
    replacement = "\N{REPLACEMENT CHARACTER}"
    assert lists.top_logprobs == [{"H": -0.5, replacement: -9999.0}, {"!": -0.5, "H": -0.5, replacement: -9999.0}]


REFUSED = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": 5},
    {"prompt": [1, "a"]},
    {"prompt": ["a", 1]},
    {"prompt": [[1], 2]},
    {"prompt": [[1], "a"]},
    {"prompt": [1.5]},
    {"prompt": [-1]},
    {"prompt": [1 << 32]},
    {"prompt": ["a"] * 129},
    {"prompt": [[1]] * 129},
    {"temperature": -1},
    {"temperature": "hot"},
    {"top_p": 2},
    {"top_k": 1 << 64},
    {"n": 0},
    {"n": 33},
    {"best_of": 0},
    {"n": 2, "best_of": 1},
    {"max_tokens": 0},
    {"logprobs": 21},
    {"stop": ["x"] * 17},
    {"stop": {"a": 1}},
    {"stop": ["x" * 100_000]},
    {"stop_token_ids": [9999]},
    {"priority": 1 << 40},
    {"cache_salt": "x" * 1025},
    {"suffix": "x"},
    {"echo": True},
    {"logit_bias": {"5": 1}},
    {"min_tokens": 3},
    {"response_format": {"type": "json_object"}},
    {"use_beam_search": True},
    {"logit_bias": {str(number): 1 for number in range(20_000)}},
]


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: json.dumps(body)[:30])
async def test_wrong_values_are_refused(front: Front, body: dict[str, Any]) -> None:
    error = await front.complete_error(400, **body)
    name = list(body)[-1]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == name or name.partition("_")[0] in error["message"], error


CHATS_REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": ""}] * 20_000}, "messages"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "function_call": {"name": "f"}}]}, "messages"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("body", "param"), CHATS_REFUSED, ids=lambda value: json.dumps(value)[:30])
async def test_wrong_chats_are_refused(front: Front, body: dict[str, Any], param: str) -> None:
    error = await front.chat_error(400, **body)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


async def test_values_that_change_nothing_are_taken(front: Front) -> None:
    await front.client.chat.completions.create(
        model="model",
        messages=HI,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        n=None,
        stop=None,
        extra_body={"min_tokens": 0, "skip_special_tokens": True, "logit_bias": None, "top_k": -1},
    )
    assert front.dispatcher.submitted


async def test_images_are_files_in_the_request(front: Front) -> None:
    def ask(url: str) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": url}}
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]}

    error = await front.chat_error(400, **ask("https://example.org/cat.png"))
    assert "fetches nothing" in error["message"] and error["param"] == "messages"
    assert "base64" in (await front.chat_error(400, **ask("data:image/png,abc")))["message"]
    assert "not valid base64" in (await front.chat_error(400, **ask("data:image/png;base64,ab*c")))["message"]
    good = "data:image/png;base64," + base64.b64encode(bytes(1000)).decode()
    assert "1 images, and the model reads text alone" in (await front.chat_error(400, **ask(good)))["message"]


def test_empty_messages_and_parts_count_as_work() -> None:
    part = {"type": "text", "text": ""}
    for messages in ([{"role": "", "content": ""}] * 8000, [{"role": "user", "content": [part] * 8000}]):
        (params,) = _read(json.dumps({"messages": messages}).encode(), ChatRequest).prompts
        assert isinstance(params.prompt, Chat) and params.prompt.characters > 32 << 10, "no short text"


async def test_what_is_no_request_is_refused(front: Front) -> None:
    for content in (
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"model": "model"}',
        b'{"prompt": ["\xd0"]}',
    ):
        answer = await front.http.post("/v1/completions", content=content)
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", content
    answer = await front.http.post("/v1/completions", content=b'{"prompt": "' + b"x" * (16 << 20) + b'"}')
    assert answer.status_code == 413 and "may have 16777216 bytes; send less" in answer.json()["error"]["message"]
    assert (await front.http.get("/v1/embeddings")).json()["error"]["message"].startswith("there is no GET /v1/embed")


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; x=y"])
async def test_a_page_in_a_browser_cannot_send_a_request(front: Front, kind: str) -> None:
    """It may send these types to any port without asking that port first."""
    error = await front.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": kind})
    assert error.status_code == 415 and "send application/json" in error.json()["error"]["message"]
    assert not front.dispatcher.submitted


async def test_any_json_gets_an_answer_or_a_clear_error(front: Front) -> None:
    rnd = random.Random(4)
    values: list[Any] = [None, True, 0, -1, 1 << 70, 1e308, 0.5, "", "x", "\0", "\ud800", [], [[]], [0], {}, {"a": 1}]
    values += [["a", "\ud800"], [[1], [2]], [{"role": "user", "content": [{"type": "text", "text": "é"}]}], HI]
    names = [*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "unheard_of"]
    statuses = set()
    for _ in range(120):
        kind, field = rnd.choice([("completions", {"prompt": "x"}), ("chat/completions", {"messages": HI})])
        body = bytearray(json.dumps({**field, **{rnd.choice(names): rnd.choice(values) for _ in range(2)}}).encode())
        if rnd.random() < 0.3:
            body[rnd.randrange(len(body))] = rnd.randrange(256)
        post = front.http.post(f"/v1/{kind}", content=bytes(body))
        answer = await asyncio.create_task(post)  # a task each, as a server has: calls count until their task ends
        assert answer.status_code in (200, 400, 404), (body, answer.text)
        assert answer.status_code == 200 or answer.json()["error"]["type"], body
        statuses.add(answer.status_code)
    assert statuses >= {200, 400}


async def test_errors_have_openais_status(front: Front) -> None:
    front.dispatcher.room = 0
    full = await front.http.post("/v1/completions", json={"prompt": "x"})
    assert full.status_code == 429 and full.headers["retry-after"] == "1"
    assert full.json()["error"]["type"] == "rate_limit_error"
    error = await front.complete_error(404, model="other")
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error = await front.complete_error(400, prompt="x" * CONTEXT)
    assert error["code"] == "context_length_exceeded"
    error = await front.chat_error(400, messages=[{"role": "user", "content": "x" * 10 * CONTEXT}])
    assert error["code"] == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError, match="not known here"):
        await front.client.with_options(api_key="nobody").models.list()
    with pytest.raises(openai.PermissionDeniedError, match="role metrics"):
        await front.client.with_options(api_key="metrics").models.list()
    assert len(front.callers.refused) == 2
    front.draining.set()
    drained = await front.http.post("/v1/completions", json={"prompt": "x"})
    assert drained.status_code == 503 and drained.headers["retry-after"] == "1"


async def test_an_error_behind_the_first_piece_ends_the_stream(front: Front) -> None:
    front.dispatcher.answer = [NewTokens(tokens_of("Hel")), UnavailableError("the worker died")]  # type: ignore[list-item]
    stream = await front.client.completions.create(model="model", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="the worker died"):
        _ = [chunk async for chunk in stream]
    front.dispatcher.answer = [NewTokens(tokens_of("Hel")), Ended("cancelled")]
    cancelled = await front.http.post("/v1/completions", json={"prompt": "x"})
    assert cancelled.status_code == 499 and cancelled.json()["error"]["code"] == "cancelled"


async def test_a_request_has_the_callers_id(front: Front) -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    headers = {"X-Request-Id": "mine", "traceparent": parent}
    answer = await front.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    assert answer.headers["x-request-id"] == "mine" and answer.json()["id"] == "cmpl-mine"
    (record,) = front.generation.records.find("mine")
    assert record.trace is not None and record.trace.trace_id == "a" * 32
    assert record.id == answer.headers["prefixd-request-id"]
    unnamed = await front.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "x" * 200})
    assert unnamed.headers["x-request-id"] == unnamed.headers["prefixd-request-id"]
    refused = await front.http.post("/v1/completions", json={}, headers=headers)
    assert refused.headers["x-request-id"] == "mine"


async def test_a_reader_that_is_too_slow_is_told(front: Front) -> None:
    front.dispatcher.answer = None
    reads, sent = asyncio.Event(), list[bytes]()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))
        if len(sent) > 2:  # a piece has come
            await reads.wait()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"prompt": "x", "stream": true, "max_tokens": 2000}'}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope["headers"] = [(b"content-type", b"application/json; charset=utf-8")]
    answering = asyncio.create_task(front.app(scope, receive, send))
    await until(lambda: bool(front.dispatcher.submitted))
    for _ in range(70):
        front.dispatcher.submitted[0].events.put_nowait(NewTokens([1] * 1000))
        await asyncio.sleep(0)
    await until(lambda: bool(front.dispatcher.cancelled))
    reads.set()
    await answering
    assert b"reads too slowly" in sent[-3] and sent[-2:] == [b"data: [DONE]\n\n", b""]


async def test_more_calls_than_a_tenant_may_have_are_refused(front: Front, cache: TieredCache) -> None:
    front.dispatcher.answer = None
    asked = [asyncio.create_task(front.http.post("/v1/completions", json={"prompt": "x"})) for _ in range(100)]
    await until(lambda: len(front.dispatcher.submitted) == 100)
    post = asyncio.create_task(front.http.post("/v1/completions", json={"prompt": "x"}))
    refused = (await post).json()["error"]
    assert refused["type"] == "rate_limit_error" and "calls of Generate are under way" in refused["message"]
    assert front.callers.refused == [refused["message"]], "it is told once"
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert not cache.tenants.default.refused["unread_tokens"]


async def test_a_body_is_not_kept_while_its_prompts_run(front: Front) -> None:
    front.dispatcher.answer = None
    tracemalloc.start()
    try:
        body = b'{"prompt": "x"%b}' % (b" " * (8 << 20))
        asked = asyncio.create_task(front.http.post("/v1/completions", content=body))
        del body
        await until(lambda: bool(front.dispatcher.submitted))
        assert front.app.held_bytes == 0, "other requests may come"
        await until(lambda: tracemalloc.get_traced_memory()[0] < 12 << 20)  # the client has its own
    finally:
        tracemalloc.stop()
    front.dispatcher.submitted.pop().events.put_nowait(Ended("stop"))
    assert (await asked).status_code == 200


async def test_no_tenant_takes_the_room_of_anothers_bodies(
    make_front: Callable[..., Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_routes, "BODIES", 48 << 20)
    front, ends = make_front(), asyncio.Event()
    assert (await front.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200

    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await ends.wait()

    def stall() -> asyncio.Task[httpx.Response]:
        headers = {"Content-Length": str(16 << 20), "tenant": "hostile"}
        return asyncio.create_task(front.http.post("/v1/completions", content=slowly(), headers=headers))

    stalled = [stall(), stall()]
    await until(lambda: front.app.held_bytes == 2)
    refused = await stall()
    assert refused.status_code == 429 and "16777216 bytes of body" in refused.json()["error"]["message"]
    assert (await front.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    ends.set()
    assert {(await each).status_code for each in stalled} == {400}


async def test_an_answer_that_is_no_stream_counts_as_unread_to_its_end(front: Front) -> None:
    front.dispatcher.answer = [NewTokens([1] * 50)]
    unread = front.generation._unread
    for stream, counted in ((True, 0), (False, 50)):
        body = {"prompt": "x", "max_tokens": 99, "stream": stream}
        asked = asyncio.create_task(front.http.post("/v1/completions", json=body))
        await until(lambda: bool(front.dispatcher.submitted))
        await until(lambda counted=counted: unread.total == counted)
        front.dispatcher.submitted.pop().events.put_nowait(Ended("stop"))
        assert (await asked).status_code == 200
        assert unread.total == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(front: Front, stream: bool) -> None:
    front.dispatcher.answer = None
    body = {"prompt": ["x", "y"], "n": 2, "stream": stream}
    asked = asyncio.create_task(front.http.post("/v1/completions", json=body))
    await until(lambda: len(front.dispatcher.submitted) == 4)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert len(front.dispatcher.cancelled) == 4


async def test_a_million_token_ids_are_read(front: Front) -> None:
    ids = list(range(200)) * 5000
    answer = await front.http.post("/v1/completions", content=json.dumps({"prompt": ids}))
    assert answer.status_code == 400 and "1000000 tokens" in answer.json()["error"]["message"]
    short = [7] * (CONTEXT - 20)
    assert (
        await front.http.post("/v1/completions", content=json.dumps({"prompt": short}, indent=1))
    ).status_code == 200
    assert front.dispatcher.submitted[-1].prompt_tokens == len(short)


_LISTS = b"[" + b",".join([b"[]"] * 100_000) + b"]"


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"x","tool_calls":' + _LISTS + b"}]}",
        b'{"messages":[{"role":"user","content":"x","function_call":' + _LISTS + b"}]}",
        b'{"prompt":[[1]' + b",1" * 150_000 + b"]}",
    ],
    ids=("tool_calls", "function_call", "prompt"),
)
def test_a_refused_request_is_not_read_into_objects(body: bytes) -> None:
    """Millions of them take seconds, in which no other thread runs Python."""
    kind = ChatRequest if b"messages" in body else CompletionRequest
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgumentError, match=r"about tools|list of lists and of something else"):
            _read(body, kind)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 * len(body), "its bytes are copied a few times"


def test_lists_of_token_ids_are_told_apart() -> None:
    lists = [np.array(ids, "<u4").tobytes() for ids in ([1, 2], [3], [])]
    assert read_prompts(b" [ [1, 2] ,[ 3 ],\n[] ] ") == lists
    for wrong in (b"[[1,[2]]]", b'[["a]"]]', b'[[1],"a"]', b"[[1],{}]"):
        with pytest.raises(FieldError):
            read_prompts(wrong)


async def test_a_model_without_a_template_takes_completions_only(make_front: Callable[..., Front]) -> None:
    front = make_front(None)
    error = await front.chat_error(400)
    assert "the model has no chat template" in error["message"] and "/v1/completions" in error["message"]
    assert (await front.client.completions.create(model="model", prompt="x")).choices[0].text == "Hello"
