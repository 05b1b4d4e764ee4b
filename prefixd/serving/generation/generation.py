"""Runs a call: checks and tokenizes its prompt, queues one request a sequence, and yields their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, aclosing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from prefixd.base.errors import (
    AlreadyExistsError,
    ExhaustedError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from prefixd.base.tenancy.fairness import SharedBytes
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache import TieredCache
from prefixd.cache.placement.retention import Retention, RetentionGrant
from prefixd.observability.request_log import RequestLog, end_with_error
from prefixd.observability.request_record import UNKNOWN_MODEL, Kind, RequestRecord, StageName
from prefixd.serving.dispatch.dispatcher import Dispatcher
from prefixd.serving.generation.events import Accepted, GenerationEvent
from prefixd.serving.generation.inbox import MOST_UNREAD_OF_ALL, Inbox
from prefixd.serving.generation.params import GenerateParams, check_params, image_bytes
from prefixd.serving.generation.prompt_ids import prompt_ids
from prefixd.serving.generation.request_maker import RequestMaker
from prefixd.serving.generation.request_rates import RequestRates
from prefixd.serving.generation.sequence import SequenceOutput, beam_events, finished_event, sampled_events
from prefixd.serving.generation.stop_strings import StopStrings
from prefixd.serving.models.served_model import ServedModel
from prefixd.serving.request.request import Request
from prefixd.serving.text.token_bytes import TokenBytes
from prefixd.serving.text.tokenization import TextCodec, TokenIds
from prefixd_scheduler import QueueFullError, SharedLimit

LONGEST_REQUEST_ID = 256
MOST_MESSAGE_BYTES = 1 << 30
"""Limit for the messages of all calls that wait or run, without their images. A call's other memory is in proportion to
its message: the prompt's ids twice, and for each sequence 30 bytes a block (16 of its key, 14 of the look-up)."""


_Live: TypeAlias = tuple[Dispatcher, list[Request]]


class Model(Protocol):
    """A model with its queue and its worker."""

    @property
    def dispatcher(self) -> Dispatcher:
        """Queue and worker."""

    @property
    def context_tokens(self) -> int | None:
        """Tokens that the model takes, prompt and output together; None as long as they are not known."""

    @property
    def codec(self) -> TextCodec | None:
        """Its tokenizer; None without one, and until it is loaded."""

    async def model(self) -> ServedModel:
        """Waits for the model and returns it; raises UnavailableError when the worker was given up."""


class Generation:
    """Generation on the daemon's workers. Used from the event loop alone.

    Args:
        cache: the cache.
        models: by name, first the default model; none in a sidecar.
        draining: set when the daemon takes no new work.
        clock: seconds.
        most_image_bytes: limit for the image files of all requests.
        records: gets the record of each call.
    """

    def __init__(
        self,
        cache: TieredCache,
        models: Mapping[str, Model],
        draining: asyncio.Event,
        clock: Callable[[], float],
        most_image_bytes: int = 1 << 30,
        records: RequestLog | None = None,
    ) -> None:
        self.records = RequestLog(clock) if records is None else records
        self._cache = cache
        self._models = models
        self._draining = draining
        self._clock = clock

        tenants = partial(getattr, cache.tenants, "calling")  # called for every token: faster than a lambda
        self._images = SharedBytes(most_image_bytes, "images", "worker.images_bytes", tenants)
        self._messages = SharedBytes(MOST_MESSAGE_BYTES, "prompt and parameters", "the daemon", tenants)
        self._unread = SharedLimit(MOST_UNREAD_OF_ALL, tenants)
        self._rates = RequestRates(clock)
        self._live: dict[str, dict[str, _Live]] = {}  # by the request's id and the tenant's name
        self._maker = RequestMaker(cache)

    async def run(self, params: GenerateParams) -> AsyncGenerator[GenerationEvent, None]:
        """Runs a prompt: `Accepted`, then `Tokens` as they are sampled, then `Finished`. Closing it ends the request.

        `Tokens` of several sequences come mixed, as they are sampled, and `SequenceFinished` after each one's last.
        With `best_of`, the best sequences come when all have ended, one after the other; number 0 is the best one.
        When one sequence fails, the call fails, and the others are ended.

        Raises:
            InvalidArgumentError: a parameter is out of its range, the prompt is empty or longer than the model, or an
                image is too large, not whole or without a place in the prompt.
            NotFoundError: there is no model of this name.
            AlreadyExistsError: a request with this id waits or runs.
            ExhaustedError: the queue has no room for all sequences, the tenant has as many waiting, or has sent as many
                a second, as it may, the prompt never fits the GPU tier, too many texts wait to be tokenized, requests
                have too many bytes of images or other bytes, or the caller is too far behind with reading (`Inbox`).
            UnavailableError: the daemon drains, or the worker died and could not take the request up again.
            UnsupportedError: a sidecar without a model, text or stop strings for a model without a tokenizer, or
                images for a model of text alone.
        """
        tenant = params.tenant or self._cache.tenants.default
        record = self._begin_record(params, tenant)
        try:
            self._rates.count(tenant)
            chosen = self._choose(params.model)
            self._check_not_draining()
            of_images = image_bytes(params)
            with (
                self._images.held(tenant, of_images),
                self._messages.held(tenant, max(0, params.message_bytes - of_images)),
                ExitStack() as granted,
            ):
                with record.timed(StageName.MODEL, self._clock):
                    model = await chosen.model()
                self._check_name(tenant, params.request_id)
                check_params(params, model)
                self._check_waiting(tenant, params.sequences)
                with record.timed(StageName.TOKENIZE, self._clock) as stage:
                    ids = await prompt_ids(params.prompt, model, tenant)
                    stage.attributes["tokens"] = record.prompt_tokens = len(ids)
                params = replace(params, prompt=b"")  # a text may take four times as many bytes as its message
                async with aclosing(self._generate(chosen, params, tenant, record, ids, model, granted)) as events:
                    async for event in events:
                        yield event
        except BaseException as error:
            end_with_error(record, error, self._clock())
            raise

    def _begin_record(self, params: GenerateParams, tenant: Tenant) -> RequestRecord:
        now_s, name = self._clock(), params.model or next(iter(self._models), "")
        record = self.records.begin(
            Kind.GENERATE,
            "Generate",
            id=params.request_id,
            tenant=tenant.name,
            model=name if name in self._models or not name else UNKNOWN_MODEL,
            arrival_s=now_s - params.waited_s,
            client_id=params.client_id,
            trace=params.trace,
        )
        record.note(StageName.RECEIVE, record.arrival_s, now_s)
        return record

    def model_lengths(self) -> dict[str, int | None]:
        """The models by name, the default one first, with the tokens that each takes; None: not known yet."""
        return {name: model.context_tokens for name, model in self._models.items()}

    async def token_bytes(self, model: str) -> TokenBytes | None:
        """The bytes of a model's tokens, which it waits for; None for a model without a tokenizer.

        Raises NotFoundError, UnsupportedError and UnavailableError, as `run`.
        """
        codec = (await self._choose(model).model()).codec
        return None if codec is None else codec.token_bytes

    async def _generate(
        self,
        chosen: Model,
        params: GenerateParams,
        tenant: Tenant,
        record: RequestRecord,
        ids: TokenIds,
        model: ServedModel,
        granted: ExitStack,
    ) -> AsyncGenerator[GenerationEvent, None]:
        dispatcher = chosen.dispatcher
        images_count = len(params.images)
        with record.timed(StageName.IMAGES, self._clock, images=images_count) if images_count else nullcontext():
            images = await model.read_images(ids, params.images, tenant.name, partial(self._images.held, tenant))
        if images is not None:
            granted.callback(images.leave)
            params = replace(params, images=())  # they are decoded
        await self._maker.make_namespace_room(model, tenant, params.salt)
        self._check_not_draining()  # again, since loading, tokenizing and decoding may have taken long
        model = await chosen.model()
        self._check_name(tenant, params.request_id)
        sampling = params.sampling
        values = 1 if sampling.logprobs is None else 2 + sampling.logprobs
        requests: list[Request] = []
        keeps = params.kept or params.sequences > params.answers
        inbox = Inbox(values, lambda: _cancel(dispatcher, requests), tenant, self._unread, keeps=keeps)
        requests += self._maker.make(params, tenant, record, ids, images, model, inbox)
        self.records.rename(record, requests[0].name)
        record.prompt_tokens, record.sequences = requests[0].prompt_tokens, len(requests)
        stops = StopStrings(sampling.stop_strings) if sampling.stop else None
        searched = sampling.beam_search is not None
        sequences = [
            SequenceOutput(
                index,
                request,
                model.codec.stream() if model.codec is not None else None,
                stops,
                show_logprobs=sampling.logprobs is not None,
            )
            for index, request in enumerate(requests * params.answers if searched else requests)
        ]
        name, refused = requests[0].name, ""
        with record.timed(StageName.STORE_LOOKUP, self._clock):
            await dispatcher.ask_store(requests[0])  # all of them have one prompt
        if params.retention:
            refused = granted.enter_context(await self._grant_retention(requests, params.retention)).refused
        self._check_not_draining()
        self._check_name(tenant, name)
        self._check_waiting(tenant, len(requests))
        _submit(dispatcher, requests, tenant)
        self._live.setdefault(name, {})[tenant.name] = dispatcher, requests
        going = dict(enumerate(sequences))
        try:
            yield Accepted(name, requests[0].prompt_tokens, refused)
            several = (
                beam_events(going, inbox) if searched else sampled_events(dispatcher, going, inbox, params.answers)
            )
            async with aclosing(several) as events:
                async for event in events:
                    yield event
            finished = finished_event(sequences, self._clock())
            record.output_tokens = finished.output_tokens
            record.end(finished.reason, self._clock())
            yield finished
        finally:
            of_name = self._live[name]
            del of_name[tenant.name]
            if not of_name:
                del self._live[name]
            _cancel(dispatcher, [sequence.request for sequence in going.values()])
            record.output_tokens = sum(sequence.output_tokens for sequence in sequences)
            inbox.close()
            requests.clear()  # breaks the cycle of inbox and requests, so that their memory is freed at once

    async def _grant_retention(self, requests: Sequence[Request], retention: Sequence[Retention]) -> RetentionGrant:
        """Grants the requested retention for the blocks of the requests' common prompt."""
        first = requests[0]
        groups = 0  # a read-only request stores nothing
        if not first.read_only:
            groups = int(np.bitwise_or.reduce(first.trie.part_mask[: len(first.kv.block_widths)]))
        blocks = first.prompt_tokens // first.trie.block_tokens
        grant = await self._cache.grant_retention(first.namespace, first.chain, blocks, groups, retention)
        for request in requests:
            request.retention = None if grant.refused else grant
        return grant

    def cancel(self, request_id: str, tenant: Tenant | None = None) -> bool:
        """Ends all sequences of a tenant's request, or without a tenant of every tenant's request with that id.

        Returns False if none waits or runs. Raises as `run`.
        """
        self._choose()
        if not request_id:
            raise InvalidArgumentError("request_id is empty; send the id from the first message of Generate")
        of_name = self._live.get(request_id, {})
        chosen = [live for name, live in of_name.items() if tenant is None or name == tenant.name]
        for live in chosen:
            _cancel(*live)
        return bool(chosen)

    def token_text(self, model: str, token: int) -> str:
        """The text of a token of a model; empty if its tokenizer is not there."""
        served = self._models.get(model)
        codec = None if served is None else served.codec
        return "" if codec is None else codec.token_text(token)

    def requests_of(self, tenant: Tenant) -> tuple[int, int]:
        """How many of a tenant's requests (sequences) wait, and how many run."""
        counts = [model.dispatcher.requests_of(tenant.name) for model in self._models.values()]
        return sum(waiting for waiting, _ in counts), sum(running for _, running in counts)

    def _check_waiting(self, tenant: Tenant, more: int) -> None:
        if tenant.quota.waiting_requests is not None:
            waiting, _ = self.requests_of(tenant)
            tenant.check("waiting_requests", waiting, "requests wait", "send it again when some have run", more=more)

    def _check_name(self, tenant: Tenant, name: str) -> None:
        if len(name) > LONGEST_REQUEST_ID:
            raise InvalidArgumentError(
                f"request_id has {len(name)} characters; choose one of at most {LONGEST_REQUEST_ID}"
            )
        if not name.isprintable():  # it is written to the log
            raise InvalidArgumentError(f"request_id {name!r} has characters that cannot be printed; leave them out")
        if tenant.name in self._live.get(name, ()):
            raise AlreadyExistsError(f"request_id {name!r} is running; choose another or leave it empty")

    def _check_not_draining(self) -> None:
        if self._draining.is_set():
            raise UnavailableError("the daemon drains and takes no new requests; try again when it is back")

    def _choose(self, name: str = "") -> Model:
        if not self._models:
            raise UnsupportedError(
                "this daemon is a sidecar without a model; start it with worker.model or worker.embedded"
            )
        if not name:
            return next(iter(self._models.values()))
        if name not in self._models:
            raise NotFoundError(f"there is no model {name[:256]!r}; this daemon has {', '.join(self._models)}")
        return self._models[name]


def _submit(dispatcher: Dispatcher, requests: list[Request], tenant: Tenant) -> None:
    """Queues all requests, or none. Raises ExhaustedError if the queue has no room for all."""
    for index, request in enumerate(requests):
        try:
            dispatcher.submit(request)
        except QueueFullError as error:
            _cancel(dispatcher, requests[:index])
            wanted = (
                f" (the request has {len(requests)} sequences, and each takes a place)" if len(requests) > 1 else ""
            )
            tenant.refused["scheduler.queue_limit"] += 1
            raise ExhaustedError(f"tenant {tenant.name}: {error}{wanted} (limit scheduler.queue_limit)") from error


def _cancel(dispatcher: Dispatcher, requests: Iterable[Request]) -> None:
    for request in requests:
        dispatcher.cancel(request)
