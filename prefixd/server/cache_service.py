"""`PrefixCache` over gRPC; the contract is in `proto/prefixd/v1/cache.proto`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt

import prefixd
from prefixd.cache import Lease, NamespaceSpec, PartSpec, Reservation, Session, TieredCache, Trie
from prefixd.cache.cache import NO_OFFSET
from prefixd.cache.index.trie import Rows
from prefixd.errors import ExhaustedError, InvalidArgumentError, PreconditionError, SessionEndedError, UnavailableError
from prefixd.pacer import Pacer, give_way
from prefixd.server.caller import current_caller
from prefixd.server.load_estimates import LoadEstimates
from prefixd.server.retention_messages import retention_wishes
from prefixd.server.rpc import Context, abort, deliver, granting, outlive, streaming, unary
from prefixd.server.rule_messages import rule_spec
from prefixd.v1 import cache_pb2 as pb
from prefixd.v1 import cache_pb2_grpc

PIECE_BYTES = 1 << 20
_OFFSETS_AT_ONCE = 1 << 13
_AGREED = (("prefixd-agreed", "1"),)


class PrefixCacheService(cache_pb2_grpc.PrefixCacheServicer):
    """Matching, leasing and filling for engines.

    Args:
        cache: the cache.
        memory_socket: where local clients get the arena; None without a CPU tier.
        draining: set when the daemon takes no new work.
    """

    def __init__(self, cache: TieredCache, memory_socket: Path | None, draining: asyncio.Event) -> None:
        self._cache = cache
        self._memory_socket = memory_socket
        self._draining = draining
        self._estimates = LoadEstimates(cache)
        self.closing = asyncio.Event()

    def close(self) -> None:
        """Ends all sessions: the daemon ends."""
        self._cache.leases.ending = True
        self.closing.set()

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> AsyncIterator[pb.SessionEvent]:
        """Keeps a session for as long as the stream lives."""
        cache = self._cache
        try:
            if self._draining.is_set():
                raise UnavailableError("the daemon drains and opens no sessions; try again when it is back")
            session = cache.leases.open(request.client_name, request.pid, cache.clock(), current_caller().tenant)
        except Exception as error:
            await abort(context, error)
        waits: list[asyncio.Task[bool]] = []
        try:
            local = context.peer().startswith("unix:") and self._memory_socket is not None
            yield pb.SessionEvent(
                opened=pb.SessionOpened(
                    session_id=session.id,
                    memory_socket=os.fspath(self._memory_socket) if local and self._memory_socket else "",
                    arena_bytes=cache.tiers.shared.capacity_bytes,
                    default_ttl_s=cache.leases.default_ttl_s,
                    max_ttl_s=cache.leases.max_ttl_s,
                    server_version=prefixd.__version__,
                    tenant=session.tenant.name,
                )
            )
            draining, closing = (asyncio.create_task(event.wait()) for event in (self._draining, self.closing))
            waits = [draining, closing]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not closing.done():
                yield pb.SessionEvent(draining=pb.SessionDraining())
                await closing
        finally:
            for wait in waits:
                wait.cancel()
            cache.leases.close(session)

    @unary
    async def RegisterNamespace(self, request: pb.RegisterNamespaceRequest) -> pb.RegisterNamespaceResponse:
        """Names what must be equal for KV to be reusable, and opens it to the session."""
        session = self._session(request.session_id)
        wanted = request.namespace
        spec = NamespaceSpec(
            name=wanted.name,
            block_tokens=wanted.block_tokens,
            parts=tuple(PartSpec(part.group, part.rank, part.nbytes, rule_spec(part)) for part in wanted.parts),
            salt=wanted.salt,
            dtype=wanted.dtype,
            layout=wanted.layout,
            tenant=session.tenant.name,
        )
        namespace = self._cache.register(spec)
        session.namespaces[namespace.id] = namespace
        return pb.RegisterNamespaceResponse(namespace_id=namespace.id)

    @unary
    async def Match(self, request: pb.MatchRequest) -> pb.MatchResponse:
        """The longest cached prefix."""
        cache = self._cache
        namespace = self._session(request.session_id).namespace(request.namespace_id)
        chain = cache.chain(namespace, request.token_ids)
        match = await cache.match(namespace, chain)
        if request.counted:
            cache.count_lookup(cache.trie(namespace), len(chain), match.rows)
        trie, prefill = cache.trie(namespace), request.prefill if request.HasField("prefill") else None
        estimate = self._estimates.estimate(trie, match.rows, 0, chain.tokens, prefill)
        return pb.MatchResponse(blocks=len(match), runs=await tier_runs(trie, match.rows), estimate=estimate)

    @granting(lambda self, request, response: self._take_back(request.session_id, response.lease_id))
    async def Acquire(self, request: pb.AcquireRequest) -> pb.AcquireResponse:
        """Match and lease for reading."""
        cache = self._cache
        session = self._session(request.session_id)
        namespace = session.namespace(request.namespace_id)
        parts = cache.check_parts(namespace, request.parts)
        chain, prefill = (
            cache.chain(namespace, request.token_ids),
            request.prefill if request.HasField("prefill") else None,
        )
        watch = self._estimates.watch(cache.trie(namespace), request.first_block, chain.tokens, prefill)
        with watch:
            lease = await cache.acquire(
                session,
                namespace,
                chain,
                first_block=request.first_block,
                max_blocks=request.max_blocks,
                ttl_s=request.ttl_s,
                counted=not request.uncounted,
                matched=watch.begin,
            )
            watch.complete = lease is not None and len(lease.rows) == watch.blocks
        if lease is None:
            return pb.AcquireResponse(first_block=request.first_block, estimate=watch.estimate)
        blocks = len(lease.rows)
        response = pb.AcquireResponse(
            lease_id=lease.id, first_block=request.first_block, blocks=blocks, estimate=watch.estimate
        )
        await _add_offsets(response, blocks, len(parts), partial(cache.offsets, lease, parts))
        response.ttl_s = lease.expires_s - cache.clock()
        return response

    @granting(lambda self, request, response: self._take_back(request.session_id, response.reservation_id))
    async def Reserve(self, request: pb.ReserveRequest) -> pb.ReserveResponse:
        """Slots to fill."""
        cache = self._cache
        self._take_work()
        session = self._session(request.session_id)
        namespace = session.namespace(request.namespace_id)
        reservation = await cache.reserve(
            session,
            namespace,
            cache.chain(namespace, request.token_ids),
            parts=request.parts,
            first_block=request.first_block,
            ttl_s=request.ttl_s,
        )
        if isinstance(reservation, int):
            return pb.ReserveResponse(first_block=reservation)
        slots = reservation.slots
        response = pb.ReserveResponse(
            reservation_id=reservation.id, first_block=reservation.first_block, blocks=len(slots)
        )
        blocks, parts = slots.shape
        await _add_offsets(response, blocks, parts, slots.__getitem__)
        response.ttl_s = reservation.expires_s - cache.clock()
        return response

    @unary
    async def Commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        """Makes filled blocks matchable."""
        cache = self._cache
        session = self._session(request.session_id)
        grant = cache.leases.find(session, request.reservation_id)
        if not isinstance(grant, Reservation):
            raise InvalidArgumentError(f"{request.reservation_id} is a lease for reading; commit a reservation")
        retention = retention_wishes(request.retention)
        committed, duplicates = await cache.commit(grant, request.blocks, durable=request.durable, retention=retention)
        return pb.CommitResponse(committed=committed, duplicates=duplicates)

    @unary
    async def Persist(self, request: pb.PersistRequest) -> pb.PersistResponse:
        """Waits until a cached prefix is on disk."""
        cache = self._cache
        namespace = self._session(request.session_id).namespace(request.namespace_id)
        return pb.PersistResponse(blocks=await cache.persist(namespace, cache.chain(namespace, request.token_ids)))

    @unary
    async def Renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        """Gives leases and reservations a new lifetime."""
        leases = self._cache.leases
        ttl_s = leases.ttl(request.ttl_s)
        leases.renew(self._session(request.session_id), request.lease_ids, ttl_s, self._cache.clock())
        return pb.RenewResponse(ttl_s=ttl_s)

    @unary
    async def Release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        """Ends a lease or a reservation."""
        self._cache.release(self._session(request.session_id), request.lease_id)
        return pb.ReleaseResponse()

    @unary
    async def Prefetch(self, request: pb.PrefetchRequest) -> pb.PrefetchResponse:
        """Brings a prefix up before it is asked for."""
        cache = self._cache
        session = self._session(request.session_id)
        namespace = session.namespace(request.namespace_id)
        chain = cache.chain(namespace, request.token_ids)
        return pb.PrefetchResponse(blocks=await cache.prefetch(session, namespace, chain))

    @unary
    async def Retain(self, request: pb.RetainRequest) -> pb.RetainResponse:
        """Says how long the blocks of a cached prefix should stay."""
        cache = self._cache
        namespace = self._session(request.session_id).namespace(request.namespace_id)
        retention = retention_wishes(request.retention)
        chain = cache.chain(namespace, request.token_ids)
        return pb.RetainResponse(blocks=await cache.retain(namespace, chain, retention))

    @streaming
    async def Get(self, request: pb.GetRequest) -> AsyncGenerator[pb.GetResponse, None]:
        """Reads with the bytes in the stream."""
        cache = self._cache
        session = self._session(request.session_id)
        namespace = session.namespace(request.namespace_id)
        parts = cache.check_parts(namespace, request.parts)
        lease = await deliver(
            cache.acquire(
                session,
                namespace,
                cache.chain(namespace, request.token_ids),
                first_block=request.first_block,
                max_blocks=request.max_blocks,
                ttl_s=cache.leases.max_ttl_s,
                counted=not request.uncounted,
            ),
            self._give_back,
        )
        if lease is None:
            yield pb.GetResponse(header=pb.GetHeader(first_block=request.first_block))
            return
        try:
            needed = cache.offsets(lease, parts) != NO_OFFSET
            sent = b"" if needed.all() else needed.astype(np.uint8).tobytes()
            yield pb.GetResponse(
                header=pb.GetHeader(first_block=request.first_block, blocks=len(lease.rows), sent=sent)
            )
            for row, of_block in zip(lease.rows.tolist(), needed, strict=True):
                for part in np.array(parts)[of_block].tolist():
                    nbytes = lease.trie.part_bytes[part]
                    for start in range(0, nbytes, PIECE_BYTES):
                        # While a piece was sent the session may have ended, and the slot with it.
                        cache.leases.find(session, lease.id)
                        slot = int(lease.trie.slots[row, cache.tiers.shared.level, part])
                        data = cache.tiers.arena.array(slot, nbytes)
                        yield pb.GetResponse(data=data[start : start + PIECE_BYTES].tobytes())
        finally:
            self._give_back(lease)

    async def Put(self, requests: AsyncIterator[pb.PutRequest], context: Context) -> pb.PutResponse:
        """Writes with the bytes in the stream."""
        try:
            return await self._put(requests, context)
        except Exception as error:
            await abort(context, error)

    async def _put(self, requests: AsyncIterator[pb.PutRequest], context: Context) -> pb.PutResponse:
        cache = self._cache
        self._take_work()
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("content") != "header":
            raise InvalidArgumentError("the first message of Put has no header; send the header, then the data")
        header = first.header
        if header.durable and cache.tiers.durable is None:
            raise PreconditionError("durable Put without a disk tier; set disk.bytes or send without durable")
        session = self._session(header.session_id)
        namespace = session.namespace(header.namespace_id)
        retention = retention_wishes(header.retention)
        parts = cache.check_parts(namespace, header.parts)
        chain = cache.chain(namespace, header.token_ids)
        reservation = await deliver(
            cache.reserve(
                session,
                namespace,
                chain,
                parts=parts,
                first_block=header.first_block,
                ttl_s=cache.leases.max_ttl_s,
                by_daemon=True,
            ),
            self._give_back,
        )
        known = reservation if isinstance(reservation, int) else reservation.first_block
        if known < header.first_block:
            self._give_back(reservation)
            raise PreconditionError(
                f"the stream begins at block {header.first_block}, but only {known} blocks before it are cached; "
                f"begin at block {known} or earlier"
            )
        sizes = [cache.trie(namespace).part_bytes[part] for part in parts]
        expected = (len(chain) - header.first_block) * sum(sizes)
        try:
            with suppress(grpc.aio.InternalError):  # the caller has gone; the stream will say so
                await context.send_initial_metadata(_AGREED)
            received = await self._receive(requests, reservation, (known - header.first_block) * sum(sizes), sizes)
            if received != expected:
                raise InvalidArgumentError(
                    f"the stream had {received} bytes, but {len(chain) - header.first_block} blocks of {sum(sizes)} "
                    f"bytes are {expected}; send whole blocks"
                )
        except BaseException:
            self._give_back(reservation)
            raise
        skipped = known - header.first_block
        if isinstance(reservation, int):
            if retention:
                await cache.retain(namespace, chain, retention)
            if header.durable:  # of what has been evicted since, nothing is said
                skipped = max(await cache.persist(namespace, chain) - header.first_block, 0)
            return pb.PutResponse(duplicates=skipped)
        commit = cache.commit(reservation, len(reservation.slots), durable=header.durable, retention=retention)
        try:
            committed, duplicates = await asyncio.shield(outlive(commit))
        except ExhaustedError:  # if it is the wish that was refused, nothing was committed
            self._give_back(reservation)
            raise
        return pb.PutResponse(committed=committed, duplicates=duplicates + skipped)

    async def _receive(
        self, requests: AsyncIterator[pb.PutRequest], reservation: Reservation | int, skip: int, sizes: list[int]
    ) -> int:
        """Copies the stream into the reservation's slots, but for its first `skip` bytes; returns bytes received."""
        slots = reservation.slots.ravel() if isinstance(reservation, Reservation) else np.empty(0, np.int64)
        received = index = filled = 0
        async for message in requests:
            if message.WhichOneof("content") != "data":
                raise InvalidArgumentError("a message of Put after the first has no data; send one header only")
            data = np.frombuffer(message.data, np.uint8)
            received += len(data)
            if isinstance(reservation, Reservation):  # if it ended while we waited, its slots are another's
                self._cache.leases.find(reservation.session, reservation.id)
            left = min(skip, len(data))
            skip -= left
            data = data[left:]
            while len(data) and index < len(slots):
                offset, size = int(slots[index]), sizes[index % len(sizes)]
                count = min(len(data), size - filled)
                self._cache.tiers.arena.array(offset, size)[filled : filled + count] = data[:count]
                data = data[count:]
                filled += count
                if filled == size:
                    index, filled = index + 1, 0
        return received

    def _session(self, session_id: str) -> Session:
        """The caller's open session with this id; another tenant's is none."""
        session = self._cache.leases.session(session_id)
        if session.tenant is not current_caller().tenant:
            raise SessionEndedError(
                f"session {session_id[:8]} is not open for tenant {current_caller().tenant.name}; open one with "
                "OpenSession"
            )
        return session

    def _take_back(self, session_id: str, grant_id: str) -> None:
        """Ends what a caller was granted that has gone, unless its session has ended it."""
        session = self._cache.leases.sessions.get(session_id)
        if session is not None and grant_id in session.grants:
            self._cache.release(session, grant_id)

    def _give_back(self, grant: Lease | Reservation | int | None) -> None:
        if isinstance(grant, Lease | Reservation):
            self._take_back(grant.session.id, grant.id)

    def _take_work(self) -> None:
        if self._draining.is_set():
            raise UnavailableError("the daemon drains and takes no new blocks; try again when it is back")


async def _add_offsets(
    response: pb.AcquireResponse | pb.ReserveResponse,
    blocks: int,
    parts: int,
    offsets: Callable[[slice], npt.NDArray[np.int64] | npt.NDArray[np.uint64]],
) -> None:
    """Adds the offsets of some blocks, [n, parts], after the other: some thousand in one turn."""
    step = max(1, _OFFSETS_AT_ONCE // parts)
    for start in range(0, blocks, step):
        if start:
            await give_way()
        response.offsets.extend(offsets(slice(start, start + step)).ravel().tolist())


async def tier_runs(trie: Trie, path: Rows) -> list[pb.TierRun]:
    """The tiers from which the blocks of a usable prefix come, run-length encoded, as of the call."""
    tiers = trie.distances(path)
    starts = np.flatnonzero(np.diff(tiers, prepend=-1))
    lengths = np.diff(starts, append=len(tiers))
    runs, pacer = [], Pacer()
    for tier, blocks in zip(tiers[starts].tolist(), lengths.tolist(), strict=True):
        runs.append(pb.TierRun(tier=pb.Tier.Name(tier + 1), blocks=blocks))
        await pacer.worked(1)
    return runs
