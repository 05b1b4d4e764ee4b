"""The client: one daemon's cache, inference and administration."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from os import PathLike
from types import TracebackType
from typing import Self, cast

from prefixd.base.clocks import elapsed_s
from prefixd.base.sampling import Sampling
from prefixd.base.tiers import Tier
from prefixd.client.cache import AsyncCache
from prefixd.client.connecting.connection import Connection, parse_address
from prefixd.client.connecting.credentials import Credentials
from prefixd.client.connecting.forks import check_not_forked, forked_from
from prefixd.client.connecting.mapped_arena import Arena
from prefixd.client.connecting.session import MemoryMode, NewSession, Session
from prefixd.client.errors import ClientClosed, InvalidArgumentError, ServerError
from prefixd.client.inference import GenerateEvent, event_from_proto, generate_request
from prefixd.client.memory.copying import Copier
from prefixd.client.memory.leases import AsyncLease, AsyncReservation, renew
from prefixd.client.memory.namespace import RegisteredNamespace
from prefixd.client.messages import TokenIds, message
from prefixd.client.spec import NamespaceSpec, Retention
from prefixd.v1 import admin_pb2, cache_pb2, inference_pb2

log = logging.getLogger(__name__)

_PREFIXES = 100  # listed unless more are asked for
_PAGE = 1000  # prefixes that one call lists at the most


class AsyncClient:
    """A client of one daemon. `async with` it, or call `close`; belongs to one event loop.

    Nothing is sent before the first call. A session is opened by `register`; when the daemon ends it or is
    restarted, calls in flight raise `ServerUnavailable`, leases and reservations raise `LeaseLost`, and the
    next call opens another, registers its namespace again and maps the new arena.
    """

    address: str
    """The daemon's address."""

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
        clock: Callable[[], float] = elapsed_s,
        on_new_session: Callable[[NewSession], None] | None = None,
    ) -> None:
        """A client of the daemon at `address`: "unix:/path", "host:port", or None for the default socket.

        `name` is what `prefixd stats` shows. `memory`: "shared" maps the daemon's arena or raises
        `MemoryUnavailable`; "streamed" sends bytes through gRPC; "auto" shares when it can, and logs a warning where
        the daemon is on this host and does not share. `timeout_s` bounds every call but `generate`, `flush` and
        `drain`. `copy_threads` copy between the arena and buffers.

        For "host:port": with `tls_ca`, a PEM file of authorities, the connection is TLS and the daemon's certificate is
        checked; `tls_cert` and `tls_key` are PEM files to show for ourselves; `token` is one of the daemon's
        `server.tokens`. On a unix socket all four are left alone: the socket's permissions say who may come.

        `on_new_session` is told when a session takes the place of one that is over; None: a warning in the log.

        Raises `InvalidArgumentError` for arguments that cannot work, and `ForkedProcess` in a process that was forked
        while a client was open.
        """
        check_not_forked()
        if memory not in ("auto", "shared", "streamed"):
            raise InvalidArgumentError(f"memory={memory!r} is none of 'auto', 'shared', 'streamed'")
        if timeout_s <= 0 or copy_threads < 1:
            raise InvalidArgumentError(f"timeout_s={timeout_s} and copy_threads={copy_threads} must be positive")
        self.address = parse_address(address)
        self._credentials = Credentials(tls_ca, tls_cert, tls_key, token)
        self.clock = clock
        self.copier = Copier(copy_threads)
        self._name = name
        self._memory: MemoryMode = memory
        self._timeout_s = timeout_s
        self._connection: Connection | None = None
        self._session: Session | None = None
        self._on_new_session = self._warn_of if on_new_session is None else on_new_session
        self._tickets_refused = 0  # when the session was opened
        self._opening: asyncio.Task[Session] | None = None
        self._closed = False
        self._pid = os.getpid()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the session, and with it every lease and reservation, and the connection."""
        self._closed = True
        if os.getpid() != self._pid:
            return  # in a forked child: session and connection are the parent's
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._session is not None:
            await self._session.close()
            self._session = None
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        self.copier.close()

    @property
    def connection(self) -> Connection:
        """The gRPC channel, opened at first use. Raises `ClientClosed`; `ForkedProcess` in a forked child."""
        if os.getpid() != self._pid:
            raise forked_from(self._pid)
        if self._closed:
            raise ClientClosed("the client is closed")
        if self._connection is None:
            self._connection = Connection(self.address, self._timeout_s, self._credentials)
        return self._connection

    @property
    def arena(self) -> Arena | None:
        """The daemon's memory as mapped here, to pin for CUDA; None without a session or when bytes are
        streamed.

        A restarted daemon has another.
        """
        return self._session.arena if self._session is not None and self._session.alive else None

    @property
    def draining(self) -> bool:
        """Whether the daemon has announced that it drains: it takes no new reservations."""
        return self._session is not None and self._session.alive and self._session.draining

    async def session(self) -> Session:
        """The open session; a new one when the last has ended.

        Calls that need a new one at the same time share one attempt and its failure: while the daemon is away, each
        waits once.
        """
        connection = self.connection
        if self._session is not None and self._session.lost_because is None:
            return self._session
        if self._opening is None:
            self._opening = asyncio.create_task(self._open(connection), name="prefixd-open-session")
            self._opening.add_done_callback(self._opened)
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():
                raise ClientClosed("the client was closed while its session was opened") from None
            raise

    async def _open(self, connection: Connection) -> Session:
        last = self._session
        self._session = await Session.open(connection, self._name, self._memory)
        refused, self._tickets_refused = self._tickets_refused, connection.tickets_refused
        if last is not None:
            self._on_new_session(NewSession(last.lost_because or "it is over", refused != self._tickets_refused))
        return self._session

    def _warn_of(self, new: NewSession) -> None:
        log.warning("prefixd: a new session with the daemon at %s: %s", self.address, new)

    def _opened(self, opening: asyncio.Task[Session]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # those who waited for it have it, if they still wait

    async def register(self, namespace: NamespaceSpec) -> AsyncCache:
        """Names what must be equal for KV to be reusable, and gives the cache of it. Registering again is
        free.

        With another salt or geometry it is another namespace. Raises `ExhaustedError` when the tenant, or all together,
        have as many namespaces as they may, `InvalidArgumentError` for a geometry that cannot be.
        """
        registered = RegisteredNamespace(self, namespace)
        await registered.ready()
        return AsyncCache(registered)

    async def renew(self, holds: Sequence[AsyncLease | AsyncReservation], ttl_s: float | None = None) -> None:
        """Lets leases and reservations live for `ttl_s` seconds from now (None: the daemon's default).

        All of them or, with `LeaseLost` when one is over, none.
        """
        await renew(holds, ttl_s)

    async def generate(
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
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Generates on the daemon's worker: one `Accepted`, any number of `Tokens`, one `Finished`.

        `sampling` says how tokens are chosen and when the output ends: greedily and after 16 tokens unless it says
        otherwise. Closing the iterator cancels the request.

        Of `n` sequences (which need a temperature) the events carry an `index`, and each ends with a
        `SequenceFinished`. Of `best_of` sequences the `n` with the highest sum of logprobs come when all have ended,
        the best as index 0. With `sampling.beam_search` the `n` best sequences that it finds come at its end, likewise.

        `images` are the files (PNG, JPEG, WebP) of a prompt that holds the model's placeholder once for each, as text
        or as token id; 16 MiB with the prompt.

        Lower `priority` goes first, and under the policy "deadline" whose first token is due first, `deadline_s` after
        it has arrived (None: never). `model` names one of several models of the daemon (empty: its first). Prompts of
        different salts never share a cached block. `retention` gives blocks of the prompt priorities in the cache; with
        `read_only` the request uses what is cached and leaves nothing of its own there. Priorities beyond the tenant's
        quota are left out, and `Accepted` says so. The whole answer may take `timeout_s` seconds (None: any time).

        Raises `UnsupportedError` when the daemon has no model, or one of text alone and images for it, `ExhaustedError`
        when its queue is full or the prompt never fits its GPU tier, `InvalidArgumentError` for a prompt, an image or
        sampling that the model cannot take, `AlreadyExistsError` for a `request_id` that runs already, `NotFoundError`
        for a `model` that there is not, and `CallTimeout`.
        """
        request = generate_request(
            prompt,
            sampling,
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
        )
        connection = self.connection
        async with aclosing(connection.stream(connection.inference.Generate, request, timeout_s)) as responses:
            async for response in responses:
                yield event_from_proto(response)

    async def watch_blocks(self) -> AsyncGenerator[cache_pb2.BlockChange, None]:
        """What the daemon's tiers have of the namespaces that are registered here: first all blocks, then what changes.

        Ends with `ClientError` when the session does; what it told does not hold then. Raises `UnsupportedError` with a
        daemon of an earlier version.
        """
        session, connection = await self.session(), self.connection
        request = cache_pb2.WatchBlocksRequest(session_id=session.session_id)
        async with aclosing(connection.stream(connection.cache.WatchBlocks, request)) as answers:
            async for answer in answers:
                for change in answer.changes:
                    yield change

    async def cancel(self, request_id: str) -> bool:
        """Cancels a generation; False when no such request waits or runs."""
        response = await self.connection.call(
            self.connection.inference.Cancel, inference_pb2.CancelRequest(request_id=request_id)
        )
        return bool(response.cancelled)

    async def stats(self) -> admin_pb2.StatsResponse:
        """Tiers, sessions, namespaces, worker and scheduler in numbers."""
        response = await self.connection.call(self.connection.admin.Stats, admin_pb2.StatsRequest())
        return cast(admin_pb2.StatsResponse, response)

    async def prefixes(self, namespace_id: bytes = b"", limit: int = 0) -> admin_pb2.ListPrefixesResponse:
        """Cached prefixes, most recently used first; of all namespaces, and 100 of them, unless said otherwise.

        More than a thousand come in several calls: one that is used meanwhile may be missing or be there twice.
        """
        wanted = limit or _PREFIXES
        found = admin_pb2.ListPrefixesResponse()
        while True:
            request = message(
                admin_pb2.ListPrefixesRequest,
                namespace_id=namespace_id,
                limit=min(wanted - len(found.prefixes), _PAGE),
                page_token=found.next_page_token,
            )
            page = await self.connection.call(self.connection.admin.ListPrefixes, request)
            found.prefixes.extend(page.prefixes)
            found.total, found.next_page_token = page.total, page.next_page_token
            found.pinned_blocks, found.pinned_bytes = page.pinned_blocks, page.pinned_bytes
            if not found.next_page_token or len(found.prefixes) >= wanted:
                return found

    async def inspect(self, key: str) -> admin_pb2.InspectResponse:
        """One prefix, block by block. `key` is its last block's, or an unambiguous beginning.

        A prefix of more than a thousand blocks comes in several calls. Raises `NotFoundError`, also when it is evicted
        meanwhile.
        """
        found = await self._inspect(key, 0)
        while len(found.blocks) < found.prefix.blocks:
            page = await self._inspect(found.prefix.key, len(found.blocks))
            if not page.blocks:
                raise ServerError(f"the daemon sent {len(found.blocks)} of the {found.prefix.blocks} blocks of {key}")
            found.blocks.extend(page.blocks)
        return found

    async def _inspect(self, key: str, first_block: int) -> admin_pb2.InspectResponse:
        request = admin_pb2.InspectRequest(key=key, first_block=first_block)
        return cast(admin_pb2.InspectResponse, await self.connection.call(self.connection.admin.Inspect, request))

    async def pin(self, key: str, timeout_s: float = 3600.0) -> admin_pb2.PinResponse:
        """Keeps a prefix in the cache until `unpin`; returns its blocks, when they are on disk. `NotFoundError`.

        `durable` in the answer says whether it outlasts a restart, `reason` why it does not, as without a disk tier.
        """
        response = await self.connection.call(
            self.connection.admin.Pin, admin_pb2.PinRequest(key=key), timeout_s=timeout_s
        )
        return cast(admin_pb2.PinResponse, response)

    async def unpin(self, key: str, timeout_s: float = 3600.0) -> admin_pb2.UnpinResponse:
        """Undoes `pin`; returns the prefix's blocks. If not `durable`, they are pinned again after a restart."""
        response = await self.connection.call(
            self.connection.admin.Unpin, admin_pb2.UnpinRequest(key=key), timeout_s=timeout_s
        )
        return cast(admin_pb2.UnpinResponse, response)

    async def evict(
        self,
        *,
        key: str = "",
        namespace_id: bytes = b"",
        all: bool = False,
        shared: bool = False,
        on_progress: Callable[[admin_pb2.EvictResponse], None] | None = None,
    ) -> admin_pb2.EvictResponse:
        """Drops a prefix and what continues it, a namespace, or everything: exactly one of the three.

        What is held or pinned stays and is counted. With `shared` the blocks are deleted from the shared store, too,
        where other hosts may be using them. `on_progress` is called with what has been done so far, every tenth of a
        second. A cancelled call leaves what it has not come to. Raises `InvalidArgumentError` for none or several.
        """
        if bool(key) + bool(namespace_id) + all != 1:
            raise InvalidArgumentError("evict takes exactly one of key, namespace_id and all=True")
        request = admin_pb2.EvictRequest(shared=shared)
        if key:
            request.key = key
        elif namespace_id:
            request.namespace_id = namespace_id
        else:
            request.all = True
        connection = self.connection
        async with aclosing(connection.stream(connection.admin.Evict, request)) as answers:
            async for answer in answers:
                if answer.done:
                    return cast(admin_pb2.EvictResponse, answer)
                if on_progress is not None:
                    on_progress(answer)
        raise ServerError("the daemon ended the eviction without saying that it is done; look at its log")

    async def resize_tier(
        self,
        tier: Tier,
        nbytes: int,
        *,
        wait_s: float = 0.0,
        on_progress: Callable[[admin_pb2.ResizeTierResponse], None] | None = None,
    ) -> admin_pb2.ResizeTierResponse:
        """Changes the size of a tier, only the GPU tier for now, while requests run: to as many whole blocks as fit.

        When no memory becomes free for `wait_s` (0: the daemon's 60 s), it ends; what is left to do is in `unfinished`.
        `on_progress` is called with how far it is, every tenth of a second. A cancelled call leaves the tier at the
        size that it has come to. Raises `InvalidArgumentError` below two blocks, `ExhaustedError` when the device has
        not so much, `PreconditionError` while another resize or a drain is under way, `UnsupportedError` for
        another tier or without a model.
        """
        if not isinstance(tier, Tier):
            raise InvalidArgumentError(f"tier is {tier!r}; it must be Tier.GPU, the only one that can be resized")
        request = message(admin_pb2.ResizeTierRequest, tier=tier.wire, nbytes=nbytes, wait_s=wait_s)
        connection = self.connection
        async with aclosing(connection.stream(connection.admin.ResizeTier, request)) as answers:
            async for answer in answers:
                if answer.done:
                    return cast(admin_pb2.ResizeTierResponse, answer)
                if on_progress is not None:
                    on_progress(answer)
        raise ServerError("the daemon ended the resize without saying that it is done; look at its log")

    async def tenants(self) -> list[admin_pb2.TenantStats]:
        """All tenants: what each has and may have. For operators."""
        response = await self.connection.call(self.connection.admin.ListTenants, admin_pb2.ListTenantsRequest())
        return list(response.tenants)

    async def set_tenant(
        self,
        name: str,
        *,
        tiers: Mapping[str, tuple[int | None, int | None]] | None = None,
        limits: Mapping[str, float | None] | None = None,
    ) -> admin_pb2.TenantStats:
        """Changes what a tenant may have until the settings are read again, and returns what it has. For operators.

        Args:
            name: of the tenant. tiers: by tier ("gpu", "cpu", "disk") bytes that are guaranteed, and the most; None:
            as before, -1: no limit. limits: by the limit's name, such as "sessions"; None: no limit.

        Raises `InvalidArgumentError` for limits that cannot be, and `NotFoundError` for a tenant that is not known.
        """
        counts = dict(limits or {})
        unlimited = [limit for limit, value in counts.items() if value is None]
        unlimited += [f"{tier}_most" for tier, (_, most) in (tiers or {}).items() if most == -1]
        fields = {field.name: field for field in admin_pb2.TenantQuota.DESCRIPTOR.fields}
        quota = message(
            admin_pb2.TenantQuota,
            tiers=[
                message(
                    admin_pb2.TierQuota,
                    tier=f"TIER_{tier.upper()}",
                    guaranteed_bytes=least,
                    most_bytes=None if most == -1 else most,
                )
                for tier, (least, most) in (tiers or {}).items()
            ],
            **{
                limit: value if fields[limit].cpp_type == fields[limit].CPPTYPE_DOUBLE else int(value)
                for limit, value in counts.items()
                if value is not None
            },
        )
        request = message(admin_pb2.SetTenantRequest, name=name, quota=quota, unlimited=unlimited)
        response = await self.connection.call(self.connection.admin.SetTenant, request)
        return cast(admin_pb2.TenantStats, response)

    async def flush(self, timeout_s: float = 3600.0) -> admin_pb2.FlushResponse:
        """Returns when every block has a durable copy on disk. `PreconditionError` without a disk tier."""
        response = await self.connection.call(
            self.connection.admin.Flush, admin_pb2.FlushRequest(), timeout_s=timeout_s
        )
        return cast(admin_pb2.FlushResponse, response)

    async def drain(self, *, shutdown: bool = False, timeout_s: float = 3600.0) -> admin_pb2.DrainResponse:
        """Has the daemon take no new work, finish what runs and write back; with `shutdown` it then ends."""
        response = await self.connection.call(
            self.connection.admin.Drain, admin_pb2.DrainRequest(shutdown=shutdown), timeout_s=timeout_s
        )
        return cast(admin_pb2.DrainResponse, response)

    async def verify(self) -> AsyncGenerator[admin_pb2.VerifyProgress, None]:
        """Has the daemon read everything on disk and compare checksums; the last progress has `done` set.

        Closing the iterator ends it. `PreconditionError` without a disk tier, or when its device fails.
        """
        connection = self.connection
        async with aclosing(connection.stream(connection.admin.Verify, admin_pb2.VerifyRequest())) as responses:
            async for response in responses:
                yield response

    async def check_integrity(self, timeout_s: float = 600.0) -> admin_pb2.CheckIntegrityResponse:
        """Has the daemon account for every slot, lease and reservation; what does not add up is in `violations`."""
        response = await self.connection.call(
            self.connection.admin.CheckIntegrity, admin_pb2.CheckIntegrityRequest(), timeout_s=timeout_s
        )
        return cast(admin_pb2.CheckIntegrityResponse, response)
