"""One namespace of the cache: find, read, fill and keep the KV blocks of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prefixd.client.errors import ExhaustedError, InvalidArgumentError, ServerError, UnsupportedError
from prefixd.client.memory import streaming
from prefixd.client.memory.buffers import BlockBuffers, Buffer
from prefixd.client.memory.leases import AsyncLease, AsyncReservation, Granted
from prefixd.client.memory.namespace import Answer, RegisteredNamespace
from prefixd.client.memory.slices import SLICE_SHARE, Slices
from prefixd.client.memory.streaming import Slice, Wanted
from prefixd.client.messages import TokenIds, as_count, message, token_bytes
from prefixd.client.spec import ClaimResult, LoadEstimate, MatchResult, NamespaceSpec, Prefill, Retention, StoreResult
from prefixd.v1 import cache_pb2

_PROMPTS, _PROMPTS_BYTES = 256, 4 << 20  # of a call to MatchMany


class AsyncCache:
    """A registered namespace. Made by `AsyncClient.register`.

    Every call takes the token ids of the prompt from its start: a sequence of int, or a numpy array, which is faster.
    Blocks are counted from the start of the prompt. Only full blocks exist, so a prompt without tokens has none. Every
    call raises `ServerUnavailable` if the daemon is away, and works again once it is back; `CallTimeout` if there is no
    answer within the client's `timeout_s`.
    """

    def __init__(self, namespace: RegisteredNamespace) -> None:
        self._namespace = namespace
        self._matches_many = True

    @property
    def spec(self) -> NamespaceSpec:
        """The namespace as it was registered."""
        return self._namespace.spec

    @property
    def namespace_id(self) -> bytes:
        """8 bytes; one namespace of one tenant has the same id in every daemon."""
        return self._namespace.namespace_id

    async def match(self, tokens: TokenIds, *, counted: bool = False, prefill: Prefill | None = None) -> MatchResult:
        """The longest cached prefix. It holds no block: all of them may be evicted a moment later.

        `counted`: this is the first lookup of the prompt, and counts the prompt in the daemon's hit rates as asked for;
        pass the result to `acquire` as `found`, which counts the leased blocks as found. `prefill`: the cost of
        computing, for the estimate in the answer.
        """
        return await self._match(token_bytes(tokens), counted=counted, prefill=prefill)

    async def match_many(
        self,
        prompts: Sequence[TokenIds],
        *,
        counted: bool | Sequence[bool] = False,
        prefill: Prefill | None = None,
    ) -> list[MatchResult]:
        """`match` of several prompts, in one call for up to 256 of them; returns their results in order.

        `counted`: as in `match`, for all prompts or for each. A daemon that is older than this call is asked about one
        prompt after the other.
        """
        tokens = [token_bytes(prompt) for prompt in prompts]
        flags = [counted] * len(tokens) if isinstance(counted, bool) else list(counted)
        if len(flags) != len(tokens):
            raise InvalidArgumentError(f"counted has {len(flags)} values for {len(tokens)} prompts; give one for each")
        results = [MatchResult(0, ()) for _ in tokens]
        for batch in _batches([len(each) for each in tokens]):
            asked = [(tokens[place], flags[place]) for place in batch]
            for place, result in zip(batch, await self._match_batch(asked, prefill), strict=True):
                results[place] = result
        return results

    async def claim(self, tokens: TokenIds, *, wait_s: float = 0.0, ttl_s: float | None = None) -> ClaimResult:
        """Says that this client computes the blocks of `tokens` that are not cached, so that others need not.

        If another session of the tenant has claimed the first of them, waits for it, `wait_s` at most: until the blocks
        that both prompts share are cached, or the claim ends without them and this client gets it. `match` again then:
        more may be cached. A claim is a hint. It lasts for `ttl_s` seconds (None: the daemon's default) and ends when
        its blocks are cached, or with `end_claim`. Raises `ExhaustedError` if there are too many: compute without one.

        ```
        claim = await cache.claim(tokens, wait_s=2.0)
        try:
            ...  # load what is cached, compute and store the rest
        finally:
            await cache.end_claim(claim)
        ```
        """
        request = message(cache_pb2.ClaimRequest, wait_s=wait_s, ttl_s=ttl_s or 0.0)
        answer = await self._namespace.ask(
            "Claim",
            request,
            token_bytes(tokens),
            nothing=cache_pb2.ClaimResponse,
            grant_id=lambda response: str(response.claim_id),
            needs_memory=False,
            more_s=max(0.0, wait_s),
        )
        return ClaimResult.from_proto(answer.response)

    async def end_claim(self, claim: ClaimResult, *, in_s: float = 0.0) -> bool:
        """Ends a claim; the first client that waits for its blocks gets the next one. Returns False if it had ended by
        itself, or there was none.

        `in_s`: end it so many seconds from now, since the blocks are computed and being stored.
        """
        return bool(claim.claim_id) and await self._namespace.end_claim(claim.claim_id, in_s)

    async def prefetch(self, tokens: TokenIds) -> int:
        """Makes the daemon bring the prefix to CPU memory before `acquire`; returns the number of blocks on their
        way."""
        request, nothing = cache_pb2.PrefetchRequest(), cache_pb2.PrefetchResponse
        answer = await self._namespace.ask("Prefetch", request, token_bytes(tokens), nothing=nothing)
        return int(answer.response.blocks)

    async def persist(self, tokens: TokenIds) -> int:
        """Waits until the cached prefix of `tokens` is on disk, also blocks of other clients; returns its length in
        blocks.

        Raises `PreconditionError` without a disk tier, `ExhaustedError` if the disk tier has no room.
        """
        return await self._namespace.persist(token_bytes(tokens))

    async def retain(self, tokens: TokenIds, retention: Sequence[Retention]) -> int:
        """Gives priorities to the blocks of the cached prefix of `tokens`; returns the number of blocks that then have
        another priority than 0.

        Of overlapping ranges the last one counts; blocks outside of all ranges stay as they are. An empty sequence
        removes the priorities of all blocks. Raises `ExhaustedError`, and changes nothing, beyond the tenant's quota.
        """
        return await self._namespace.retain(token_bytes(tokens), retention)

    async def acquire(
        self,
        tokens: TokenIds,
        *,
        first_block: int = 0,
        max_blocks: int = 0,
        ttl_s: float | None = None,
        parts: Sequence[int] | None = None,
        counted: bool = True,
        prefill: Prefill | None = None,
        prefix_blocks: int = 0,
        found: MatchResult | None = None,
    ) -> AsyncLease:
        """Leases the longest cached prefix from `first_block` on, at most `max_blocks` blocks (0: all of it).

        The daemon first reads blocks that are on disk. If no prefix is cached, the lease has 0 blocks. If the daemon's
        memory has no room for all blocks, the lease has as many of the first ones as fit (compare
        `AsyncLease.cached_blocks`): copy them, release the lease, and ask for the blocks behind them. With
        `prefix_blocks` the blocks are a slice of a prefix of this length, which is read with several leases; 0: the
        engine computes the tokens behind the leased blocks. `load` does all of that.

        The lease lives for `ttl_s` seconds (None: the daemon's default). `parts` are indexes into the namespace's parts
        (None: all). `counted`: this call counts in the daemon's hit rates, which count each prompt once. `found`: the
        `match` that has counted the prompt as asked for; the leased blocks then count as found. `prefill`: the cost of
        computing, for `AsyncLease.estimate`. Raises `MemoryUnavailable` for a client that streams: use `load`.
        """
        wanted = Wanted(
            as_count("first_block", first_block),
            as_count("max_blocks", max_blocks),
            as_count("prefix_blocks", prefix_blocks),
            found,
        )
        return await self._acquire(token_bytes(tokens), wanted, ttl_s, parts, counted, prefill)

    async def reserve(
        self,
        tokens: TokenIds,
        *,
        first_block: int = 0,
        ttl_s: float | None = None,
        parts: Sequence[int] | None = None,
    ) -> AsyncReservation:
        """Reserves slots for the blocks of `tokens` that are not cached, from the first missing one on.

        The caller has bytes from block `first_block` on. Earlier blocks may lack bytes that longer prefixes do not need
        (windows, chunks, states). If the reservation begins before `first_block`, the caller cannot fill it: other
        bytes of these blocks are missing too.

        `parts` are indexes into the namespace's parts (None: all). A block that is cached without these parts gets
        slots for them alone. So store the other parts of all blocks first, then the states of the few blocks that have
        one.

        If memory is short, there are fewer slots than blocks; `ExhaustedError` if there is none. The call waits while
        the daemon's queue to the disk is full. The reservation lives for `ttl_s` seconds (None: the daemon's default).
        Raises `MemoryUnavailable` for a client that streams: use `store`.
        """
        return await self._reserve(token_bytes(tokens), as_count("first_block", first_block), ttl_s, parts)

    async def load(
        self,
        tokens: TokenIds,
        into: Buffer,
        *,
        first_block: int = 0,
        max_blocks: int = 0,
        parts: Sequence[int] | None = None,
    ) -> int:
        """Copies the cached prefix from `first_block` on to `into`; returns the number of copied blocks.

        `into` is one buffer for whole blocks one after the other, or a list with one buffer per part. It must hold
        `max_blocks` blocks (0: every full block of `tokens` from `first_block` on). Parts that are not cached, or that
        the rule of their KV group does not need, are not written. A prefix that is longer than the daemon's memory is
        copied in slices; the call waits up to two seconds for memory that others hold. Raises `BufferSizeError`, and
        `LeaseLost` if the copied bytes may be wrong.
        """
        first_block, max_blocks = as_count("first_block", first_block), as_count("max_blocks", max_blocks)
        prompt = token_bytes(tokens)
        asked = max(0, self._namespace.full_blocks(prompt) - first_block)
        if max_blocks:
            asked = min(asked, max_blocks)
        buffers = BlockBuffers(into, self._namespace.part_bytes(parts), asked, writable=True)
        if not asked:
            return 0
        session = await self._namespace.ready()
        slice_blocks = max(1, session.arena_bytes // SLICE_SHARE // max(1, self._namespace.spec.block_bytes))
        slices = _CacheSlices(self, prompt, buffers, first_block, parts, slice_blocks, streamed=session.arena is None)
        return await slices.load(first_block, asked)

    async def store(
        self,
        tokens: TokenIds,
        source: Buffer,
        *,
        first_block: int = 0,
        parts: Sequence[int] | None = None,
        durable: bool = False,
        retention: Sequence[Retention] = (),
    ) -> StoreResult:
        """Stores the blocks of `tokens` from `first_block` on; skips those that are cached already.

        `source` has exactly these blocks, one after the other, or is a list with one buffer per part. With `durable`,
        returns when they and the prefix before them are on disk. `retention` gives priorities to the prompt's blocks as
        `retain` does. Both apply to blocks that were cached already, too. Priorities beyond the tenant's quota are left
        out (`StoreResult.retention_refused`). Raises `BufferSizeError`; `ExhaustedError` if there is room for no block;
        `PreconditionError` if the blocks before `first_block` are not cached (any more), or for `durable` if the daemon
        has no disk tier.
        """
        first_block = as_count("first_block", first_block)
        prompt = token_bytes(tokens)
        total = self._namespace.full_blocks(prompt)
        offered = max(0, total - first_block)
        buffers = BlockBuffers(source, self._namespace.part_bytes(parts), offered, writable=False)
        if not offered:
            return StoreResult(0, 0)
        prompt = prompt[: total * self.spec.block_tokens * 4]
        if (await self._namespace.ready()).arena is None:
            return await streaming.put(self._namespace, prompt, buffers, first_block, parts, durable, retention)
        return await self._store_shared(prompt, buffers, first_block, total, parts, durable, retention)

    async def _store_shared(
        self,
        prompt: bytes,
        buffers: BlockBuffers,
        first_block: int,
        total: int,
        parts: Sequence[int] | None,
        durable: bool,
        retention: Sequence[Retention],
    ) -> StoreResult:
        """Reserves, copies and commits until all blocks are stored or there is no more room."""
        committed = duplicates = 0
        done, refused = first_block, ""
        while done < total:
            try:
                reservation = await self._reserve(prompt, done, None, parts)
            except ExhaustedError:
                if done == first_block:
                    raise
                break
            async with reservation:
                if not reservation.blocks:
                    refused = refused or await self._namespace.try_to_retain(prompt, retention)
                    # Blocks that were evicted since the reservation are not on disk, and do not count as stored.
                    cached = await self._namespace.persist(prompt) if durable else total
                    duplicates += max(cached - done, 0)
                    done = max(cached, done)
                    break
                if reservation.first_block < first_block:
                    raise streaming.gap_error(reservation.first_block, first_block)
                if reservation.first_block < done:
                    # Blocks that were just committed are evicted already: there is no room for a prompt this long.
                    break
                duplicates += reservation.first_block - done
                await reservation.copy_in(buffers, reservation.first_block - first_block, renew=True)
                result = await reservation.commit(durable=durable, retention=() if refused else retention)
                refused = refused or result.retention_refused
                done = reservation.first_block + reservation.blocks
                committed += result.committed
                duplicates += result.duplicates
        return StoreResult(committed, duplicates, total - done, refused)

    async def _match(self, prompt: bytes, *, counted: bool, prefill: Prefill | None = None) -> MatchResult:
        request = cache_pb2.MatchRequest(
            counted=counted, asked=counted, prefill=None if prefill is None else prefill.to_proto()
        )
        answer = await self._namespace.ask("Match", request, prompt, nothing=cache_pb2.MatchResponse)
        return MatchResult.from_proto(answer.response)

    async def _match_batch(self, asked: list[tuple[bytes, bool]], prefill: Prefill | None) -> list[MatchResult]:
        if len(asked) > 1 and self._matches_many:
            request = cache_pb2.MatchManyRequest(
                prompts=[cache_pb2.PromptToMatch(token_ids=prompt, asked=counted) for prompt, counted in asked],
                prefill=None if prefill is None else prefill.to_proto(),
            )
            try:
                response = await self._namespace.match_many(request)
                return [MatchResult.from_proto(answer) for answer in response.answers]
            except UnsupportedError:
                self._matches_many = False
        return [await self._match(prompt, counted=counted, prefill=prefill) for prompt, counted in asked]

    async def _acquire(
        self,
        prompt: bytes,
        wanted: Wanted,
        ttl_s: float | None,
        parts: Sequence[int] | None,
        counted: bool = True,
        prefill: Prefill | None = None,
    ) -> AsyncLease:
        part_bytes = self._namespace.part_bytes(parts)
        request = message(
            cache_pb2.AcquireRequest,
            first_block=wanted.first_block,
            max_blocks=wanted.max_blocks,
            prefix_blocks=wanted.prefix_blocks,
            ttl_s=ttl_s or 0.0,
            parts=parts or (),
            uncounted=not counted or wanted.found is not None,
            hits=wanted.found is not None,
            found=None if wanted.found is None else wanted.found.to_found(),
            prefill=None if prefill is None else prefill.to_proto(),
        )
        answer = await self._namespace.ask(
            "Acquire",
            request,
            prompt,
            nothing=cache_pb2.AcquireResponse,
            grant_id=lambda response: str(response.lease_id),
        )
        response = answer.response
        granted = self._make_granted(answer, prompt, response.lease_id, part_bytes)
        return AsyncLease(granted, LoadEstimate.from_proto(response.estimate), int(response.cached_blocks))

    async def _reserve(
        self, prompt: bytes, first_block: int, ttl_s: float | None, parts: Sequence[int] | None
    ) -> AsyncReservation:
        part_bytes = self._namespace.part_bytes(parts)
        request = message(cache_pb2.ReserveRequest, first_block=first_block, ttl_s=ttl_s or 0.0, parts=parts or ())
        answer = await self._namespace.ask(
            "Reserve",
            request,
            prompt,
            nothing=cache_pb2.ReserveResponse,
            grant_id=lambda response: str(response.reservation_id),
        )
        return AsyncReservation(self._make_granted(answer, prompt, answer.response.reservation_id, part_bytes))

    def _make_granted(self, answer: Answer, prompt: bytes, hold_id: str, part_bytes: tuple[int, ...]) -> Granted:
        response = answer.response
        if len(response.offsets) != response.blocks * len(part_bytes):
            raise ServerError(
                f"the daemon gave {len(response.offsets)} offsets for {response.blocks} blocks of "
                f"{len(part_bytes)} parts"
            )
        return Granted(
            hold_id=hold_id,
            first_block=response.first_block,
            blocks=response.blocks,
            offsets=tuple(response.offsets),
            part_bytes=part_bytes,
            # Counted from a time before the request was sent, so it is never later than the daemon's own time.
            expires_s=answer.asked_at_s + response.ttl_s,
            session=answer.session,
            namespace=self._namespace,
            prompt=prompt,
        )


class _CacheSlices(Slices):
    """The slices of one `AsyncCache.load`.

    Args:
        cache: the namespace.
        prompt: token ids.
        buffers: get the blocks from `first_block` on.
        first_block: first block of the load.
        parts: as in `AsyncCache.load`.
        slice_blocks: most blocks of one slice.
        streamed: True: bytes come through gRPC; False: they are copied from the arena under leases.
    """

    def __init__(
        self,
        cache: AsyncCache,
        prompt: bytes,
        buffers: BlockBuffers,
        first_block: int,
        parts: Sequence[int] | None,
        slice_blocks: int,
        *,
        streamed: bool,
    ) -> None:
        has_rules = any(part.rule is not None for part in cache.spec.parts)
        super().__init__(slice_blocks, has_rules, cache._namespace.client.clock)
        self._cache = cache
        self._prompt = prompt
        self._buffers = buffers
        self._first_block = first_block
        self._parts = parts
        self._streamed = streamed

    async def match(self, end: int) -> MatchResult:
        spec = self._cache.spec
        return await self._cache._match(self._prompt[: end * spec.block_tokens * 4], counted=True)

    async def read(self, wanted: Wanted) -> Slice:
        first = wanted.first_block - self._first_block
        if self._streamed:
            return await streaming.get(self._cache._namespace, self._prompt, self._buffers, wanted, first, self._parts)
        async with await self._cache._acquire(self._prompt, wanted, None, self._parts) as lease:
            await lease.copy_out(self._buffers, first)
            return Slice(lease.blocks, lease.cached_blocks)


def _batches(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yields the numbers of prompts to be asked about in one call, given their sizes in bytes, but for empty ones."""
    batch: list[int] = []
    nbytes = 0
    for number, size in enumerate(sizes):
        if batch and (len(batch) == _PROMPTS or nbytes + size > _PROMPTS_BYTES):
            yield batch
            batch, nbytes = [], 0
        if size:
            batch.append(number)
            nbytes += size
    if batch:
        yield batch
