"""`Inference` over gRPC; the contract is in `proto/prefixd/v1/inference.proto`."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable

import numpy as np

from prefixd.cache import NamespaceSpec, TieredCache
from prefixd.errors import (
    AlreadyExistsError,
    ExhaustedError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
)
from prefixd.server.dispatcher import Dispatcher
from prefixd.server.request import Ended, NewTokens, Request
from prefixd.server.rpc import streaming, unary
from prefixd.server.tokenization import TextCodec, need_codec
from prefixd.v1 import inference_pb2 as pb
from prefixd.v1 import inference_pb2_grpc
from prefixd.worker.protocol import Hello, Sampling
from prefixd_scheduler import QueuedRequest

DEFAULT_MAX_TOKENS = 16
_LONGEST_NAME = 256
_REASONS: dict[str, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}


class ServedModel:
    """The model that this daemon's worker runs.

    Args:
        hello: the model's numbers.
        namespace: its namespace, without a salt.
        codec: its tokenizer, if it has one.
        frames: frames of the GPU tier.
    """

    def __init__(self, hello: Hello, namespace: NamespaceSpec, codec: TextCodec | None, frames: int) -> None:
        self.hello = hello
        self.namespace = namespace
        self.codec = codec
        self.frames = frames

    def salted(self, salt: bytes) -> NamespaceSpec:
        """The model's namespace for a tenant."""
        spec = self.namespace
        return NamespaceSpec(spec.name, spec.block_tokens, spec.parts, salt, spec.dtype, spec.layout)


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Generation on the daemon's worker.

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
        self._by_name: dict[str, Request] = {}
        self._ids = itertools.count(1)

    @streaming
    async def Generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Runs a prompt and streams its tokens."""
        dispatcher = self._need_dispatcher()
        self._take_work()
        model = await self._model()
        self._take_work()  # the model may have taken a while to load
        live = self._build(request, model)
        if live.name in self._by_name:
            raise AlreadyExistsError(f"request_id {live.name!r} is running; choose another or leave it empty")
        text = model.codec.stream() if model.codec is not None else None
        dispatcher.submit(live)
        self._by_name[live.name] = live
        ended = False
        try:
            yield pb.GenerateResponse(accepted=pb.Accepted(request_id=live.name, prompt_tokens=live.prompt_tokens))
            while not ended:
                event = await live.events.get()
                if isinstance(event, NewTokens):
                    shown = [token for token in event.token_ids if token not in live.sampling.stop_token_ids]
                    yield pb.GenerateResponse(
                        tokens=pb.Tokens(token_ids=event.token_ids, text=text.feed(shown) if text else "")
                    )
                    continue
                ended = True
                if not isinstance(event, Ended):
                    raise event
                yield pb.GenerateResponse(finished=self._finished(live, event))
        finally:
            del self._by_name[live.name]
            if not ended:
                dispatcher.cancel(live)

    @unary
    async def Cancel(self, request: pb.CancelRequest) -> pb.CancelResponse:
        """Ends a request by its id."""
        dispatcher = self._need_dispatcher()
        if not request.request_id:
            raise InvalidArgumentError("request_id is empty; send the id from the first message of Generate")
        live = self._by_name.get(request.request_id)
        if live is not None:
            dispatcher.cancel(live)
        return pb.CancelResponse(cancelled=live is not None)

    def _build(self, request: pb.GenerateRequest, model: ServedModel) -> Request:
        if len(request.request_id) > _LONGEST_NAME:
            raise InvalidArgumentError(
                f"request_id has {len(request.request_id)} characters; choose one of at most {_LONGEST_NAME}"
            )
        ids = self._prompt(request, model)
        limit = model.hello.max_model_tokens
        if len(ids) >= limit:
            raise InvalidArgumentError(
                f"the prompt has {len(ids)} tokens, but the model takes {limit} with the output; "
                f"send at most {limit - 1}"
            )
        sampling = _sampling(request.sampling, model.hello, limit - len(ids))
        block_tokens = model.hello.block_tokens
        longest = len(ids) + sampling.max_tokens
        if longest > model.frames * block_tokens:
            raise ExhaustedError(
                f"prompt and output need up to {longest} tokens, but the GPU tier holds "
                f"{model.frames * block_tokens}; shorten the prompt, lower max_tokens or raise gpu.bytes"
            )
        namespace = self._cache.register(model.salted(request.salt))
        chain = self._cache.chain(namespace, ids.tobytes())
        number = next(self._ids)
        return Request(
            id=number,
            name=request.request_id or f"r{number}-{secrets.token_hex(3)}",
            namespace=namespace,
            trie=self._cache.trie(namespace),
            chain=chain,
            prompt_tokens=len(ids),
            sampling=sampling,
            queued=QueuedRequest(number, self._clock(), len(ids), priority=request.priority),
        )

    def _prompt(self, request: pb.GenerateRequest, model: ServedModel) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        kind = request.WhichOneof("prompt")
        if kind == "text":
            if not request.text:
                raise InvalidArgumentError("the prompt is empty; send at least one character")
            return np.array(need_codec(model.codec).encode(request.text), np.uint32)
        raw = request.token_ids.ids
        if not raw:
            raise InvalidArgumentError("the prompt is empty; send text or at least one token id")
        if len(raw) % 4:
            raise InvalidArgumentError(f"token_ids has {len(raw)} bytes, no multiple of 4; send little-endian uint32")
        ids = np.frombuffer(raw, np.uint32)
        worst = int(ids.max())
        if worst >= model.hello.vocab_size:
            raise InvalidArgumentError(
                f"token id {worst} is outside the model's vocabulary of {model.hello.vocab_size}; "
                "tokenize with the model's own tokenizer"
            )
        return ids

    def _finished(self, live: Request, event: Ended) -> pb.Finished:
        gpu, cpu, disk = live.hit_tokens or (0, 0, 0)
        arrival = live.queued.arrival_s
        return pb.Finished(
            reason=_REASONS[event.reason],
            prompt_tokens=live.prompt_tokens,
            output_tokens=live.generated,
            hit_tokens=pb.HitTokens(gpu=gpu, cpu=cpu, disk=disk),
            queue_s=(live.handed_over_s or self._clock()) - arrival,
            ttft_s=live.first_token_s - arrival if live.first_token_s is not None else 0.0,
            resumed=live.resumed,
        )

    def _take_work(self) -> None:
        if self._draining.is_set():
            raise UnavailableError("the daemon drains and takes no new requests; try again when it is back")

    def _need_dispatcher(self) -> Dispatcher:
        if self._dispatcher is None:
            raise UnsupportedError(
                "this daemon is a sidecar without a model; start it with worker.model or worker.embedded"
            )
        return self._dispatcher


def _sampling(wanted: pb.SamplingParams, hello: Hello, room: int) -> Sampling:
    """Checked parameters, for an output of at most `room` tokens."""
    if wanted.temperature < 0 or not math.isfinite(wanted.temperature):
        raise InvalidArgumentError(f"temperature is {wanted.temperature}; it must be 0 (greedy) or positive")
    if not 0 <= wanted.top_p <= 1:
        raise InvalidArgumentError(f"top_p is {wanted.top_p}; it must be between 0 and 1")
    for token in wanted.stop_token_ids:
        if token >= hello.vocab_size:
            raise InvalidArgumentError(f"stop token id {token} is outside the vocabulary of {hello.vocab_size}")
    return Sampling(
        max_tokens=min(wanted.max_tokens or DEFAULT_MAX_TOKENS, room),
        temperature=wanted.temperature,
        top_p=wanted.top_p or 1.0,
        # Chosen here, so that a run that is taken up again samples the same tokens.
        seed=wanted.seed if wanted.HasField("seed") else secrets.randbits(63),
        stop_token_ids=tuple(wanted.stop_token_ids),
        ignore_eos=wanted.ignore_eos,
    )
