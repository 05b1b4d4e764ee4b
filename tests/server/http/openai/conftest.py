"""The OpenAI front over `Generation`, in one process: a fake dispatcher answers in place of queue and worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prefixd.base.tenancy.tenants import Role
from prefixd.cache import NamespaceSpec, PartSpec, TieredCache
from prefixd.server.access.identities import Caller, UnknownCallerError
from prefixd.server.http.http_ports import users_limits
from prefixd.server.http.openai import OpenAIRoutes
from prefixd.server.http.request_bounds import RequestBounds
from prefixd.server.rpc.call_limits import CallLimits
from prefixd.serving.generation import Generation
from prefixd.serving.kv_shape import KvShape
from prefixd.serving.models.served_model import ServedModel
from prefixd.serving.request.request import Request
from prefixd.serving.request.request_events import Ended, Event, NewTokens
from prefixd.serving.text import tokenization
from prefixd.serving.text.tokenization import TextCodec
from prefixd.serving.text.tokenizer_threads import TokenizerThreads
from prefixd.worker_protocol.protocol import GroupShape
from prefixd_scheduler import QueueFullError
from tests.hello import hello

CONTEXT = 2048
JSON = {"Content-Type": "application/json"}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """A token a byte: 0 to 255 in the order of their characters, and 256 `<s>`, which every text begins with."""
    from tokenizers.processors import TemplateProcessing

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return tokenizer


def make_codec(template: str | None = TEMPLATE) -> TextCodec:
    """A codec of `byte_tokenizer`, without the process that reads a model's files."""
    chat = {"source": template, "special_tokens": {"bos_token": "<s>"}, "image_tokens": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenization, "_load", lambda model: (byte_tokenizer(), False, chat))
        return TextCodec(None)  # type: ignore[arg-type]


def tokens_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False).ids


@dataclass
class FakeDispatcher:
    """Answers each request with `answer`, as soon as it is queued; or leaves it to the test."""

    answer: Sequence[Event] | None = (NewTokens(tokens_of("Hello")), Ended("stop"))
    submitted: list[Request] = field(default_factory=list)
    cancelled: list[Request] = field(default_factory=list)
    room: int = 1000

    def submit(self, request: Request) -> None:
        if self.room == 0:
            raise QueueFullError(3)
        self.room -= 1
        self.submitted.append(request)
        for event in self.answer or ():
            request.events.put_nowait(event)

    async def ask_store(self, request: Request) -> None:
        """There is none."""

    def requests_of(self, tenant: str) -> tuple[int, int]:
        return len(self.submitted) - len(self.cancelled), 0

    def cancel(self, request: Request) -> None:
        self.cancelled.append(request)
        request.events.put_nowait(Ended("cancelled"))


class FakeCallers:
    """Knows the tokens `client`, `metrics` and `admin`; without a token a caller is a client. The header `tenant` names
    another tenant than the default one."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self.known: list[str] = []
        self.refused: list[str] = []

    def identify(self, request: HttpRequest) -> Caller:
        token = request.headers.get("authorization", "Bearer client").removeprefix("Bearer ")
        if token not in tuple(Role):
            raise UnknownCallerError("the token is not known here")
        tenants = self._cache.tenants
        tenant = tenants.known(request.headers["tenant"]) if "tenant" in request.headers else tenants.default
        return Caller(tenant, Role(token), token, "http")

    def let_in(self, caller: Caller) -> None:
        self.known.append(caller.name)

    async def pace_refusal(self, request: HttpRequest, caller: Caller | None) -> bool:
        return True

    async def refuse_turn(self, request: HttpRequest, why: object, caller: Caller | None = None) -> None:
        self.refused.append(str(why))


@dataclass
class Front:
    """The front, its clients and what is behind it."""

    dispatcher: FakeDispatcher
    generation: Generation
    callers: FakeCallers
    draining: asyncio.Event
    app: RequestBounds
    http: httpx.AsyncClient
    client: AsyncOpenAI

    async def error(self, path: str, status: int, **body: Any) -> dict[str, Any]:
        """The error that a request gets; it must not have reached the queue."""
        before = len(self.dispatcher.submitted)
        answer = await self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert len(self.dispatcher.submitted) == before
        error: dict[str, Any] = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    async def complete_error(self, status: int, **body: Any) -> dict[str, Any]:
        return await self.error("/v1/completions", status, **{"model": "model", "prompt": "hi", **body})

    async def chat_error(self, status: int, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "hi"}]
        return await self.error("/v1/chat/completions", status, **{"model": "model", "messages": messages, **body})

    @property
    def prompt(self) -> str:
        """The last prompt that was queued."""
        return byte_tokenizer().decode(prompt_tokens(self.dispatcher.submitted[-1]), skip_special_tokens=False)


def prompt_tokens(request: Request) -> list[int]:
    return np.frombuffer(request.chain.token_ids, "<u4")[: request.prompt_tokens].tolist()


@pytest.fixture
async def make_front(cache: TieredCache) -> AsyncIterator[Callable[..., Front]]:
    """`make_front(template)`: a front whose model has this chat template, or none."""
    threads = TokenizerThreads()

    def make(template: str | None = TEMPLATE, frames: int = 200) -> Front:
        dispatcher, draining = FakeDispatcher(), asyncio.Event()
        description = hello(
            groups=(GroupShape("attention", None, 2, 1),),
            frame_bytes=8192,
            chunk_bytes=8192,
            vocab_size=272,
            max_model_tokens=CONTEXT,
            eos_token_ids=(271,),
        )
        space = NamespaceSpec("model", 16, (PartSpec("attention", 0, 8192),), worker=True)
        shape = KvShape.of(description, 64)
        served = ServedModel(description, shape, space, make_codec(template), threads, frames)

        async def model() -> ServedModel:
            return served

        models: Any = {"model": SimpleNamespace(dispatcher=dispatcher, model=model, context_tokens=CONTEXT)}
        generation, callers = Generation(cache, models, draining, lambda: 5.0), FakeCallers(cache)
        routes = OpenAIRoutes(generation, callers, CallLimits(cache.tenants, 100)).routes()
        app = RequestBounds(Starlette(routes=routes), users_limits(100))
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://prefixd", headers=JSON)
        client = AsyncOpenAI(api_key="client", base_url="http://prefixd/v1", http_client=http, max_retries=0)
        return Front(dispatcher, generation, callers, draining, app, http, client)

    yield make
    threads.close()


@pytest.fixture
def front(make_front: Callable[..., Front]) -> Front:
    return make_front()
