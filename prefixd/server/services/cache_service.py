"""`PrefixCache` over gRPC; the contract is in `proto/prefixd/v1/cache.proto`."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt

import prefixd
from prefixd.base.errors import (
    InvalidArgumentError,
    PreconditionError,
    SessionEndedError,
    TooSlowError,
    UnavailableError,
)
from prefixd.base.long_work.pacer import Pacer, give_way
from prefixd.base.tiers import Tier
from prefixd.cache import Namespace, Reservation, Session, TieredCache
from prefixd.cache.cache import MAX_BLOCKS
from prefixd.cache.index.trie import TIERS
from prefixd.cache.moving.beginnings import Reader
from prefixd.cache.sessions.leasing import NO_OFFSET, Asked, BlockTiers
from prefixd.cache.sessions.reservations import ToFill
from prefixd.observability.request_log import RequestLog
from prefixd.observability.request_record import Kind, RequestRecord, StageName
from prefixd.server.drain_state import Draining
from prefixd.server.kv_events import Watches
from prefixd.server.namespace_messages import namespace_spec
from prefixd.server.retention_messages import retention_requests
from prefixd.server.rpc.door import deliver, granting, unary
from prefixd.server.rpc.receiving import current_caller
from prefixd.server.rpc.status import Context, abort
from prefixd.server.services.call_records import CallRecords
from prefixd.server.services.load_estimates import LoadEstimates
from prefixd.server.services.match_answers import MatchAnswers
from prefixd.server.services.put_stream import Put, give_back
from prefixd.v1 import cache_pb2 as pb
from prefixd.v1 import cache_pb2_grpc

PIECE_BYTES = 1 << 20
_GRANTED_PARTS = 1 << 20
"""Most parts, hence offsets, in one answer: 10 MiB, of the 16 MiB that a message may have."""
_UNREAD_S = 30.0
"""Time in which a client must read a piece of an answer: 0.3 Mbit/s are enough."""
_TOLD_S = 1.0
"""Time in which a client must read that its session has ended."""
_OFFSETS_AT_ONCE = 1 << 13
_FOUND_RUNS = 4096
_AGREED = (("prefixd-agreed", "1"),)


class PrefixCacheService(cache_pb2_grpc.PrefixCacheServicer):
    """Finds, leases and stores blocks for engines.

    Args:
        cache: the cache.
        memory_socket: the socket from which local clients get the arena; None without a CPU tier.
        draining: set when the daemon takes no new work.
        records: gets a record of each call that reads or stores blocks.
    """

    def __init__(
        self,
        cache: TieredCache,
        memory_socket: Path | None,
        draining: Draining,
        records: RequestLog | None = None,
    ) -> None:
        self._cache = cache
        self._memory_socket = memory_socket
        self._draining = draining
        self._estimates = LoadEstimates(cache)
        self._records = CallRecords(cache, RequestLog(cache.clock) if records is None else records)
        self._answers = MatchAnswers(cache, self._estimates)
        self._watches = Watches(cache)
        self.closing = asyncio.Event()

    def close(self) -> None:
        """Ends all sessions, as the daemon ends."""
        self._cache.leases.ending = True
        self.closing.set()

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> AsyncIterator[pb.SessionEvent]:
        """Opens a session, which ends with the stream."""
        cache = self._cache
        try:
            if self._draining.is_set():
                raise UnavailableError("the daemon drains and opens no sessions; try again when it is back")
            session = cache.leases.open(
                request.client_name,
                request.pid,
                cache.clock(),
                current_caller().tenant,
                reopens=request.reopens_namespaces,
            )
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
            closing = asyncio.create_task(self.closing.wait())
            drains = True
            while not closing.done():
                change = self._draining.wait() if drains else self._draining.wait_over()
                waits = [asyncio.create_task(change), closing]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if closing.done():
                    break
                if drains:
                    yield pb.SessionEvent(draining=pb.SessionDraining())
                else:
                    yield pb.SessionEvent(undrained=pb.SessionUndrained())
                drains = not drains
        finally:
            for wait in waits:
                wait.cancel()
            cache.leases.close(session)
            self._watches.end(session)

    @unary
    async def RegisterNamespace(self, request: pb.RegisterNamespaceRequest) -> pb.RegisterNamespaceResponse:
        """Opens a namespace, which names everything that must be equal for KV to be reusable, to the session."""
        session = self._session(request.session_id)
        spec = namespace_spec(request.namespace, session.tenant.name, request.namespace.salt)
        namespace = await self._cache.open_namespace(session, spec)
        return pb.RegisterNamespaceResponse(namespace_id=namespace.id)

    @unary
    async def Match(self, request: pb.MatchRequest) -> pb.MatchResponse:
        """Finds the longest cached prefix."""
        return await self._answers.match(*self._opened(request.session_id, request.namespace_id), request)

    @unary
    async def MatchMany(self, request: pb.MatchManyRequest) -> pb.MatchManyResponse:
        """Finds the longest cached prefixes of several prompts."""
        return await self._answers.match_many(*self._opened(request.session_id, request.namespace_id), request)

    @granting(lambda self, request, response: self._take_back(request.session_id, response.claim_id))
    async def Claim(self, request: pb.ClaimRequest) -> pb.ClaimResponse:
        """Claims the blocks of a prompt that are not cached, or waits for whoever has claimed them."""
        return await self._answers.claim(*self._opened(request.session_id, request.namespace_id), request)

    @granting(lambda self, request, response: self._take_back(request.session_id, response.lease_id))
    async def Acquire(self, request: pb.AcquireRequest) -> pb.AcquireResponse:
        """Finds a cached prefix and leases its blocks for reading."""
        cache = self._cache
        session, namespace = self._opened(request.session_id, request.namespace_id)
        parts = namespace.check_parts(request.parts)
        trie, chain = cache.trie(namespace), cache.chain(namespace, request.token_ids)
        prefill = request.prefill if request.HasField("prefill") else None
        with (
            self._records.record(Kind.LOOKUP, "Acquire", session, namespace) as record,
            self._estimates.watch(trie, request.first_block, chain.tokens, prefill) as watch,
        ):
            lookup = self._records.lookup(record, namespace, chain)

            def matched(reader: Reader, tiers: BlockTiers) -> None:
                watch.begin(reader)
                lookup.matched(reader, tiers, loads=watch.loads)

            lease = await cache.acquire(session, namespace, chain, _asked(request, parts, request.ttl_s), matched)
            blocks = 0 if lease is None else len(lease.hold.rows)
            watch.complete = lease is not None and blocks == watch.blocks
            lookup.leased(lease)
        response = pb.AcquireResponse(
            first_block=request.first_block, estimate=watch.estimate, cached_blocks=watch.cached_blocks
        )
        if not request.max_blocks and not request.prefix_blocks:  # else the next block may be cached
            await self._answers.add_claim(response, session, namespace, chain, watch.cached_blocks)
        if lease is None:
            return response
        response.lease_id, response.blocks = lease.id, blocks
        await _add_offsets(response, blocks, len(parts), partial(cache.offsets, lease, parts))
        response.ttl_s = lease.expires_s - cache.clock()
        return response

    @granting(lambda self, request, response: self._take_back(request.session_id, response.reservation_id))
    async def Reserve(self, request: pb.ReserveRequest) -> pb.ReserveResponse:
        """Reserves slots for blocks that are not cached."""
        cache = self._cache
        self._take_work()
        session, namespace = self._opened(request.session_id, request.namespace_id)
        parts = namespace.check_parts(request.parts)
        chain = cache.chain(namespace, request.token_ids)
        if not session.processes:  # the daemon could not find out when it has stopped writing (`Quarantine`)
            raise PreconditionError(
                f"session {session.id[:8]} has not mapped the arena, where its slots would be; ask its memory_socket "
                "for the arena first, or send the bytes with Put"
            )
        with self._records.store("Reserve", session, namespace, StageName.RESERVE) as record:
            record.prompt_tokens = chain.tokens
            reservation = await cache.reserve(
                session,
                namespace,
                chain,
                ToFill(parts, request.first_block, _most_blocks(parts), request.ttl_s),
            )
            record.blocks = 0 if isinstance(reservation, int) else len(reservation.slots)
        if isinstance(reservation, int):
            return pb.ReserveResponse(first_block=reservation)
        slots = reservation.slots
        response = pb.ReserveResponse(
            reservation_id=reservation.id, first_block=reservation.first_block, blocks=len(slots)
        )
        await _add_offsets(response, len(slots), len(parts), slots.__getitem__)
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
        retention = retention_requests(request.retention) if request.retention else []
        with self._records.store("Commit", session, None, StageName.COMMIT, durable=request.durable) as record:
            blocks, durable = request.blocks, request.durable
            committed, duplicates = await cache.commit(grant, blocks, durable=durable, retention=retention)
            record.blocks = committed
        return pb.CommitResponse(committed=committed, duplicates=duplicates, retention_refused=grant.retention_refused)

    @unary
    async def Persist(self, request: pb.PersistRequest) -> pb.PersistResponse:
        """Waits until a cached prefix is on disk."""
        cache = self._cache
        _, namespace = self._opened(request.session_id, request.namespace_id)
        return pb.PersistResponse(blocks=await cache.persist(namespace, cache.chain(namespace, request.token_ids)))

    @unary
    async def Renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        """Sets the lifetime of leases and reservations."""
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
        """Brings a prefix to the CPU tier before it is acquired."""
        cache = self._cache
        session, namespace = self._opened(request.session_id, request.namespace_id)
        chain = cache.chain(namespace, request.token_ids)
        return pb.PrefetchResponse(blocks=await cache.prefetch(session, namespace, chain))

    @unary
    async def Retain(self, request: pb.RetainRequest) -> pb.RetainResponse:
        """Gives priorities to the blocks of a cached prefix."""
        cache = self._cache
        _, namespace = self._opened(request.session_id, request.namespace_id)
        retention = retention_requests(request.retention)
        chain = cache.chain(namespace, request.token_ids)
        return pb.RetainResponse(blocks=await cache.retain(namespace, chain, retention))

    async def Get(self, request: pb.GetRequest, context: Context) -> None:
        """Reads a cached prefix; the bytes are in the stream."""

        async def send(response: pb.GetResponse) -> None:
            try:
                async with asyncio.timeout(_UNREAD_S):
                    await context.write(response)
            except TimeoutError:
                raise TooSlowError(
                    f"the stream is given up: a piece of it was not read for {_UNREAD_S:g} s, while it leases blocks; "
                    "read faster, or ask for fewer blocks at a time"
                ) from None

        try:
            await self._get(request, send)
        except grpc.aio.InternalError:  # the caller has gone
            raise
        except Exception as error:
            await abort(context, error)  # the call counts until its caller reads on and gets the error

    async def _get(self, request: pb.GetRequest, send: Callable[[pb.GetResponse], Awaitable[None]]) -> None:
        session, namespace = self._opened(request.session_id, request.namespace_id)
        parts = namespace.check_parts(request.parts)
        with self._records.record(Kind.LOOKUP, "Get", session, namespace) as record:
            await self._send_prefix(request, session, namespace, parts, record, send)

    async def _send_prefix(
        self,
        request: pb.GetRequest,
        session: Session,
        namespace: Namespace,
        parts: Sequence[int],
        record: RequestRecord,
        send: Callable[[pb.GetResponse], Awaitable[None]],
    ) -> None:
        cache = self._cache
        asked, cached_blocks = _asked(request, parts, cache.leases.max_ttl_s), 0
        chain = cache.chain(namespace, request.token_ids)
        lookup = self._records.lookup(record, namespace, chain)

        def matched(reader: Reader, tiers: BlockTiers) -> None:
            nonlocal cached_blocks
            cached_blocks = len(reader.path)
            lookup.matched(reader, tiers)

        lease = await deliver(
            cache.acquire(session, namespace, chain, asked, matched),
            partial(give_back, cache),
        )
        lookup.leased(lease)
        header = pb.GetHeader(first_block=request.first_block, cached_blocks=cached_blocks)
        if lease is None:
            await send(pb.GetResponse(header=header))
            return
        pacer = Pacer()
        try:
            needed = [
                cache.offsets(lease, parts, blocks) != NO_OFFSET
                async for blocks in _in_turns(len(lease.rows), len(parts))
            ]
            sent = b"".join(some.astype(np.uint8).tobytes() for some in needed)
            record.begin(StageName.SEND, cache.clock(), blocks=len(lease.rows))
            if b"\0" not in sent:
                sent = b""
            header.blocks, header.sent = len(lease.rows), sent
            await send(pb.GetResponse(header=header))
            for row, of_block in zip(lease.rows, itertools.chain.from_iterable(needed), strict=True):
                await pacer.worked(1)
                for part in np.array(parts)[of_block].tolist():
                    nbytes = lease.trie.part_bytes[part]
                    for start in range(0, nbytes, PIECE_BYTES):
                        # While a piece was sent the session may have ended, and the slot with it.
                        cache.leases.find(session, lease.id)
                        slot = int(lease.trie.slots[row, cache.tiers.shared.level, part])
                        data = cache.tiers.arena.array(slot, nbytes)
                        await send(pb.GetResponse(data=data[start : start + PIECE_BYTES].tobytes()))
        finally:
            give_back(cache, lease)

    async def Put(self, requests: AsyncIterator[pb.PutRequest], context: Context) -> pb.PutResponse:
        """Stores blocks; the bytes are in the stream."""
        put = Put(self._cache, self._session, requests, self._records)
        try:
            try:
                self._take_work()
                await put.begin()
                with suppress(grpc.aio.InternalError):  # the caller has gone: reading the stream fails next
                    await context.send_initial_metadata(_AGREED)
                return await put.store()
            finally:
                put.give_back()
        except Exception as error:
            await abort(context, error)

    async def WatchBlocks(self, request: pb.WatchBlocksRequest, context: Context) -> None:
        """Reports the blocks that the tiers have of the session's namespaces, and their changes."""
        try:
            async with (
                self._watches.watch(self._session(request.session_id)) as watch,
                aclosing(watch.changes()) as changes,
            ):
                async for each in changes:
                    await context.write(each)
        except grpc.aio.InternalError:  # the caller has gone
            raise
        except SessionEndedError as error:
            try:
                async with asyncio.timeout(_TOLD_S):
                    await abort(context, error)
            except TimeoutError:  # the caller does not read: the call ends without an answer
                raise asyncio.CancelledError from None
        except Exception as error:
            await abort(context, error)

    def _session(self, session_id: str) -> Session:
        """Returns the open session with this id, if it belongs to the caller's tenant."""
        return self._cache.leases.session_of(current_caller().tenant, session_id)

    def _opened(self, session_id: str, namespace_id: bytes) -> tuple[Session, Namespace]:
        """Returns the caller's session and a namespace that is open to it, and marks the namespace as used now."""
        session = self._session(session_id)
        namespace = session.namespace(namespace_id)
        self._cache.namespaces.touch(namespace)
        return session, namespace

    def _take_back(self, session_id: str, grant_id: str) -> None:
        """Ends the grant of a caller that has gone, unless it has ended with its session."""
        session = self._cache.leases.sessions.get(session_id)
        if session is not None and grant_id in session.grants:
            self._cache.release(session, grant_id)

    def _take_work(self) -> None:
        if self._draining.is_set():
            raise UnavailableError("the daemon drains and takes no new blocks; try again when it is back")


def _most_blocks(parts: Sequence[int], asked: int = 0) -> int:
    """Returns the most blocks of these parts that one answer grants, of `asked` blocks (0: all)."""
    most = _GRANTED_PARTS // len(parts)
    return min(asked or most, most)


def _asked(request: pb.AcquireRequest | pb.GetRequest, parts: Sequence[int], ttl_s: float) -> Asked:
    return Asked(
        request.first_block,
        _most_blocks(parts, request.max_blocks),
        request.prefix_blocks,
        ttl_s,
        counted=not request.uncounted,
        found=_tiers_of(request.found) if request.hits else None,
    )


def _tiers_of(runs: Sequence[pb.TierRun]) -> npt.NDArray[np.int8]:
    """Returns [blocks]: the tier of each block of some runs, from the prompt's first block on."""
    if len(runs) > _FOUND_RUNS:
        raise InvalidArgumentError(f"found has {len(runs)} runs; send the first {_FOUND_RUNS} at the most")
    tiers, blocks = [run.tier - Tier.GPU.wire for run in runs], [run.blocks for run in runs]
    if (wrong := next((tier for tier in tiers if not 0 <= tier < TIERS), None)) is not None:
        raise InvalidArgumentError(f"found has a run in tier {wrong + Tier.GPU.wire}; send those that Match answered")
    if sum(blocks) > MAX_BLOCKS:
        raise InvalidArgumentError(f"found has {sum(blocks)} blocks; a prompt has {MAX_BLOCKS} at the most")
    return np.repeat(np.array(tiers, np.int8), np.array(blocks, np.int64))


async def _add_offsets(
    response: pb.AcquireResponse | pb.ReserveResponse,
    blocks: int,
    parts: int,
    offsets: Callable[[slice], npt.NDArray[np.int64] | npt.NDArray[np.uint64]],
) -> None:
    """Adds the offsets of all blocks, [n, parts], some thousand in one turn of the event loop."""
    async for some in _in_turns(blocks, parts):
        response.offsets.extend(offsets(some).ravel().tolist())


async def _in_turns(blocks: int, parts: int) -> AsyncIterator[slice]:
    """Yields slices of the blocks, of some thousand parts each; other tasks run between two of them."""
    step = max(1, _OFFSETS_AT_ONCE // parts)
    for start in range(0, blocks, step):
        if start:
            await give_way()
        yield slice(start, start + step)
