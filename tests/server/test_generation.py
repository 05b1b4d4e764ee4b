"""The use case of generation, without a protocol in front of it: what is refused costs nothing, what runs is told."""

from __future__ import annotations

import ast
import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prefixd.generation
from prefixd.cache import NamespaceSpec, PartSpec, TieredCache
from prefixd.errors import (
    AlreadyExistsError,
    ExhaustedError,
    InvalidArgumentError,
    PrefixdError,
    UnavailableError,
    UnsupportedError,
)
from prefixd.generation import (
    MOST_STOP_TOKENS,
    Accepted,
    Finished,
    GenerateParams,
    Generation,
    GenerationEvent,
    Tokens,
)
from prefixd.server.request import Ended, NewTokens, Request
from prefixd.server.served_model import ServedModel
from prefixd.server.text_stream import TextStream
from prefixd.server.tokenization import TextCodec, TokenIds
from prefixd.server.tokenizer_threads import TokenizerThreads
from prefixd.worker.protocol import Hello
from prefixd_scheduler import QueueFullError

CONTEXT = 2048
HELLO = Hello(
    layers=2,
    kv_heads=2,
    head_dim=16,
    dtype="float32",
    block_tokens=16,
    layout="token",
    chunk_bytes=8192,
    vocab_size=272,
    max_model_tokens=CONTEXT,
    eos_token_ids=(271,),
    architecture="Llama",
    parameters=1,
    device="cpu",
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
    full: bool = False

    def submit(self, request: Request) -> None:
        if self.full:
            raise QueueFullError(3)
        self.submitted.append(request)

    def cancel(self, request: Request) -> None:
        self.cancelled.append(request)
        request.events.put_nowait(Ended("cancelled"))


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
        async with aclosing(self.generation.run(GenerateParams(**{"prompt": "hello", **params}))) as events:
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
    space = NamespaceSpec("model", 16, (PartSpec("attention", 0, 8192),))
    served = ServedModel(HELLO, space, codec, threads, frames=200)  # type: ignore[arg-type]

    async def model() -> ServedModel:
        if failure:
            raise failure[0]
        return served

    yield Desk(Generation(cache, dispatcher, model, draining, lambda: 5.0), dispatcher, codec, draining, failure)  # type: ignore[arg-type]
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
    assert finished == Finished("stop", 5, 0, (0, 0, 0), 0.0, 0.0, 0)
    sampling = request().sampling
    assert (sampling.max_tokens, sampling.top_p, sampling.stop_token_ids) == (16, 1.0, (3,))
    assert (request().queued.priority, request().namespace.spec.salt) == (2, b"s")
    assert not desk.dispatcher.cancelled
    assert desk.codec.threads and threading.get_ident() not in desk.codec.threads


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
        ({"temperature": float("inf")}, ["temperature is inf"]),
        ({"top_p": 1.5}, ["top_p is 1.5"]),
        ({"stop_token_ids": [0, 272]}, ["stop token id 272"]),
        ({"stop_token_ids": range(MOST_STOP_TOKENS + 1)}, ["1025 ids", "at most 1024"]),
        ({"request_id": "x" * 257}, ["257 characters", "at most 256"]),
    ],
    ids=lambda value: None if isinstance(value, list) else next(iter(value)),
)
async def test_wrong_parameters_are_refused_before_any_work(
    desk: Desk, params: dict[str, Any], words: list[str]
) -> None:
    await desk.refused(InvalidArgumentError, *words, **params)


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
        while len(desk.codec.texts) == seen:
            await asyncio.sleep(0.001)
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
    while not desk.codec.texts:
        await asyncio.sleep(0.001)
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
    desk.dispatcher.full = True
    with pytest.raises(ExhaustedError, match="the queue is full: 3 requests"):
        await desk.events()
    assert len(desk.dispatcher.submitted) == 1 and not desk.dispatcher.cancelled
    desk.dispatcher.full = False
    assert len(await desk.events(Ended("stop"))) == 2


async def test_a_prompt_that_never_fits_the_tier(desk: Desk, cache: TieredCache) -> None:
    served = await desk.generation._model()
    small = ServedModel(HELLO, served.namespace, served.codec, served.threads, frames=2)

    async def model() -> ServedModel:
        return small

    desk.generation._model = model
    with pytest.raises(ExhaustedError, match=r"up to 35 tokens, but the GPU tier holds 32; .*gpu\.bytes"):
        await desk.events(max_tokens=30)
    assert not list(cache.namespaces), "nothing was registered for it"


async def test_a_sidecar_generates_nothing(cache: TieredCache) -> None:
    async def model() -> ServedModel:
        raise AssertionError("it refuses before it asks")

    generation = Generation(cache, None, model, asyncio.Event(), time.monotonic)
    with pytest.raises(UnsupportedError, match="sidecar"):
        await anext(generation.run(GenerateParams(prompt="hello")))
    with pytest.raises(UnsupportedError, match="sidecar"):
        generation.cancel("any")


def test_it_imports_no_protocol() -> None:
    """import-linter checks what is imported further down, too."""
    tree = ast.parse(Path(prefixd.generation.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.startswith(("grpc", "google", "prefixd.v1"))]
