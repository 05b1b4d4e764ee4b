"""Generation: the use case behind every protocol by which prompts come.

What a caller asks for is checked here and becomes a `Request` of the dispatcher; what the worker samples becomes events
with text. Protocols only translate (`server/inference_service.py` does for gRPC).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prefixd.cache import TieredCache
from prefixd.errors import (
    AlreadyExistsError,
    ExhaustedError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
)
from prefixd.server.dispatcher import Dispatcher
from prefixd.server.request import Ended, FinishReason, NewTokens, Request
from prefixd.server.served_model import ServedModel
from prefixd.server.tokenization import TokenIds, TooManyTokensError, need_codec
from prefixd.worker.protocol import Hello, Sampling
from prefixd_scheduler import QueuedRequest, QueueFullError

DEFAULT_MAX_TOKENS = 16
LONGEST_REQUEST_ID = 256
MOST_STOP_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """What a caller asks for, not checked yet."""

    prompt: str | bytes
    """Text, or token ids as little-endian uint32, 4 bytes each."""
    request_id: str = ""
    """The caller's name for the request; empty: one is chosen."""
    max_tokens: int = 0
    """Most tokens to generate; 0: the default, 16."""
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 0.0
    """Nucleus sampling; 0: off, as 1."""
    seed: int | None = None
    """The k-th token depends on (seed, k) and the logits; None: chosen."""
    stop_token_ids: Sequence[int] = ()
    """Generation ends when one of these is sampled."""
    ignore_eos: bool = False
    """Do not end at the model's end-of-sequence tokens."""
    priority: int = 0
    """Lower goes first."""
    salt: bytes = b""
    """Tenant salt: prompts of different salts never share a cached block."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first event: the request is queued."""

    request_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that were sampled."""

    token_ids: list[int]
    text: str
    """What became complete with them; never half a character. Stop tokens are no part of it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event, with what the request used."""

    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    hit_tokens: tuple[int, int, int]
    """Prompt tokens found in the GPU, CPU and disk tier when the request was looked up for its turn."""
    queue_s: float
    """From its arrival to its hand-over to the worker."""
    ttft_s: float
    """From its arrival to its first token; 0 without one."""
    resumed: int
    """How often it was taken up again after a preemption or the worker's death."""


GenerationEvent = Accepted | Tokens | Finished


class Generation:
    """Generation on the daemon's worker. Used from the event loop alone.

    Args:
        cache: the cache.
        dispatcher: queue and worker; None in a sidecar.
        model: waits for the model and returns it; raises UnavailableError when the worker was given up.
        draining: set when the daemon takes no new work.
        clock: seconds.
    """

    def __init__(
        self,
        cache: TieredCache,
        dispatcher: Dispatcher | None,
        model: Callable[[], Awaitable[ServedModel]],
        draining: asyncio.Event,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._dispatcher = dispatcher
        self._model = model
        self._draining = draining
        self._clock = clock
        self._live: dict[str, Request] = {}
        self._ids = itertools.count(1)

    async def run(self, params: GenerateParams) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a prompt: `Accepted`, then `Tokens` as they are sampled, then `Finished`. Closing it ends the request.

        Raises:
            InvalidArgumentError: a parameter is out of its range, or the prompt is empty or longer than the model.
            AlreadyExistsError: a request with this id waits or runs.
            ExhaustedError: the queue is full, the prompt never fits the GPU tier, or too many texts wait to be
                tokenized.
            UnavailableError: the daemon drains, or the worker died and could not take the request up again.
            UnsupportedError: a sidecar without a model, or text for a model without a tokenizer.
        """
        dispatcher = self._need_dispatcher()
        self._take_work()
        model = await self._model()
        self._check_name(params.request_id)
        _check_sampling(params, model.hello)
        ids = await self._prompt(params.prompt, model)
        self._take_work()  # loading the model and tokenizing the text may have taken a while
        model = await self._model()
        self._check_name(params.request_id)
        live = self._request(params, ids, model)
        text = model.codec.stream() if model.codec is not None else None
        try:
            dispatcher.submit(live)
        except QueueFullError as error:
            raise ExhaustedError(str(error)) from error
        self._live[live.name] = live
        silent = frozenset(live.sampling.stop_token_ids)
        ended = False
        try:
            yield Accepted(live.name, live.prompt_tokens)
            while not ended:
                event = await live.events.get()
                if isinstance(event, NewTokens):
                    shown = [token for token in event.token_ids if token not in silent]
                    yield Tokens(event.token_ids, text.feed(shown) if text else "")
                    continue
                ended = True
                if not isinstance(event, Ended):
                    raise event
                yield self._finished(live, event)
        finally:
            del self._live[live.name]
            if not ended:
                dispatcher.cancel(live)

    def cancel(self, request_id: str) -> bool:
        """Ends a request by its id; False when none of that id waits or runs. Raises as `run`."""
        dispatcher = self._need_dispatcher()
        if not request_id:
            raise InvalidArgumentError("request_id is empty; send the id from the first message of Generate")
        live = self._live.get(request_id)
        if live is not None:
            dispatcher.cancel(live)
        return live is not None

    def _request(self, params: GenerateParams, ids: TokenIds, model: ServedModel) -> Request:
        room = model.hello.max_model_tokens - len(ids)
        sampling = Sampling(
            max_tokens=min(params.max_tokens or DEFAULT_MAX_TOKENS, room),
            temperature=params.temperature,
            top_p=params.top_p or 1.0,
            # Chosen here, so that a run that is taken up again samples the same tokens.
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            stop_token_ids=tuple(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
        )
        block_tokens = model.hello.block_tokens
        longest = len(ids) + sampling.max_tokens
        if longest > model.frames * block_tokens:
            raise ExhaustedError(
                f"prompt and output need up to {longest} tokens, but the GPU tier holds "
                f"{model.frames * block_tokens}; shorten the prompt, lower max_tokens or raise gpu.bytes"
            )
        namespace = self._cache.register(model.salted(params.salt))
        chain = self._cache.chain(namespace, ids.tobytes())
        number = next(self._ids)
        return Request(
            id=number,
            name=params.request_id or f"r{number}-{secrets.token_hex(3)}",
            namespace=namespace,
            trie=self._cache.trie(namespace),
            chain=chain,
            prompt_tokens=len(ids),
            sampling=sampling,
            queued=QueuedRequest(number, self._clock(), len(ids), priority=params.priority),
        )

    async def _prompt(self, prompt: str | bytes, model: ServedModel) -> TokenIds:
        """The prompt's token ids, shorter than the model's context. No work here grows with what is refused."""
        limit = model.hello.max_model_tokens
        if isinstance(prompt, str):
            ids = await self._tokenized(prompt, model)
            _check_length(len(ids), limit)
            return ids
        if not prompt:
            raise InvalidArgumentError("the prompt is empty; send text or at least one token id")
        if len(prompt) % 4:
            raise InvalidArgumentError(
                f"token_ids has {len(prompt)} bytes, no multiple of 4; send little-endian uint32"
            )
        ids = np.frombuffer(prompt, "<u4").astype(np.uint32, copy=False)
        _check_length(len(ids), limit)
        worst = int(ids.max())
        if worst >= model.hello.vocab_size:
            raise InvalidArgumentError(
                f"token id {worst} is outside the model's vocabulary of {model.hello.vocab_size}; "
                "tokenize with the model's own tokenizer"
            )
        return ids

    async def _tokenized(self, text: str, model: ServedModel) -> TokenIds:
        limit = model.hello.max_model_tokens
        if not text:
            raise InvalidArgumentError("the prompt is empty; send at least one character")
        codec = need_codec(model.codec)
        if len(text) > codec.longest_token * limit:
            raise InvalidArgumentError(
                f"the prompt has {len(text)} characters, but the model takes {limit} tokens with the output, of at "
                f"most {codec.longest_token} characters each; send at most {codec.longest_token * (limit - 1)} "
                "characters"
            )
        try:
            return await model.threads.encode(codec, text, limit)
        except TooManyTokensError as error:
            raise InvalidArgumentError(
                f"the prompt of {len(text)} characters has more than {error.tokens} tokens, but the model takes "
                f"{limit} with the output; send at most {limit - 1}"
            ) from error

    def _finished(self, live: Request, event: Ended) -> Finished:
        gpu, cpu, disk = live.hit_tokens or (0, 0, 0)
        arrival = live.queued.arrival_s
        return Finished(
            reason=event.reason,
            prompt_tokens=live.prompt_tokens,
            output_tokens=live.generated,
            hit_tokens=(gpu, cpu, disk),
            queue_s=(live.handed_over_s or self._clock()) - arrival,
            ttft_s=live.first_token_s - arrival if live.first_token_s is not None else 0.0,
            resumed=live.resumed,
        )

    def _check_name(self, name: str) -> None:
        if len(name) > LONGEST_REQUEST_ID:
            raise InvalidArgumentError(
                f"request_id has {len(name)} characters; choose one of at most {LONGEST_REQUEST_ID}"
            )
        if name in self._live:
            raise AlreadyExistsError(f"request_id {name!r} is running; choose another or leave it empty")

    def _take_work(self) -> None:
        if self._draining.is_set():
            raise UnavailableError("the daemon drains and takes no new requests; try again when it is back")

    def _need_dispatcher(self) -> Dispatcher:
        if self._dispatcher is None:
            raise UnsupportedError(
                "this daemon is a sidecar without a model; start it with worker.model or worker.embedded"
            )
        return self._dispatcher


def _check_length(tokens: int, limit: int) -> None:
    if tokens >= limit:
        raise InvalidArgumentError(
            f"the prompt has {tokens} tokens, but the model takes {limit} with the output; send at most {limit - 1}"
        )


def _check_sampling(params: GenerateParams, hello: Hello) -> None:
    if params.temperature < 0 or not math.isfinite(params.temperature):
        raise InvalidArgumentError(f"temperature is {params.temperature}; it must be 0 (greedy) or positive")
    if not 0 <= params.top_p <= 1:
        raise InvalidArgumentError(f"top_p is {params.top_p}; it must be between 0 and 1")
    stops = params.stop_token_ids
    if len(stops) > MOST_STOP_TOKENS:
        raise InvalidArgumentError(f"stop_token_ids has {len(stops)} ids; send at most {MOST_STOP_TOKENS}")
    for token in stops:
        if not 0 <= token < hello.vocab_size:
            raise InvalidArgumentError(f"stop token id {token} is outside the vocabulary of {hello.vocab_size}")
