"""The use case of generation, without a protocol in front of it: what is refused costs nothing, what runs is told."""

from __future__ import annotations

import ast
import asyncio
import gc
import math
import re
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import pre_tokenizers

import prefixd.serving.generation
from prefixd.base.errors import (
    AlreadyExistsError,
    ExhaustedError,
    InvalidArgumentError,
    NotFoundError,
    PrefixdError,
    UnavailableError,
    UnsupportedError,
)
from prefixd.base.sampling import MOST_STOP_TOKENS, BeamSearch, Sampling
from prefixd.base.tenancy.tenants import Quota
from prefixd.cache import NamespaceSpec, PartSpec, TieredCache
from prefixd.cache.placement.retention import Retention
from prefixd.images.decoding import Pixels
from prefixd.observability.request_record import UNKNOWN_MODEL, RequestRecord
from prefixd.serving.generation import (
    Accepted,
    Finished,
    GenerateParams,
    Generation,
    GenerationEvent,
    SequenceFinished,
    Tokens,
    inbox,
    sequence_seed,
)
from prefixd.serving.images.image_kv import image_namespace
from prefixd.serving.images.prompt_images import PromptLayout
from prefixd.serving.kv_shape import KvShape
from prefixd.serving.models.served_model import ServedModel
from prefixd.serving.request.request import Request
from prefixd.serving.request.request_events import Ended, NewTokens
from prefixd.serving.text.tokenization import TextCodec, TextStream, TokenIds
from prefixd.serving.text.tokenizer_threads import TokenizerThreads
from prefixd.worker_protocol.protocol import BeamResult, GroupShape, ImageGroup, ImageShape, PromptImage, TokenLogprobs
from prefixd_scheduler import QueueFullError
from tests.hello import hello
from tests.waiting import until

CONTEXT = 2048
HELLO = hello(
    groups=(GroupShape("attention", None, 2, 1),),
    frame_bytes=8192,
    chunk_bytes=8192,
    vocab_size=272,
    max_model_tokens=CONTEXT,
    eos_token_ids=(271,),
    architecture="Llama",
)


class Codec:
    """Counts what it is asked to tokenize; waits while it is shut."""

    longest_token = 8

    def __init__(self, real: TextCodec) -> None:
        self._real = real
        self.texts: list[str] = []
        self.threads: set[int] = set()
        self.open = threading.Event()
        self.open.set()

    def encode(self, text: str, most: int, stop: threading.Event) -> TokenIds:
        self.texts.append(text)
        self.threads.add(threading.get_ident())
        self.open.wait(60)
        return self._real.encode(text, most, stop)

    def stream(self) -> TextStream:
        return self._real.stream()


@dataclass
class FakeDispatcher:
    """Takes requests and lets a test play the worker."""

    submitted: list[Request] = field(default_factory=list)
    cancelled: list[Request] = field(default_factory=list)
    looked: list[Request] = field(default_factory=list)
    room: int = 1000

    def submit(self, request: Request) -> None:
        if self.room == 0:
            raise QueueFullError(3)
        self.room -= 1
        self.submitted.append(request)

    async def ask_store(self, request: Request) -> None:
        self.looked.append(request)

    def requests_of(self, tenant: str) -> tuple[int, int]:
        return sum(request.queued.tenant == tenant for request in self.submitted), 0

    def cancel(self, request: Request) -> None:
        self.cancelled.append(request)
        request.events.put_nowait(Ended("cancelled"))


def params_of(prompt: str | bytes = "hello", **params: Any) -> GenerateParams:
    """What a caller asks for, by the names of `GenerateParams`, `Sampling` and `BeamSearch`."""
    search, sampling, rest = (
        {name: params[name] for name in params.keys() & kind.__dataclass_fields__}
        for kind in (BeamSearch, Sampling, GenerateParams)
    )
    if search:
        sampling["beam_search"] = BeamSearch(**search)
    assert len(params) == len(search) + len(sampling) + len(rest) - bool(search), "each has a home"
    return GenerateParams(prompt, sampling=Sampling(**sampling), **rest)


@dataclass
class Desk:
    """A generation use case over a fake dispatcher."""

    generation: Generation
    dispatcher: FakeDispatcher
    codec: Codec
    draining: asyncio.Event
    failure: list[PrefixdError]

    async def events(self, *answers: Any, **params: Any) -> list[GenerationEvent]:
        """Runs a request; the worker answers `answers`."""
        found = []
        async with aclosing(self.generation.run(params_of(**params))) as events:
            async for event in events:
                found.append(event)
                if isinstance(event, Accepted):
                    for answer in answers:
                        self.dispatcher.submitted[-1].events.put_nowait(answer)
        return found

    async def refused(self, error: type[PrefixdError], *words: str, **params: Any) -> None:
        tokenized, submitted = len(self.codec.texts), len(self.dispatcher.submitted)
        with pytest.raises(error) as caught:
            await self.events(**params)
        for word in words:
            assert word in str(caught.value)
        assert len(self.dispatcher.submitted) == submitted
        assert len(self.codec.texts) == tokenized, "it was refused before any work"


@pytest.fixture(scope="module")
def real_codec(model_directory: Path) -> TextCodec:
    return TextCodec(model_directory)


@pytest.fixture
async def desk(cache: TieredCache, real_codec: TextCodec) -> AsyncIterator[Desk]:
    threads, codec, dispatcher, draining = TokenizerThreads(), Codec(real_codec), FakeDispatcher(), asyncio.Event()
    failure: list[PrefixdError] = []
    space = NamespaceSpec("model", 16, (PartSpec("attention", 0, 8192),), worker=True)
    served = ServedModel(HELLO, KvShape.of(HELLO, 64), space, codec, threads, frames=200)  # type: ignore[arg-type]

    async def model() -> ServedModel:
        if failure:
            raise failure[0]
        return served

    models: Any = {"model": SimpleNamespace(dispatcher=dispatcher, model=model)}
    yield Desk(Generation(cache, models, draining, lambda: 5.0), dispatcher, codec, draining, failure)
    threads.close()


def ids(*tokens: int) -> bytes:
    return np.asarray(tokens, "<u4").tobytes()


async def test_a_text_becomes_events(desk: Desk) -> None:
    request = lambda: desk.dispatcher.submitted[-1]  # noqa: E731
    accepted, first, second, finished = await desk.events(
        NewTokens([1, 2]), NewTokens([3]), Ended("stop"), request_id="mine", stop_token_ids=[3], priority=2, salt=b"s"
    )
    assert accepted == Accepted("mine", 5)
    assert isinstance(first, Tokens) and first.token_ids == [1, 2] and len(first.text) == 2
    assert second == Tokens([3], ""), "a stop token is no part of the text"
    assert finished == Finished("stop", 5, 3, (0, 0, 0, 0), 0.0, 0.0, 0)
    sampling = request().sampling
    assert (sampling.max_tokens, sampling.top_p, sampling.stop_token_ids) == (16, 1.0, (3,))
    assert (request().queued.priority, request().namespace.spec.salt) == (2, b"s")
    assert not desk.dispatcher.cancelled
    assert desk.codec.threads and threading.get_ident() not in desk.codec.threads


async def test_a_call_leaves_a_record(desk: Desk) -> None:
    log, told = desk.generation.records, list[RequestRecord]()
    log.ended.append(told.append)
    await desk.events(NewTokens([1, 2]), Ended("stop"), request_id="mine", client_id="theirs", waited_s=2.0)
    (record,) = log.find("mine")
    assert told == [record] == log.find("theirs")
    assert (record.outcome, record.prompt_tokens, record.output_tokens) == ("stop", 5, 2)
    assert (record.tenant, record.model, record.arrival_s) == ("default", "model", 3.0)
    names = [stage.name.value for stage in record.stages]
    assert names == ["receive", "model", "tokenize", "store_lookup"], "the dispatcher, faked here, has others"


async def test_a_call_that_ends_early_leaves_its_reason(desk: Desk) -> None:
    await desk.refused(InvalidArgumentError, "temperature", temperature=-1.0, request_id="wrong")
    (wrong,) = desk.generation.records.find("wrong")
    assert (wrong.outcome, wrong.status) == ("refused", "INVALID_ARGUMENT") and "temperature" in wrong.reason
    run = desk.generation.run(params_of(request_id="left"))
    await anext(run)
    await run.aclose()
    (left,) = desk.generation.records.find("left")
    assert (left.outcome, left.ended_s) == ("cancelled", 5.0)


async def test_a_record_does_not_keep_the_name_of_a_model_that_is_not_there(desk: Desk, cache: TieredCache) -> None:
    """Such a name may have 16 MiB, and be another one each time; what is refused before the model is looked for too."""
    cache.tenants.default.quota = Quota(requests_per_s=1.0)  # the clock stands still
    for id, error in (("first", NotFoundError), ("second", ExhaustedError)):
        await desk.refused(error, model="x" * 10_000, request_id=id)
        (record,) = desk.generation.records.find(id)
        assert record.model == UNKNOWN_MODEL and len(record.reason) < 1000


async def test_times_count_from_the_calls_arrival(cache: TieredCache) -> None:
    """Its message was received for 2 s, it waited 27 s for the model and 3 s for its images, and 1 s in the queue."""
    now_s = 100.0

    class Reader:
        async def read(self, prompt: TokenIds, images: list[bytes], tenant: object, hold: object) -> PromptLayout:
            nonlocal now_s
            now_s += 3
            return PromptLayout(ids(1, 2, 3), [], 16, cross=False)

    class Worker(FakeDispatcher):
        def submit(self, request: Request) -> None:
            super().submit(request)
            request.handed_over_s, request.first_token_s = now_s + 1, now_s + 1.5

    dispatcher = Worker()
    space = NamespaceSpec("model", 16, (PartSpec("attention", 0, 8192),), worker=True)
    served = ServedModel(HELLO, KvShape.of(HELLO, 64), space, None, None, frames=200, images=Reader())  # type: ignore[arg-type]

    async def model() -> ServedModel:
        nonlocal now_s
        if now_s == 100:
            now_s += 27
        return served

    models: Any = {"model": SimpleNamespace(dispatcher=dispatcher, model=model)}
    desk = Desk(Generation(cache, models, asyncio.Event(), lambda: now_s), dispatcher, None, asyncio.Event(), [])  # type: ignore[arg-type]
    *_, finished = await desk.events(NewTokens([1]), Ended("length"), prompt=ids(1), waited_s=2.0, deadline_s=40.0)
    assert isinstance(finished, Finished)
    assert (finished.queue_s, finished.ttft_s) == (33.0, 33.5)
    queued = dispatcher.submitted[0].queued
    assert (queued.arrival_s, queued.deadline_s) == (98.0, 138.0), "it is due from then on, too"


async def test_a_wish_for_the_prompt_is_claimed_while_it_runs(desk: Desk, cache: TieredCache) -> None:
    tenant = cache.tenants.default
    tenant.quota = Quota(retained_bytes=4 * 8192)
    prompt = ids(*range(3 * 16 + 5))
    params = params_of(prompt=prompt, n=2, temperature=1.0, retention=[Retention(0, 32, 9, ttl_s=60)])
    async with aclosing(desk.generation.run(params)) as events:
        assert isinstance(await anext(events), Accepted)
        first, second = desk.dispatcher.submitted
        assert first.retention is not None and first.retention is second.retention
        assert cache.retained.claimed[tenant] == 2 * 8192
        accepted, _ = await desk.events(Ended("stop"), prompt=prompt, retention=[Retention(priority=1)])
        assert isinstance(accepted, Accepted)
        assert re.search(
            r"16384 of 32768 bytes .* 24576 more .*tenants\.default\.retained_bytes", accepted.retention_refused
        )
        assert desk.dispatcher.submitted[-1].retention is None, "it runs without"
        await desk.events(Ended("stop"), prompt=prompt, retention=[Retention(priority=1)], read_only=True)
        assert desk.dispatcher.submitted[-1].retention is not None, "of a read-only request nothing is stored"
    assert cache.retained.claimed[tenant] == 0
    await desk.events(Ended("stop"), prompt=prompt)
    assert desk.dispatcher.submitted[-1].retention is None


async def test_token_ids_are_taken_as_they_are(desk: Desk) -> None:
    accepted, finished = await desk.events(Ended("length"), prompt=ids(1, 2, 271), seed=9)
    assert isinstance(accepted, Accepted) and accepted.prompt_tokens == 3 and accepted.request_id.startswith("r1-")
    assert isinstance(finished, Finished) and finished.reason == "length"
    assert desk.dispatcher.submitted[0].sampling.seed == 9 and not desk.codec.texts


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"prompt": ""}, ["the prompt is empty", "at least one character"]),
        ({"prompt": b""}, ["the prompt is empty", "send text or"]),
        ({"prompt": b"12345"}, ["5 bytes", "multiple of 4"]),
        ({"prompt": ids(1, 272)}, ["token id 272", "vocabulary of 272"]),
        ({"prompt": ids(*[1] * CONTEXT)}, ["2048 tokens", "at most 2047"]),
        (
            {"prompt": "x" * (8 * CONTEXT + 1)},
            ["16385 characters", "2048 tokens", "8 characters each", "at most 16376"],
        ),
        ({"prompt": "x" * (15 << 20)}, ["15728640 characters"]),
        ({"temperature": -1.0}, ["temperature is -1.0"]),
        ({"deadline_s": 0.0}, ["deadline_s is 0.0", "leave it out"]),
        ({"deadline_s": float("nan")}, ["deadline_s is nan"]),
        ({"deadline_s": float("inf")}, ["deadline_s is inf"]),
        ({"temperature": float("inf")}, ["temperature is inf"]),
        ({"top_p": 1.5}, ["top_p is 1.5"]),
        ({"top_k": -1}, ["top_k is -1"]),
        ({"min_p": 1.01}, ["min_p is 1.01", "between 0 and 1"]),
        ({"min_p": float("nan")}, ["min_p is nan"]),
        ({"repetition_penalty": 0.001}, ["repetition_penalty is 0.001", "0.01 and 100"]),
        ({"repetition_penalty": -1.0}, ["repetition_penalty is -1.0"]),
        ({"presence_penalty": 2.5}, ["presence_penalty is 2.5", "-2 and 2"]),
        ({"frequency_penalty": float("nan")}, ["frequency_penalty is nan"]),
        ({"logprobs": 21}, ["logprobs is 21", "at most 20"]),
        ({"stop": ["x"] * 17}, ["17 strings", "at most 16"]),
        ({"stop": ["x", ""]}, ["a stop string is empty"]),
        ({"stop": ["x" * 257]}, ["257 characters", "at most 256"]),
        ({"n": 33, "temperature": 1.0}, ["n is 33", "at most 32"]),
        ({"best_of": 33, "temperature": 1.0}, ["best_of is 33", "at most 32"]),
        ({"n": 3, "best_of": 2, "temperature": 1.0}, ["best_of is 2", "less than n, which is 3"]),
        ({"n": 2}, ["n is 2 with temperature 0", "above 0"]),
        (
            {"best_of": 32, "max_tokens": 2000, "logprobs": 20, "temperature": 1.0},
            ["best_of is 32 with up to 2000 tokens and 20 logprobs", "lower best_of"],
        ),
        ({"best_of": 2}, ["best_of is 2 with temperature 0"]),
        ({"stop_token_ids": [0, 272]}, ["stop token id 272"]),
        ({"width": 0}, ["beam_search.width is 0", "between 1 and 16"]),
        ({"width": 17}, ["beam_search.width is 17"]),
        ({"width": 2, "n": 3}, ["n is 3", "the 2 beams"]),
        ({"width": 2, "length_penalty": math.nan}, ["length_penalty is nan", "between -10 and 10"]),
        (
            {"width": 2, "temperature": 0.5},
            ["temperature is 0.5 in a beam search", "leave out temperature or the beam search"],
        ),
        ({"width": 2, "top_p": 0.5}, ["top_p is 0.5 in a beam search"]),
        ({"width": 2, "stop": ["x"]}, ["stop is ['x'] in a beam search"]),
        ({"width": 2, "logprobs": 0}, ["logprobs is 0 in a beam search"]),
        ({"width": 2, "best_of": 2}, ["best_of is 2 in a beam search"]),
        ({"width": 16, "stop_token_ids": range(16)}, ["16 beams with 17 tokens that end", "more than 272"]),
        ({"forced_tokens": ids(1), "n": 2, "temperature": 1.0}, ["n is 2 with forced_tokens", "leave n out"]),
        ({"forced_tokens": ids(1), "best_of": 2, "temperature": 1.0}, ["best_of is 2 with forced_tokens"]),
        (
            {"forced_tokens": ids(1), "width": 2},
            ["forced_tokens and beam_search exclude each other", "leave one of them out"],
        ),
        ({"forced_tokens": ids(1), "stop": ["x"]}, ["stop has 1 strings, but forced_tokens are the whole output"]),
        ({"forced_tokens": b""}, ["forced_tokens has 0 bytes", "at least one"]),
        ({"forced_tokens": b"12345"}, ["forced_tokens has 5 bytes"]),
        ({"forced_tokens": ids(1, 2), "max_tokens": 1}, ["max_tokens is 1, but forced_tokens has 2"]),
        ({"forced_tokens": ids(1, 272)}, ["forced token id 272", "vocabulary of 272"]),
        ({"forced_tokens": ids(*[1] * CONTEXT)}, ["2048 ids", "send fewer"]),
        ({"forced_tokens": ids(1, 2, 3), "stop_token_ids": [2]}, ["forced_tokens[1] is 2", "1 more follow"]),
        ({"stop_token_ids": range(MOST_STOP_TOKENS + 1)}, ["1025 ids", "at most 1024"]),
        ({"request_id": "x" * 257}, ["257 characters", "at most 256"]),
        ({"request_id": "a\n2026 ERROR"}, [r"request_id 'a\n2026 ERROR'", "cannot be printed"]),
    ],
    ids=lambda value: None if isinstance(value, list) else "-".join(value),
)
async def test_wrong_parameters_are_refused_before_any_work(
    desk: Desk, params: dict[str, Any], words: list[str]
) -> None:
    await desk.refused(InvalidArgumentError, *words, **params)


async def test_forced_tokens_must_fit_behind_the_prompt_and_decide_the_length(desk: Desk) -> None:
    params = {"prompt": ids(*[1] * (CONTEXT - 3)), "temperature": 0.7, "logprobs": 1, "stop_token_ids": [6]}
    await desk.refused(InvalidArgumentError, "2045 tokens and forced_tokens 4", **params, forced_tokens=ids(1, 2, 3, 4))
    await desk.events(Ended("stop"), **params, max_tokens=99, forced_tokens=ids(4, 5, 6))
    sampling = desk.dispatcher.submitted[-1].sampling
    assert (sampling.forced_tokens, sampling.max_tokens, sampling.logprobs) == (ids(4, 5, 6), 3, 1)
    assert (sampling.temperature, sampling.stop_token_ids) == (0.0, (6,))


async def test_a_text_of_too_many_tokens_is_refused(desk: Desk) -> None:
    for text, words in (("x" * 3000, "has 3000 tokens"), ("x" * 16_000, "of 16000 characters has more than")):
        with pytest.raises(InvalidArgumentError, match=f"{words}.* send at most 2047"):
            await desk.events(prompt=text)
    assert not desk.dispatcher.submitted


async def test_a_million_tokens_hold_the_loop_for_milliseconds(desk: Desk) -> None:
    """Whatever is refused is refused by its length: no loop over tokens, no conversion of them."""
    million = np.arange(1_000_000, dtype="<u4").tobytes()
    for params in ({"prompt": million}, {"stop_token_ids": range(1 << 30)}, {"prompt": "x" * (15 << 20)}):
        best = float("inf")
        for _ in range(5):
            began_s = time.thread_time()
            await desk.refused(InvalidArgumentError, **params)
            best = min(best, time.thread_time() - began_s)
        assert best < 0.003


async def test_what_changes_while_a_text_is_tokenized_is_seen(desk: Desk) -> None:
    async def tokenizing(change: Callable[[], None], **params: Any) -> Exception | list[GenerationEvent]:
        desk.codec.open.clear()
        task = asyncio.create_task(desk.events(Ended("stop"), **params))
        seen = len(desk.codec.texts)
        await until(lambda: len(desk.codec.texts) != seen)
        change()
        desk.codec.open.set()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(result, Exception | list)
        return result

    desk.failure.clear()
    assert isinstance(await tokenizing(lambda: None), list)
    lost = await tokenizing(lambda: desk.failure.append(UnavailableError("the worker was given up")))
    assert isinstance(lost, UnavailableError), "nobody would ever answer it"
    desk.failure.clear()
    desk.draining.set()
    await desk.refused(UnavailableError, "drains")
    desk.draining.clear()
    late = await tokenizing(desk.draining.set)
    assert isinstance(late, UnavailableError) and "drains" in str(late)
    assert len(desk.dispatcher.submitted) == 1


async def test_who_hangs_up_while_its_text_is_tokenized_is_never_queued(desk: Desk) -> None:
    desk.codec.open.clear()
    task = asyncio.create_task(desk.events(request_id="mine"))
    await until(lambda: desk.codec.texts)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    desk.codec.open.set()
    await asyncio.sleep(0.01)
    assert not desk.dispatcher.submitted
    assert len(await desk.events(Ended("stop"), request_id="mine")) == 2, "the name is free"


async def test_two_of_one_name(desk: Desk) -> None:
    first = desk.generation.run(GenerateParams(prompt="hello", request_id="mine"))
    await anext(first)
    await desk.refused(AlreadyExistsError, "'mine' is running", request_id="mine")
    assert desk.generation.cancel("mine")
    assert isinstance(await anext(first), Finished)
    await first.aclose()
    assert not desk.generation.cancel("mine")


async def test_closing_ends_the_request(desk: Desk) -> None:
    run = desk.generation.run(GenerateParams(prompt="hello"))
    await anext(run)
    await run.aclose()
    assert desk.dispatcher.cancelled == desk.dispatcher.submitted


async def test_a_full_queue_and_a_failure_reach_the_caller(desk: Desk) -> None:
    with pytest.raises(UnavailableError, match="died"):
        await desk.events(NewTokens([1]), UnavailableError("the worker died"))
    desk.dispatcher.room = 0
    with pytest.raises(ExhaustedError, match="the queue is full: 3 requests"):
        await desk.events()
    assert len(desk.dispatcher.submitted) == 1 and not desk.dispatcher.cancelled
    desk.dispatcher.room = 1000
    assert len(await desk.events(Ended("stop"))) == 2


# -- stop strings, and text that was held back -------------------------------------------------------------------------


def spelled(text: str) -> list[int]:
    """The small model's tokens are the bytes, in the order of their letters."""
    return byte_ids(text.encode())


def byte_ids(data: bytes) -> list[int]:
    letters = {"\n": "\u010a", " ": "\u0120"}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if data.isascii():
        return [alphabet.index(letters.get(character, character)) for character in data.decode()]
    return [alphabet.index({0xC3: "\u00c3", 0xA9: "\u00a9"}[byte]) for byte in data]


def shown(events: list[GenerationEvent], index: int = 0) -> tuple[list[int], str]:
    told = [event for event in events if isinstance(event, Tokens) and event.index == index]
    return [token for event in told for token in event.token_ids], "".join(event.text for event in told)


async def test_a_stop_string_ends_the_request_across_tokens_and_nothing_of_it_is_shown(desk: Desk) -> None:
    tokens = spelled("yes.\n\nUser: x")
    events = await desk.events(*[NewTokens([token]) for token in tokens], Ended("length"), stop=["\n\nUser:", "never"])
    assert shown(events) == (tokens[:11], "yes.")
    texts = [event.text for event in events if isinstance(event, Tokens)]
    assert texts == ["y", "e", "s", ".", *[""] * 7], "held back until it was decided"
    finished = events[-1]
    assert isinstance(finished, Finished) and (finished.reason, finished.output_tokens) == ("stop", 11)
    assert desk.dispatcher.cancelled == desk.dispatcher.submitted, "the worker has to know"


async def test_a_stop_string_inside_a_step_of_several_tokens_cuts_it(desk: Desk) -> None:
    told = [TokenLogprobs(-float(i), [], []) for i in range(1, 5)]
    events = await desk.events(NewTokens(spelled("ab!c"), told), stop=["b!"], logprobs=0)
    assert isinstance(events[1], Tokens) and events[1].logprobs == told[:3]
    assert shown(events) == (spelled("ab!"), "a")
    assert isinstance(events[2], Finished) and events[2].cumulative_logprob == -6.0


async def test_what_only_began_like_a_stop_string_is_shown(desk: Desk) -> None:
    events = await desk.events(
        NewTokens(spelled("a\n\nU")), NewTokens(spelled("b\n")), Ended("length"), stop=["\n\nUser:"]
    )
    assert shown(events)[1] == "a\n\nUb\n", "the end shows what was held back"
    last = events[-2]
    assert isinstance(last, Tokens) and (last.token_ids, last.text) == ([], "\n")
    assert isinstance(events[-1], Finished) and events[-1].reason == "length" and not desk.dispatcher.cancelled


async def test_half_a_character_at_the_end_is_shown_and_can_complete_a_stop_string(desk: Desk) -> None:
    half = byte_ids(b"\xc3")
    plain = await desk.events(NewTokens(spelled("a")), NewTokens(half), Ended("length"))
    assert [event.text for event in plain if isinstance(event, Tokens)] == ["a", "", "\ufffd"]
    stopped = await desk.events(NewTokens(spelled("a")), NewTokens(half), Ended("length"), stop=["\ufffd"])
    assert shown(stopped) == (spelled("a") + half, "a")
    assert isinstance(stopped[-1], Finished) and stopped[-1].reason == "stop"
    whole = await desk.events(NewTokens(byte_ids(b"\xc3\xa9")), Ended("stop"))
    assert shown(whole)[1] == "\u00e9" and len(whole) == 3, "nothing held, nothing more said"


async def test_stop_strings_need_a_tokenizer(desk: Desk) -> None:
    served = await desk.generation._choose().model()
    without = ServedModel(HELLO, served.kv, served.namespace, None, served.threads, frames=200)

    async def model() -> ServedModel:
        return without

    desk.generation._choose().model = model
    await desk.refused(UnsupportedError, "no tokenizer", "stop_token_ids", prompt=ids(1), stop=["x"])
    assert shown(await desk.events(NewTokens([1]), Ended("stop"), prompt=ids(1))) == ([1], "")


# -- several sequences -------------------------------------------------------------------------------------------------


async def begun(desk: Desk, **params: Any) -> tuple[AsyncGenerator[GenerationEvent, None], list[Request]]:
    """A request of several sequences, accepted, and what was queued for it."""
    before = len(desk.dispatcher.submitted)
    run = desk.generation.run(params_of(**{"temperature": 1.0, "seed": 5, **params}))
    assert isinstance(await anext(run), Accepted)
    return run, desk.dispatcher.submitted[before:]


class NewTokensOfATest(NewTokens):
    """With a weak reference; the real one has slots."""


def logprobs(*chosen: float) -> list[TokenLogprobs]:
    return [TokenLogprobs(each, [], []) for each in chosen]


async def test_sequences_have_seeds_and_numbers_of_their_own(desk: Desk) -> None:
    run, requests = await begun(desk, n=3, request_id="mine")
    assert [request.sampling.seed for request in requests] == [sequence_seed(5, index) for index in range(3)]
    assert requests[0].sampling.seed == 5 and len({request.sampling.seed for request in requests}) == 3
    assert [request.name for request in requests] == ["mine", "mine#1", "mine#2"]
    assert len({bytes(request.chain.token_ids) for request in requests}) == 1
    requests[1].events.put_nowait(NewTokens([1]))
    requests[0].events.put_nowait(NewTokens([2]))
    requests[1].events.put_nowait(Ended("stop"))
    requests[0].events.put_nowait(Ended("length"))
    requests[2].events.put_nowait(Ended("stop"))
    found = [event async for event in run]
    assert [(type(event).__name__, getattr(event, "index", None)) for event in found] == [
        ("Tokens", 1),
        ("Tokens", 0),
        ("SequenceFinished", 1),
        ("SequenceFinished", 0),
        ("SequenceFinished", 2),
        ("Finished", None),
    ]
    assert found[3] == SequenceFinished(0, "length", 1, None)
    assert isinstance(found[-1], Finished) and (found[-1].reason, found[-1].output_tokens) == ("length", 2)
    assert not desk.dispatcher.cancelled


def test_seeds_of_sequences_wrap_and_never_meet() -> None:
    assert sequence_seed(7, 1) == (7 + 0x9E3779B97F4A7C15) % 2**64
    assert sequence_seed(2**64 - 1, 0) == 2**64 - 1
    assert len({sequence_seed(seed, index) for seed in range(100) for index in range(32)}) == 3200


async def test_the_best_are_told_when_all_have_ended(desk: Desk) -> None:
    run, requests = await begun(desk, n=2, best_of=3)
    assert [request.sampling.logprobs for request in requests] == [0, 0, 0]
    for request, token, chosen in zip(requests, (1, 2, 3), (-2.0, -9.0, -0.5), strict=True):
        request.events.put_nowait(NewTokens([token], logprobs(chosen)))
        request.events.put_nowait(NewTokens([token], logprobs(chosen)))
    for request in requests[:2]:
        request.events.put_nowait(Ended("length"))
    waiting = asyncio.ensure_future(anext(run))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "the third may be better"
    requests[2].events.put_nowait(Ended("stop"))
    found = [await waiting, *[event async for event in run]]
    assert shown(found, 0)[0] == [3, 3] and shown(found, 1)[0] == [1, 1]
    assert all(not event.logprobs for event in found if isinstance(event, Tokens)), "they were not asked for"
    ended = [event for event in found if isinstance(event, SequenceFinished)]
    assert ended == [SequenceFinished(0, "stop", 2, -1.0), SequenceFinished(1, "length", 2, -4.0)]
    assert isinstance(found[-1], Finished) and found[-1].output_tokens == 6, "of all three"


async def test_one_failure_fails_the_call_and_ends_the_others(desk: Desk) -> None:
    run, requests = await begun(desk, n=3)
    requests[0].events.put_nowait(Ended("stop"))
    requests[2].events.put_nowait(UnavailableError("the worker died"))
    assert isinstance(await anext(run), SequenceFinished)
    with pytest.raises(UnavailableError, match="died"):
        await anext(run)
    assert desk.dispatcher.cancelled == [requests[1]]


async def test_a_stop_string_ends_its_own_sequence_alone(desk: Desk) -> None:
    run, requests = await begun(desk, n=2, stop=["!"])
    requests[0].events.put_nowait(NewTokens(spelled("a!")))
    requests[0].events.put_nowait(NewTokens(spelled("more")))
    requests[1].events.put_nowait(NewTokens(spelled("b")))
    requests[1].events.put_nowait(Ended("length"))
    found = [event async for event in run]
    assert shown(found, 0)[1] == "a" and shown(found, 1)[1] == "b"
    assert [event.reason for event in found if isinstance(event, SequenceFinished)] == ["stop", "length"]
    assert desk.dispatcher.cancelled == [requests[0]]


async def test_cancelling_or_closing_ends_all_sequences(desk: Desk) -> None:
    run, requests = await begun(desk, n=3, request_id="mine")
    await desk.refused(AlreadyExistsError, "'mine' is running", request_id="mine")
    assert desk.generation.cancel("mine")
    *ended, last = [event async for event in run]
    assert [event.reason for event in ended if isinstance(event, SequenceFinished)] == ["cancelled"] * 3
    assert isinstance(last, Finished) and last.reason == "cancelled"
    assert desk.dispatcher.cancelled == requests
    run, closed = await begun(desk, n=2, best_of=4, request_id="mine")
    await run.aclose()
    assert desk.dispatcher.cancelled[3:] == closed and len(closed) == 4


async def test_a_caller_that_does_not_read_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 sequences, each token with its logprob and that of another: 33 tokens are 99 values, one more is too many."""
    monkeypatch.setattr(inbox, "MOST_UNREAD", 100)
    run, requests = await begun(desk, n=2, logprobs=1, request_id="mine")
    for turn in range(33):
        requests[turn % 2].events.put_nowait(NewTokens([turn], logprobs(-1.0)))
    await asyncio.sleep(0)
    assert not desk.dispatcher.cancelled
    kept = weakref.ref(event := NewTokensOfATest([33]))
    requests[1].events.put_nowait(event)
    del event
    assert not desk.dispatcher.cancelled, "not in the middle of the dispatcher's step"
    await asyncio.sleep(0)
    assert desk.dispatcher.cancelled == requests
    assert kept() is None, "what nobody has read is not kept"
    requests[0].events.put_nowait(NewTokens([34]))
    with pytest.raises(ExhaustedError, match=r"102 tokens and logprobs wait to be read, 100 may.*too slowly; read"):
        await anext(run)
    assert not desk.generation._live


async def test_a_caller_that_reads_may_have_any_number_of_tokens(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MOST_UNREAD", 100)
    run, (request,) = await begun(desk)
    for turn in range(300):
        request.events.put_nowait(NewTokens([turn % 200]))
        if turn >= 99:
            assert shown([await anext(run)])[0] == [(turn - 99) % 200]
    request.events.put_nowait(Ended("stop"))
    assert isinstance([event async for event in run][-1], Finished) and not desk.dispatcher.cancelled


async def test_the_bound_wakes_a_caller_that_waits(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "MOST_UNREAD", 1)
    run, (request,) = await begun(desk)
    waiting = asyncio.ensure_future(anext(run))
    await asyncio.sleep(0)
    request.events.put_nowait(NewTokens([1, 2]))
    with pytest.raises(ExhaustedError, match="2 tokens"):
        await asyncio.wait_for(waiting, 5)


async def test_a_search_is_one_request_whose_sequences_come_at_its_end(desk: Desk) -> None:
    found = await desk.events(
        Ended("stop", [BeamResult([104, 105], -0.5, "stop"), BeamResult([104], -1.5, "length")]), width=3, n=2
    )
    (request,) = desk.dispatcher.submitted
    assert (request.sampling.beams, request.places) == (3, 3)
    told = [event for event in found if isinstance(event, Tokens)]
    assert [(event.index, event.token_ids) for event in told if event.token_ids] == [(0, [104, 105]), (1, [104])]
    assert all("".join(event.text for event in told if event.index == index) for index in (0, 1))
    ends = [event for event in found if isinstance(event, SequenceFinished)]
    assert [(end.reason, end.cumulative_logprob) for end in ends] == [("stop", -0.5), ("length", -1.5)]
    (last,) = [event for event in found if isinstance(event, Finished)]
    assert (last.output_tokens, last.resumed, last.reason) == (3, 0, "length")
    cancelled = await desk.events(Ended("cancelled"), width=2)
    assert [type(event) for event in cancelled] == [Accepted, Finished] and cancelled[-1].reason == "cancelled"
    with pytest.raises(UnavailableError, match="died"):
        await desk.events(UnavailableError("the worker died"), width=2)


async def test_a_long_sequence_that_was_searched_comes_in_pieces(desk: Desk) -> None:
    """Decoding it at once would hold the event loop."""
    tokens = [104, 105, 106] * 200
    _, *found, _ = await desk.events(Ended("stop", [BeamResult(tokens, -0.5, "stop")]), width=2)
    assert [len(event.token_ids) for event in found if isinstance(event, Tokens) and event.token_ids] == [256, 256, 88]
    assert [token for event in found if isinstance(event, Tokens) for token in event.token_ids] == tokens
    whole = desk.codec.stream()
    expected = whole.feed(tokens) + whole.end()
    assert "".join(event.text for event in found if isinstance(event, Tokens)) == expected


async def test_a_search_that_never_fits_is_refused(desk: Desk) -> None:
    with pytest.raises(ExhaustedError, match=r"16 beams needs \d+ bytes, but the GPU tier holds"):
        await desk.events(width=16, max_tokens=2000)


async def test_a_queue_without_room_for_all_sequences_takes_none(desk: Desk) -> None:
    desk.dispatcher.room = 2
    with pytest.raises(ExhaustedError, match="3 sequences, and each takes a place"):
        await begun(desk, n=3)
    assert desk.dispatcher.cancelled == desk.dispatcher.submitted and len(desk.dispatcher.submitted) == 2
    assert not desk.generation._live


async def test_a_prompt_that_never_fits_the_tier(desk: Desk, cache: TieredCache) -> None:
    served = await desk.generation._choose().model()
    small = ServedModel(HELLO, served.kv, served.namespace, served.codec, served.threads, frames=2)

    async def model() -> ServedModel:
        return small

    desk.generation._choose().model = model
    with pytest.raises(
        ExhaustedError, match=r"up to 35 tokens, need up to 24576 bytes, but the GPU tier holds 16384; .*gpu\.bytes"
    ):
        await desk.events(max_tokens=30)
    assert not list(cache.namespaces), "nothing was registered for it"


async def test_a_namespace_is_forgotten_with_the_last_request_that_uses_it(desk: Desk, cache: TieredCache) -> None:
    """At once, not at some later garbage collection: others wait for room."""
    gc.disable()
    try:
        for number in range(3):
            await desk.events(NewTokens([1]), Ended("length"), salt=b"%d" % number, n=1)
            desk.dispatcher.submitted.clear()
            desk.dispatcher.looked.clear()
        cache.registration.forget_unused()
        assert not list(cache.namespaces)
    finally:
        gc.enable()


async def test_requests_of_two_tenants_have_namespaces_of_their_own_and_no_clients(
    desk: Desk, cache: TieredCache
) -> None:
    for tenant in (None, cache.tenants.known("a"), cache.tenants.known("b")):
        await desk.events(Ended("stop"), tenant=tenant, salt=b"s")
    specs = [request.namespace.spec for request in desk.dispatcher.submitted]
    assert [spec.tenant for spec in specs] == ["default", "a", "b"]
    assert all(spec.worker for spec in specs) and len({request.namespace for request in desk.dispatcher.submitted}) == 3


async def test_without_room_for_another_salt_a_request_is_not_cached(desk: Desk, cache: TieredCache) -> None:
    cache.tenants.set_quotas({"a": Quota(namespaces=1)})
    tenant = cache.tenants.known("a")
    for salt in (b"one", b"two", b"one"):
        await desk.events(Ended("stop"), tenant=tenant, salt=salt, prompt=ids(*range(40)))
    requests = desk.dispatcher.submitted
    assert [request.uncached for request in requests] == [False, True, False]
    assert requests[0].namespace is requests[2].namespace is not requests[1].namespace
    assert cache.namespaces.count("a") == 1 and tenant.refused == {"namespaces": 1}
    assert cache.mover.lost["too many namespaces"] == 2
    with pytest.raises(InvalidArgumentError, match="salt has 257 bytes"):
        await desk.events(tenant=tenant, salt=bytes(257))


async def test_a_sidecar_generates_nothing(cache: TieredCache) -> None:
    generation = Generation(cache, {}, asyncio.Event(), time.monotonic)
    with pytest.raises(UnsupportedError, match="sidecar"):
        await anext(generation.run(GenerateParams(prompt="hello")))
    with pytest.raises(UnsupportedError, match="sidecar"):
        generation.cancel("any")


def test_it_imports_no_protocol() -> None:
    """import-linter checks what is imported further down, too."""
    files = list(Path(prefixd.serving.generation.__file__).parent.glob("*.py"))
    assert len(files) > 1
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.startswith(("grpc", "google", "prefixd.v1"))]


async def test_a_model_that_is_not_there_is_refused_by_name(desk: Desk) -> None:
    with pytest.raises(NotFoundError, match="there is no model 'other'; this daemon has model"):
        await anext(desk.generation.run(GenerateParams(prompt="hello", model="other")))
    assert not desk.dispatcher.submitted


async def test_the_frames_of_images_count_in_what_a_request_needs(cache: TieredCache) -> None:
    """60 frames an image, for layers with cross-attention, of 200 in the tier."""
    hello = msgspec.structs.replace(HELLO, images=ImageShape(7, "cross"), image_group=ImageGroup(2, 60))
    space, dispatcher = NamespaceSpec("model", 16, (PartSpec("attention", 0, 8192),)), FakeDispatcher()
    tokens = ids(*[7] * 5, *range(10, 21))

    class Reader:
        async def read(self, prompt: TokenIds, images: list[bytes], tenant: object, hold: object) -> PromptLayout:
            found = [PromptImage(place, 1, data * 32, Pixels(0, (), {})) for place, data in enumerate(images)]
            return PromptLayout(tokens, found, 16, cross=True)

    served = ServedModel(
        hello,
        KvShape.of(hello, 64),
        space,
        None,
        None,  # type: ignore[arg-type]
        frames=200,
        images=Reader(),  # type: ignore[arg-type]
        image_namespace=image_namespace(space, hello),
    )

    async def model() -> ServedModel:
        return served

    models: Any = {"model": SimpleNamespace(dispatcher=dispatcher, model=model)}
    generation = Generation(cache, models, asyncio.Event(), lambda: 5.0)

    async def ask(*images: bytes, **params: int) -> None:
        async with aclosing(generation.run(params_of(prompt=tokens, images=list(images), **params))) as events:  # type: ignore[arg-type]
            await anext(events)

    await ask(b"a", b"b", b"b", b"c", b"a", max_tokens=16)
    assert dispatcher.submitted[0].most_frames == 3 * 60 + 2, "an image that stands there twice takes its frames once"
    needed = (4 * 60 + 2) * 8192
    with pytest.raises(
        ExhaustedError, match=f"{needed} bytes, {240 * 8192} of them for its images, .*send fewer images"
    ):
        await ask(b"a", b"b", b"c", b"d", b"d", max_tokens=16)
    with pytest.raises(ExhaustedError, match=f"2 beams needs .* bytes, {240 * 8192} of them for its images"):
        await ask(b"a", b"b", b"c", b"d", b"d", max_tokens=16, width=2)
