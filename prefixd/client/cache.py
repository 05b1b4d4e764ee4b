"""One namespace of the cache: find, read, fill and keep the KV blocks of prompts."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from prefixd.client.errors import ExhaustedError, InvalidArgumentError, ServerError
from prefixd.client.memory import streaming
from prefixd.client.memory.buffers import BlockBuffers, Buffer
from prefixd.client.memory.leases import AsyncLease, AsyncReservation, Granted
from prefixd.client.memory.namespace import Answer, RegisteredNamespace
from prefixd.client.memory.streaming import Slice, Wanted
from prefixd.client.messages import TokenIds, token_bytes
from prefixd.client.spec import LoadEstimate, MatchResult, NamespaceSpec, Prefill, Retention, StoreResult
from prefixd.v1 import cache_pb2

SLICE_SHARE = 4
"""A slice takes a quarter of the daemon's memory at the most, so that several loads go on at a time."""
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1
_LONGEST_WAIT_S = 2.0
"""For room that others hold; then what has come has to do."""


class AsyncCache:
    """A registered namespace. Made by `AsyncClient.register`.

    Every call takes the token ids of the prompt from its start: a sequence of int, or a numpy array, which is
    faster. Blocks are counted from the start of the prompt; only full ones exist, of a prompt without tokens none.
    Every call raises `ServerUnavailable` when the daemon is away, and works again once it is back; `CallTimeout` when
    there is no answer within the client's `timeout_s`.
    """

    def __init__(self, namespace: RegisteredNamespace) -> None:
        self._namespace = namespace

    @property
    def spec(self) -> NamespaceSpec:
        """What was registered."""
        return self._namespace.spec

    @property
    def namespace_id(self) -> bytes:
        """8 bytes, the same for the same namespace of the same tenant in every daemon."""
        return self._namespace.namespace_id

    async def match(self, tokens: TokenIds, *, counted: bool = False, prefill: Prefill | None = None) -> MatchResult:
        """The longest cached prefix. It takes nothing and promises nothing: all may be evicted a moment
        later.

        `counted`: this is the first lookup of the prompt, and counts it in the daemon's hit rates as asked for; pass
        the result to `acquire` as `found`, which counts what it leases as found. `prefill`: what computing takes, for
        the estimate in the answer.
        """
        return await self._match(token_bytes(tokens), counted=counted, prefill=prefill)

    async def prefetch(self, tokens: TokenIds) -> int:
        """Has the prefix brought up to CPU memory ahead of `acquire`; returns the blocks on their way."""
        request, nothing = cache_pb2.PrefetchRequest(), cache_pb2.PrefetchResponse
        answer = await self._namespace.ask("Prefetch", request, token_bytes(tokens), nothing=nothing)
        return int(answer.response.blocks)

    async def persist(self, tokens: TokenIds) -> int:
        """Returns when the cached prefix of `tokens` is on disk, whoever committed it: its length in blocks.

        Raises `PreconditionError` without a disk tier, `ExhaustedError` when the disk tier has no room.
        """
        return await self._namespace.persist(token_bytes(tokens))

    async def retain(self, tokens: TokenIds, retention: Sequence[Retention]) -> int:
        """Gives the blocks of the cached prefix of `tokens` priorities; returns how many have one other than 0 then.

        Where ranges overlap, the later one counts; blocks in none of them stay as they are. Without any range all
        blocks lose their priorities. Raises `ExhaustedError`, and changes nothing, beyond the tenant's quota.
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

        Blocks on disk are read first. A prefix that is not cached gives a lease of 0 blocks. Where the daemon's memory
        has no room for all, the lease has the longest beginning that fits (`AsyncLease.cached_blocks`): copy it,
        release it, and ask for what is behind it. With `prefix_blocks` the blocks are a slice of a prefix of this
        length, which is read with several leases; with 0 the prompt goes on behind the leased ones. `load` does all of
        that.

        The lease lives for `ttl_s` seconds (None: the daemon's default). `parts` are indexes into the namespace's parts
        (None: all). `counted`: it enters the daemon's hit rates, which count each prompt once; `found`: the `match`
        that has counted the prompt as asked for, so that what is leased here counts as found. Raises
        `MemoryUnavailable` for a client that streams: use `load`. `prefill`: what computing takes, for
        `AsyncLease.estimate`.
        """
        wanted = Wanted(first_block, max_blocks, prefix_blocks, found)
        return await self._acquire(token_bytes(tokens), wanted, ttl_s, parts, counted, prefill)

    async def reserve(
        self,
        tokens: TokenIds,
        *,
        first_block: int = 0,
        ttl_s: float | None = None,
        parts: Sequence[int] | None = None,
    ) -> AsyncReservation:
        """Slots for the blocks of `tokens` that are not cached, from the first missing one on.

        `first_block` says from where on the caller has bytes: of the blocks before it, bytes may be missing that longer
        prefixes do not need (windows, chunks, states). A reservation that begins before it cannot be filled: other
        bytes of these blocks are not cached either.

        `parts` are indexes into the namespace's parts (None: all). A block that is cached without them gets slots for
        them alone: so a state is given for the few blocks that have one, after the other parts of all blocks.

        There may be fewer slots than blocks when room is short; `ExhaustedError` when there is room for none. Waits
        while the daemon has as much to write to disk as it may. The reservation lives for `ttl_s` seconds (None: the
        daemon's default). Raises `MemoryUnavailable` for a client that streams: use `store`.
        """
        _check_range(first_block)
        return await self._reserve(token_bytes(tokens), first_block, ttl_s, parts)

    async def load(
        self,
        tokens: TokenIds,
        into: Buffer,
        *,
        first_block: int = 0,
        max_blocks: int = 0,
        parts: Sequence[int] | None = None,
    ) -> int:
        """Copies the cached prefix from `first_block` on to `into` and returns how many blocks that was.

        `into` takes whole blocks one after the other, or is a list with one buffer per part. It must hold
        `max_blocks` blocks (0: every full block of `tokens` from `first_block` on); what is not cached, or not needed
        by the rule of its KV group, is left as it was. A prefix longer than the daemon's memory comes in slices. What
        others hold of that memory is waited for, two seconds at the most. Raises `BufferSizeError`, and `LeaseLost`
        when the bytes copied are not to be trusted.
        """
        _check_range(first_block, max_blocks)
        prompt = token_bytes(tokens)
        asked = max(0, self._namespace.full_blocks(prompt) - first_block)
        if max_blocks:
            asked = min(asked, max_blocks)
        buffers = BlockBuffers(into, self._namespace.part_bytes(parts), asked, writable=True)
        if not asked:
            return 0
        session = await self._namespace.ready()
        slice_blocks = max(1, session.arena_bytes // SLICE_SHARE // max(1, self._namespace.spec.block_bytes))
        kind = _StreamedSlices if session.arena is None else _LeasedSlices
        return await kind(self, prompt, buffers, first_block, parts, slice_blocks).load(first_block, asked)

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
        """Gives the cache the blocks of `tokens` from `first_block` on; those it has already are skipped.

        `source` has exactly these blocks, one after the other, or is a list with one buffer per part. With
        `durable`, returns when they and the prefix before them are on disk, those that were cached already too.
        `retention` gives blocks priorities, those that were cached already too: see `retain`.
        Priorities beyond the tenant's quota are left out (`StoreResult.retention_refused`).
        Raises `BufferSizeError`; `ExhaustedError` when there is room for none; `PreconditionError` when the blocks
        before `first_block` are not cached (any more), or when `durable` meets a daemon without a disk tier.
        """
        _check_range(first_block)
        prompt = token_bytes(tokens)
        total = self._namespace.full_blocks(prompt)
        offered = max(0, total - first_block)
        buffers = BlockBuffers(source, self._namespace.part_bytes(parts), offered, writable=False)
        if not offered:
            return StoreResult(0, 0)
        prompt = prompt[: total * self.spec.block_tokens * 4]
        if (await self._namespace.ready()).arena is None:
            return await streaming.put(self._namespace, prompt, buffers, first_block, parts, durable, retention)
        return await self._fill(prompt, buffers, first_block, total, parts, durable, retention)

    async def _fill(
        self,
        prompt: bytes,
        buffers: BlockBuffers,
        first_block: int,
        total: int,
        parts: Sequence[int] | None,
        durable: bool,
        retention: Sequence[Retention],
    ) -> StoreResult:
        """Reserve, copy, commit, until all is stored or there is no more room."""
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
                    # What was evicted between the two questions is not there, and not said to be.
                    there = await self._namespace.persist(prompt) if durable else total
                    duplicates += max(there - done, 0)
                    done = max(there, done)
                    break
                if reservation.first_block < first_block:
                    raise streaming.gap_error(reservation.first_block, first_block)
                if reservation.first_block < done:
                    # What was just committed is evicted again: there is no room for a prompt of this length.
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

    async def _acquire(
        self,
        prompt: bytes,
        wanted: Wanted,
        ttl_s: float | None,
        parts: Sequence[int] | None,
        counted: bool = True,
        prefill: Prefill | None = None,
    ) -> AsyncLease:
        _check_range(wanted.first_block, wanted.max_blocks, wanted.prefix_blocks)
        part_bytes = self._namespace.part_bytes(parts)
        request = cache_pb2.AcquireRequest(
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
        granted, response = self._granted(answer, prompt, answer.response.lease_id, part_bytes), answer.response
        return AsyncLease(granted, LoadEstimate.from_proto(response.estimate), int(response.cached_blocks))

    async def _reserve(
        self, prompt: bytes, first_block: int, ttl_s: float | None, parts: Sequence[int] | None
    ) -> AsyncReservation:
        part_bytes = self._namespace.part_bytes(parts)
        request = cache_pb2.ReserveRequest(first_block=first_block, ttl_s=ttl_s or 0.0, parts=parts or ())
        answer = await self._namespace.ask(
            "Reserve",
            request,
            prompt,
            nothing=cache_pb2.ReserveResponse,
            grant_id=lambda response: str(response.reservation_id),
        )
        return AsyncReservation(self._granted(answer, prompt, answer.response.reservation_id, part_bytes))

    def _granted(self, answer: Answer, prompt: bytes, hold_id: str, part_bytes: tuple[int, ...]) -> Granted:
        response, client = answer.response, self._namespace.client
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
            # Counted from before the request left, so it is never later than the daemon's own.
            expires_s=answer.asked_at_s + response.ttl_s,
            session=answer.session,
            client=client,
            connection=answer.session.connection,
            persist=lambda: self._namespace.persist(prompt),
            retain=lambda retention: self._namespace.try_to_retain(prompt, retention),
            asked_blocks=self._namespace.full_blocks(prompt),
        )


class Slices(ABC):
    """One prompt's blocks, read slice by slice: no prompt is too long for the daemon's memory.

        Match -> Acquire -> copy -> Release -> Acquire -> copy -> Release ...

    Nothing is held while room for the next slice is waited for, so any number of long loads get on beside each other.

    Args:
        slice_blocks: of one slice, at the most.
        has_rules: some blocks' bytes are needed by prefixes of some lengths only.
        clock: seconds, monotonic.
    """

    def __init__(self, slice_blocks: int, has_rules: bool, clock: Callable[[], float]) -> None:
        self._slice_blocks = slice_blocks
        self._has_rules = has_rules
        self._clock = clock

    @abstractmethod
    async def match(self, end: int) -> MatchResult:
        """Asks what is cached of the first `end` blocks; counts them as asked for."""

    @abstractmethod
    async def read(self, wanted: Wanted) -> Slice:
        """Reads some blocks to where they belong."""

    async def load(self, first_block: int, asked: int) -> int:
        """Reads up to `asked` blocks from `first_block` on; returns how many were read.

        Raises what `match` and `read` raise; ExhaustedError if nothing may be read.
        """
        if asked <= self._slice_blocks:
            whole = await self.read(Wanted(first_block, asked))
            if first_block + whole.blocks >= whole.cached_blocks:
                return whole.blocks
            found, end = MatchResult(whole.cached_blocks, ()), whole.cached_blocks
            done = first_block if self._has_rules else first_block + whole.blocks
        else:
            found = await self.match(first_block + asked)
            done, end = first_block, found.blocks
        read = await self._load_slices(found, done, end, first_block)
        if read is None:  # bytes of a longer prefix are of no use for a shorter one
            read = first_block + (await self.read(Wanted(first_block, asked, found=found))).blocks
        return max(read - first_block, 0)

    async def _load_slices(self, found: MatchResult, done: int, end: int, first_block: int) -> int | None:
        """Reads the blocks from `done` to `end`; returns up to which block they came; None if those are of no use."""
        pause_s, waiting_since_s = _FIRST_PAUSE_S, self._clock()
        while done < end:
            late = self._clock() - waiting_since_s > _LONGEST_WAIT_S
            try:
                some = await self.read(Wanted(done, min(self._slice_blocks, end - done), end, found))
            except ExhaustedError:
                if late and done == first_block:
                    raise
                some = Slice(0, end)
            done += some.blocks
            if some.blocks and not some.cached_blocks:
                return None
            if some.cached_blocks < end:  # some were evicted
                end = some.cached_blocks
                if self._has_rules:
                    done = first_block
            elif some.blocks:
                pause_s, waiting_since_s = _FIRST_PAUSE_S, self._clock()
            elif late:
                return None if self._has_rules else done
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return done


class _CacheSlices(Slices):
    """A load's slices.

    Args:
        cache: the namespace.
        prompt: token ids.
        buffers: take the blocks from `first_block` on.
        first_block: of the load.
        parts: see `AsyncCache.load`.
        slice_blocks: of one slice.
    """

    def __init__(
        self,
        cache: AsyncCache,
        prompt: bytes,
        buffers: BlockBuffers,
        first_block: int,
        parts: Sequence[int] | None,
        slice_blocks: int,
    ) -> None:
        has_rules = any(part.rule is not None for part in cache.spec.parts)
        super().__init__(slice_blocks, has_rules, cache._namespace.client.clock)
        self._cache = cache
        self._prompt = prompt
        self._buffers = buffers
        self._first_block = first_block
        self._parts = parts

    async def match(self, end: int) -> MatchResult:
        """Counts the prompt as asked for."""
        spec = self._cache.spec
        return await self._cache._match(self._prompt[: end * spec.block_tokens * 4], counted=True)


class _LeasedSlices(_CacheSlices):
    """Slices that are copied out of the arena."""

    async def read(self, wanted: Wanted) -> Slice:
        """Leases, copies, releases."""
        async with await self._cache._acquire(self._prompt, wanted, None, self._parts) as lease:
            await lease.copy_out(self._buffers, wanted.first_block - self._first_block)
            return Slice(lease.blocks, lease.cached_blocks)


class _StreamedSlices(_CacheSlices):
    """Slices whose bytes come through gRPC."""

    async def read(self, wanted: Wanted) -> Slice:
        """Asks for a stream and reads it."""
        first = wanted.first_block - self._first_block
        return await streaming.get(self._cache._namespace, self._prompt, self._buffers, wanted, first, self._parts)


def _check_range(first_block: int, max_blocks: int = 0, prefix_blocks: int = 0) -> None:
    if first_block < 0 or max_blocks < 0 or prefix_blocks < 0:
        raise InvalidArgumentError(
            f"first_block={first_block}, max_blocks={max_blocks} and prefix_blocks={prefix_blocks} must not be negative"
        )
