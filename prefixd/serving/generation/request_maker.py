"""Makes the dispatcher's requests of a call, one for each sequence."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
from bisect import bisect_right

from prefixd.base.errors import ExhaustedError, InvalidArgumentError
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache import Namespace, TieredCache
from prefixd.observability.request_record import RequestRecord
from prefixd.serving.generation.inbox import Inbox
from prefixd.serving.generation.params import GenerateParams
from prefixd.serving.images.image_kv import ImageKv
from prefixd.serving.images.prompt_images import PromptLayout
from prefixd.serving.models.served_model import ServedModel
from prefixd.serving.request.request import Request
from prefixd.serving.text.tokenization import TokenIds
from prefixd.worker_protocol.protocol import blocks_needed
from prefixd_scheduler import QueuedRequest

log = logging.getLogger(__name__)

_LARGER_TIER = "make the tier larger (prefixd tier resize gpu, and gpu.bytes for the next start)"


class RequestMaker:
    """Makes requests, each with a namespace of the cache and a number.

    Args:
        cache: the cache.
    """

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._ids = itertools.count(1)

    async def make_namespace_room(self, model: ServedModel, tenant: Tenant, salt: bytes) -> None:
        """Makes room for the namespaces of a request, if they are new: forgets the ones unused for longest."""
        specs = model.specs(tenant, salt)
        new = sum(spec.nbytes for spec in specs if self._cache.namespaces.find(spec) is None)
        if new:
            await self._cache.namespace_room.make(tenant, new)

    def make(
        self,
        params: GenerateParams,
        tenant: Tenant,
        record: RequestRecord,
        ids: TokenIds,
        images: PromptLayout | None,
        model: ServedModel,
        inbox: Inbox,
    ) -> list[Request]:
        """The requests of a call, one for each sequence; they put their events into the inbox."""
        arrival_s = record.arrival_s
        prompt_tokens = len(ids) if images is None else images.tokens
        # The seed is chosen here, so that a repeated run samples the same tokens.
        asked = params.sampling
        seed = asked.seed if asked.seed is not None else secrets.randbits(63)
        room = model.hello.max_model_tokens - prompt_tokens
        if (forced := len(asked.forced_ids)) > room:
            raise InvalidArgumentError(
                f"the prompt has {prompt_tokens} tokens and forced_tokens {forced}, but the model "
                f"takes {model.hello.max_model_tokens} together; shorten one of them"
            )
        block_tokens, frame_bytes = model.hello.block_tokens, model.hello.frame_bytes
        if params.as_long_as_fits:
            left = model.frames - model.image_frames(images)
            most_blocks = -(-model.hello.max_model_tokens // block_tokens)
            blocks = bisect_right(range(most_blocks + 1), left, key=model.kv.most_frames) - 1
            room = max(1, min(room, blocks * block_tokens - prompt_tokens))
        samplings = [params.sequence_sampling(index, seed, room) for index in range(params.sequences)]
        longest = prompt_tokens + samplings[0].max_tokens
        of_images = model.image_frames(images)
        with_images = f", {of_images * frame_bytes} of them for its images" if of_images else ""
        if searched := samplings[0].beams:
            blocks = blocks_needed(prompt_tokens, samplings[0].max_tokens, searched, block_tokens)
            if (frames := model.kv.beam_frames(blocks) + of_images) > model.frames:
                raise ExhaustedError(
                    f"a search with {searched} beams needs {frames * frame_bytes} bytes{with_images}, but the GPU tier "
                    f"holds {model.frames * frame_bytes}; narrow the search, lower max_tokens or {_LARGER_TIER}"
                )
        elif (frames := model.kv.most_frames(-(-longest // block_tokens)) + of_images) > model.frames:
            raise ExhaustedError(
                f"prompt and output, up to {longest} tokens, need up to {frames * frame_bytes} bytes{with_images}, but "
                f"the GPU tier holds {model.frames * frame_bytes}; shorten the prompt, "
                f"{'send fewer images, ' if of_images else ''}lower max_tokens or {_LARGER_TIER}"
            )
        namespace, image_kv, refusal = self._register(model, tenant, params.salt, images, prompt_tokens)
        deadline_s = math.inf if params.deadline_s is None else params.deadline_s
        tokens = ids.tobytes() if images is None else images.identity
        requests: list[Request] = []
        for index, sampling in enumerate(samplings):
            number = next(self._ids)
            name = params.request_id or f"r{number}-{secrets.token_hex(3)}"
            requests.append(
                Request(
                    id=number,
                    name=f"{requests[0].name}#{index}" if index else name,
                    namespace=namespace,
                    trie=self._cache.trie(namespace),
                    chain=self._cache.chain(namespace, tokens),
                    prompt_tokens=prompt_tokens,
                    sampling=sampling,
                    queued=QueuedRequest(
                        number,
                        arrival_s,
                        prompt_tokens,
                        priority=params.priority,
                        deadline_s=arrival_s + deadline_s,
                        tenant=tenant.name,
                    ),
                    kv=model.kv,
                    record=record,
                    images=None if images is None else images.of_request(),
                    image_kv=image_kv,
                    events=inbox.sink(index),
                    fork_of=requests[0].id if requests else -1,
                    read_only=params.read_only,
                    uncached=bool(refusal),
                )
            )
        if refusal:
            name = requests[0].name
            log.debug("request %s is not cached: %s", name, refusal, extra={"request_id": name})
        return requests

    def _register(
        self, model: ServedModel, tenant: Tenant, salt: bytes, images: PromptLayout | None, prompt_tokens: int
    ) -> tuple[Namespace, ImageKv | None, str]:
        """The namespaces of a prompt and of its images, and why the cache is not used, else an empty text: a request
        whose new namespace has no room runs without the cache."""
        cache = self._cache
        try:
            return *model.register(cache.register, cache, images, tenant, salt), ""
        except ExhaustedError as error:
            cache.mover.lost["too many namespaces"] += prompt_tokens // model.hello.block_tokens
            return *model.register(cache.unlisted, cache, images, tenant, salt), str(error)
