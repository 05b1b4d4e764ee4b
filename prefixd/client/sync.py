"""The client without async: the same calls, each blocking its thread until the answer is there.

One implementation drives both: a call here runs the asynchronous one in the client's own thread. Usable from
several threads at once; a lease or reservation belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from os import PathLike
from types import TracebackType
from typing import Generic, Self, TypeVar

from prefixd.base.sampling import Sampling
from prefixd.client.cache import AsyncCache
from prefixd.client.client import AsyncClient
from prefixd.client.connecting.arena import Arena
from prefixd.client.connecting.portal import Portal
from prefixd.client.connecting.session import MemoryMode
from prefixd.client.errors import ClientClosed, ClientError
from prefixd.client.estimates import LoadEstimate, Prefill
from prefixd.client.inference import GenerateEvent
from prefixd.client.memory.buffers import Buffer
from prefixd.client.memory.leases import AsyncLease, AsyncReservation
from prefixd.client.spec import MatchResult, NamespaceSpec, Retention, StoreResult, Tier
from prefixd.client.tokens import TokenIds
from prefixd.v1 import admin_pb2, cache_pb2

T = TypeVar("T")
HoldT = TypeVar("HoldT", bound=AsyncLease | AsyncReservation)


class _Hold(Generic[HoldT]):
    """What a lease and a reservation share. `with` it, or call `release`."""

    def __init__(self, portal: Portal, hold: HoldT) -> None:
        self._portal = portal
        self._hold = hold
        self.first_block, self.blocks, self.offsets = hold.first_block, hold.blocks, hold.offsets

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.release()
        else:
            with suppress(ClientError):
                self.release()

    @property
    def remaining_s(self) -> float:
        """See `AsyncLease.remaining_s`."""
        return self._hold.remaining_s

    def renew(self, ttl_s: float | None = None) -> None:
        """See `AsyncLease.renew`."""
        self._portal.run(self._hold.renew(ttl_s))

    def offset(self, block: int, part: int = 0) -> int:
        """See `AsyncLease.offset`."""
        return self._hold.offset(block, part)

    def has(self, block: int, part: int = 0) -> bool:
        """See `AsyncLease.has`."""
        return self._hold.has(block, part)

    def view(self, block: int, part: int = 0) -> memoryview:
        """See `AsyncLease.view` and `AsyncReservation.view`."""
        return self._hold.view(block, part)

    def release(self) -> None:
        """See `AsyncLease.release` and `AsyncReservation.release`."""
        self._portal.run(self._hold.release())


class Lease(_Hold[AsyncLease]):
    """See `AsyncLease`."""

    @property
    def estimate(self) -> LoadEstimate:
        """What the daemon expected of loading the blocks."""
        return self._hold.estimate

    @property
    def cached_blocks(self) -> int:
        """How much of the prompt is cached, whether it had room or not."""
        return self._hold.cached_blocks

    def copy_into(self, into: Buffer) -> int:
        """See `AsyncLease.copy_into`."""
        return self._portal.run(self._hold.copy_into(into))


class Reservation(_Hold[AsyncReservation]):
    """See `AsyncReservation`."""

    def copy_from(self, source: Buffer) -> int:
        """See `AsyncReservation.copy_from`."""
        return self._portal.run(self._hold.copy_from(source))

    def commit(
        self, blocks: int | None = None, *, durable: bool = False, retention: Sequence[Retention] = ()
    ) -> StoreResult:
        """See `AsyncReservation.commit`."""
        return self._portal.run(self._hold.commit(blocks, durable=durable, retention=retention))


class Cache:
    """See `AsyncCache`. Made by `Client.register`."""

    def __init__(self, portal: Portal, cache: AsyncCache) -> None:
        self._portal, self._cache = portal, cache
        self.spec = cache.spec

    @property
    def namespace_id(self) -> bytes:
        """See `AsyncCache.namespace_id`."""
        return self._cache.namespace_id

    def match(self, tokens: TokenIds, *, counted: bool = False, prefill: Prefill | None = None) -> MatchResult:
        """See `AsyncCache.match`."""
        return self._portal.run(self._cache.match(tokens, counted=counted, prefill=prefill))

    def prefetch(self, tokens: TokenIds) -> int:
        """See `AsyncCache.prefetch`."""
        return self._portal.run(self._cache.prefetch(tokens))

    def persist(self, tokens: TokenIds) -> int:
        """See `AsyncCache.persist`."""
        return self._portal.run(self._cache.persist(tokens))

    def retain(self, tokens: TokenIds, retention: Sequence[Retention]) -> int:
        """See `AsyncCache.retain`."""
        return self._portal.run(self._cache.retain(tokens, retention))

    def acquire(
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
    ) -> Lease:
        """See `AsyncCache.acquire`."""
        lease = self._cache.acquire(
            tokens,
            first_block=first_block,
            max_blocks=max_blocks,
            ttl_s=ttl_s,
            parts=parts,
            counted=counted,
            prefill=prefill,
            prefix_blocks=prefix_blocks,
            found=found,
        )
        return Lease(self._portal, self._portal.run(lease))

    def reserve(
        self,
        tokens: TokenIds,
        *,
        first_block: int = 0,
        ttl_s: float | None = None,
        parts: Sequence[int] | None = None,
    ) -> Reservation:
        """See `AsyncCache.reserve`."""
        reserving = self._cache.reserve(tokens, first_block=first_block, ttl_s=ttl_s, parts=parts)
        return Reservation(self._portal, self._portal.run(reserving))

    def load(
        self,
        tokens: TokenIds,
        into: Buffer,
        *,
        first_block: int = 0,
        max_blocks: int = 0,
        parts: Sequence[int] | None = None,
    ) -> int:
        """See `AsyncCache.load`."""
        return self._portal.run(
            self._cache.load(tokens, into, first_block=first_block, max_blocks=max_blocks, parts=parts)
        )

    def store(
        self,
        tokens: TokenIds,
        source: Buffer,
        *,
        first_block: int = 0,
        parts: Sequence[int] | None = None,
        durable: bool = False,
        retention: Sequence[Retention] = (),
    ) -> StoreResult:
        """See `AsyncCache.store`."""
        storing = self._cache.store(
            tokens, source, first_block=first_block, parts=parts, durable=durable, retention=retention
        )
        return self._portal.run(storing)


class Client:
    """See `AsyncClient`; the arguments are the same. `with` it, or call `close`."""

    def __init__(
        self,
        address: str | None = None,
        *,
        name: str = "",
        memory: MemoryMode = "auto",
        timeout_s: float = 30.0,
        copy_threads: int = 1,
        tls_ca: str | PathLike[str] | None = None,
        tls_cert: str | PathLike[str] | None = None,
        tls_key: str | PathLike[str] | None = None,
        token: str = "",
    ) -> None:
        self._client = AsyncClient(
            address,
            name=name,
            memory=memory,
            timeout_s=timeout_s,
            copy_threads=copy_threads,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            token=token,
        )
        self._portal = Portal()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """See `AsyncClient.close`. Calls under way in other threads raise `ClientClosed`."""
        with suppress(ClientClosed):
            self._portal.run(self._client.close())
        self._portal.stop()

    @property
    def address(self) -> str:
        """The daemon's address."""
        return self._client.address

    @property
    def arena(self) -> Arena | None:
        """See `AsyncClient.arena`."""
        return self._client.arena

    @property
    def draining(self) -> bool:
        """See `AsyncClient.draining`."""
        return self._client.draining

    def register(self, namespace: NamespaceSpec) -> Cache:
        """See `AsyncClient.register`."""
        return Cache(self._portal, self._portal.run(self._client.register(namespace)))

    def renew(self, holds: Sequence[Lease | Reservation], ttl_s: float | None = None) -> None:
        """See `AsyncClient.renew`."""
        self._portal.run(self._client.renew([hold._hold for hold in holds], ttl_s))

    def generate(
        self,
        prompt: str | TokenIds,
        *,
        sampling: Sampling = Sampling(),
        images: Sequence[bytes] = (),
        n: int = 1,
        best_of: int | None = None,
        request_id: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        salt: bytes = b"",
        model: str = "",
        retention: Sequence[Retention] = (),
        read_only: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[GenerateEvent]:
        """See `AsyncClient.generate`."""
        events = self._client.generate(
            prompt,
            sampling=sampling,
            images=images,
            n=n,
            best_of=best_of,
            request_id=request_id,
            priority=priority,
            deadline_s=deadline_s,
            salt=salt,
            model=model,
            retention=retention,
            read_only=read_only,
            timeout_s=timeout_s,
        )
        yield from self._each(events)

    def watch_blocks(self) -> Iterator[cache_pb2.BlockChange]:
        """See `AsyncClient.watch_blocks`."""
        yield from self._each(self._client.watch_blocks())

    def cancel(self, request_id: str) -> bool:
        """See `AsyncClient.cancel`."""
        return self._portal.run(self._client.cancel(request_id))

    def stats(self) -> admin_pb2.StatsResponse:
        """See `AsyncClient.stats`."""
        return self._portal.run(self._client.stats())

    def prefixes(self, namespace_id: bytes = b"", limit: int = 0) -> admin_pb2.ListPrefixesResponse:
        """See `AsyncClient.prefixes`."""
        return self._portal.run(self._client.prefixes(namespace_id, limit))

    def inspect(self, key: str) -> admin_pb2.InspectResponse:
        """See `AsyncClient.inspect`."""
        return self._portal.run(self._client.inspect(key))

    def pin(self, key: str, timeout_s: float = 3600.0) -> admin_pb2.PinResponse:
        """See `AsyncClient.pin`."""
        return self._portal.run(self._client.pin(key, timeout_s))

    def unpin(self, key: str, timeout_s: float = 3600.0) -> admin_pb2.UnpinResponse:
        """See `AsyncClient.unpin`."""
        return self._portal.run(self._client.unpin(key, timeout_s))

    def evict(
        self,
        *,
        key: str = "",
        namespace_id: bytes = b"",
        all: bool = False,
        shared: bool = False,
        on_progress: Callable[[admin_pb2.EvictResponse], None] | None = None,
    ) -> admin_pb2.EvictResponse:
        """See `AsyncClient.evict`; `on_progress` is called in another thread."""
        return self._portal.run(
            self._client.evict(key=key, namespace_id=namespace_id, all=all, shared=shared, on_progress=on_progress)
        )

    def resize_tier(
        self,
        tier: Tier,
        nbytes: int,
        *,
        wait_s: float = 0.0,
        on_progress: Callable[[admin_pb2.ResizeTierResponse], None] | None = None,
    ) -> admin_pb2.ResizeTierResponse:
        """See `AsyncClient.resize_tier`; `on_progress` is called in another thread."""
        return self._portal.run(self._client.resize_tier(tier, nbytes, wait_s=wait_s, on_progress=on_progress))

    def tenants(self) -> list[admin_pb2.TenantStats]:
        """See `AsyncClient.tenants`."""
        return self._portal.run(self._client.tenants())

    def set_tenant(
        self,
        name: str,
        *,
        tiers: Mapping[str, tuple[int | None, int | None]] | None = None,
        limits: Mapping[str, float | None] | None = None,
    ) -> admin_pb2.TenantStats:
        """See `AsyncClient.set_tenant`."""
        return self._portal.run(self._client.set_tenant(name, tiers=tiers, limits=limits))

    def flush(self, timeout_s: float = 3600.0) -> admin_pb2.FlushResponse:
        """See `AsyncClient.flush`."""
        return self._portal.run(self._client.flush(timeout_s))

    def drain(self, *, shutdown: bool = False, timeout_s: float = 3600.0) -> admin_pb2.DrainResponse:
        """See `AsyncClient.drain`."""
        return self._portal.run(self._client.drain(shutdown=shutdown, timeout_s=timeout_s))

    def verify(self) -> Iterator[admin_pb2.VerifyProgress]:
        """See `AsyncClient.verify`."""
        yield from self._each(self._client.verify())

    def check_integrity(self, timeout_s: float = 600.0) -> admin_pb2.CheckIntegrityResponse:
        """See `AsyncClient.check_integrity`."""
        return self._portal.run(self._client.check_integrity(timeout_s))

    def _each(self, answers: AsyncGenerator[T, None]) -> Iterator[T]:
        """What an asynchronous call yields, one by one; the call ends when the iterator is closed."""

        async def following() -> T | None:
            return await anext(answers, None)

        async def close() -> None:
            async with aclosing(answers):
                pass

        try:
            while (answer := self._portal.run(following())) is not None:
                yield answer
        finally:
            with suppress(ClientClosed):
                self._portal.finish(close())
