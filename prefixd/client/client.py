"""The client: one daemon's cache, inference and administration."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from os import PathLike
from types import TracebackType
from typing import Any, Self

from google.protobuf.message import Message

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
from prefixd.client.messages import TokenIds, message, token_bytes
from prefixd.client.spec import NamespaceSpec, Retention
from prefixd.v1 import admin_pb2, cache_pb2, inference_pb2

log = logging.getLogger(__name__)

_PREFIXES = 100  # listed by default
ORDERS = {
    "last-use": admin_pb2.ListPrefixesRequest.ORDER_LAST_USE,
    "size": admin_pb2.ListPrefixesRequest.ORDER_SIZE,
    "hits": admin_pb2.ListPrefixesRequest.ORDER_HITS,
}
"""The orders of `AsyncClient.prefixes`."""
_PAGE = 1000  # most prefixes that one call lists


class AsyncClient:
    """A client of one daemon. `async with` it, or call `close`; belongs to one event loop.

    It connects at the first call. `register` opens a session. When the daemon ends the session or is restarted, calls
    in flight raise `ServerUnavailable`, leases and reservations raise `LeaseLost`, and the next call opens another
    session, registers its namespace again and maps the new arena.
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

        `prefixd stats` shows `name`. `memory`: "shared" maps the daemon's arena or raises `MemoryUnavailable`;
        "streamed" sends bytes through gRPC; "auto" maps the arena if possible, and logs a warning if the daemon is on
        this host and does not share it. `timeout_s` limits every call except `generate`, `flush` and `drain`.
        `copy_threads` is the number of threads that copy between the arena and buffers.

        For "host:port": with `tls_ca`, a PEM file of authorities, the connection is TLS and the client checks the
        daemon's certificate; `tls_cert` and `tls_key` are PEM files of the client's own certificate; `token` is one of
        the daemon's `server.tokens`. A unix socket ignores all four: its permissions decide who may connect.

        `on_new_session` is called when a new session replaces one that ended; None: a warning in the log.

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
        self._on_new_session = self._log_new_session if on_new_session is None else on_new_session
        self._tickets_refused = 0  # count at the time when the session was opened
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

        A restarted daemon has a new one.
        """
        return self._session.arena if self._session is not None and self._session.alive else None

    @property
    def draining(self) -> bool:
        """True while the daemon drains, as it has announced: it takes no new reservations."""
        return self._session is not None and self._session.alive and self._session.draining

    async def session(self) -> Session:
        """Returns the open session; opens a new one if the last has ended.

        Calls that need a new session at the same time share one attempt and its failure: so each waits only once for a
        daemon that is away.
        """
        connection = self.connection
        if self._session is not None and self._session.alive:
            return self._session
        if self._opening is None:
            self._opening = asyncio.create_task(self._open_session(connection), name="prefixd-open-session")
            self._opening.add_done_callback(self._forget_opening)
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():
                raise ClientClosed("the client was closed while its session was opened") from None
            raise

    async def _open_session(self, connection: Connection) -> Session:
        last = self._session
        self._session = await Session.open(connection, self._name, self._memory)
        refused, self._tickets_refused = self._tickets_refused, connection.tickets_refused
        if last is not None:
            self._on_new_session(NewSession(last.lost_because or "it has ended", refused != self._tickets_refused))
        return self._session

    def _log_new_session(self, new: NewSession) -> None:
        log.warning("prefixd: a new session with the daemon at %s: %s", self.address, new)

    def _forget_opening(self, opening: asyncio.Task[Session]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # retrieved here, since the calls that waited for it may have been cancelled

    async def register(self, namespace: NamespaceSpec) -> AsyncCache:
        """Registers a namespace, which names everything that must be equal for KV to be reusable; returns its cache.

        A namespace may be registered again at no cost. Another salt or geometry makes another namespace. Raises
        `ExhaustedError` if the tenant, or all tenants together, have as many namespaces as they may,
        `InvalidArgumentError` for an invalid geometry.
        """
        registered = RegisteredNamespace(self, namespace)
        await registered.ready()
        return AsyncCache(registered)

    async def renew(self, holds: Sequence[AsyncLease | AsyncReservation], ttl_s: float | None = None) -> None:
        """Sets the lifetime of leases and reservations to `ttl_s` seconds from now (None: the daemon's default).

        Raises `LeaseLost` if one of them has ended; then none is renewed.
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

        `sampling` chooses the tokens and ends the output; by default greedily and after 16 tokens. Closing the iterator
        cancels the request.

        With `n` > 1 sequences (which need a temperature) events have an `index`, and each sequence ends with a
        `SequenceFinished`. With `best_of`, that many sequences are computed; the `n` with the highest sum of logprobs
        are sent when all have ended, the best one as index 0. With `sampling.beam_search`, the `n` best sequences are
        sent at the end of the search in the same way.

        `images` are files (PNG, JPEG, WebP); the prompt has the model's placeholder once for each, as text or as token
        id. All images and the prompt together may have 16 MiB.

        A lower `priority` runs first. Under the policy "deadline" the request with the earliest deadline runs first;
        `deadline_s` counts from the request's arrival to its first token (None: no deadline). `model` names one of
        several models of the daemon (empty: its first). Prompts of different salts never share a cached block.
        `retention` gives blocks of the prompt priorities in the cache; with `read_only` the request uses cached blocks
        and adds none. Priorities beyond the tenant's quota are left out, and `Accepted` reports it. `timeout_s` limits
        the seconds of the whole answer (None: no limit).

        Raises `UnsupportedError` if the daemon has no model, or a model without images is sent some, `ExhaustedError`
        if its queue is full or the prompt never fits its GPU tier, `InvalidArgumentError` for a prompt, an image or
        sampling that the model cannot take, `AlreadyExistsError` for a `request_id` that already runs, `NotFoundError`
        for an unknown `model`, and `CallTimeout`.
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
        """The blocks that the daemon's tiers have of the namespaces that are registered here: all blocks, then changes.

        It raises `ClientError` when the session ends; what it reported is then outdated. Raises `UnsupportedError` with
        a daemon of an earlier version.
        """
        session, connection = await self.session(), self.connection
        request = cache_pb2.WatchBlocksRequest(session_id=session.session_id)
        async with aclosing(connection.stream(connection.cache.WatchBlocks, request)) as answers:
            async for answer in answers:
                for change in answer.changes:
                    yield change

    async def cancel(self, request_id: str) -> bool:
        """Cancels a generation; False if no such request waits or runs."""
        request = inference_pb2.CancelRequest(request_id=request_id)
        response = await self.connection.call(self.connection.inference.Cancel, request)
        return bool(response.cancelled)

    async def stats(self, last_s: float = 0.0) -> admin_pb2.StatsResponse:
        """Figures of tiers, sessions, namespaces, worker and scheduler.

        With `last_s` above 0 `period` has what happened in the last so many seconds, a day at most.
        """
        stats: admin_pb2.StatsResponse = await self._admin("Stats", admin_pb2.StatsRequest(last_s=last_s))
        return stats

    async def prefixes(
        self, namespace_id: bytes = b"", limit: int = 0, by: str = "last-use"
    ) -> admin_pb2.ListPrefixesResponse:
        """Cached prefixes, most recently used first: of one namespace or all (empty), at most `limit` (0: 100).

        With `by` "size" the largest come first; with "hits" those that most prompts found, and only prefixes that some
        prompt found. More than a thousand take several calls: a prefix whose place changes between them may be missing
        or listed twice. Raises `InvalidArgumentError` for another order.
        """
        if by not in ORDERS:
            raise InvalidArgumentError(f"by = {by!r}; choose one of {', '.join(ORDERS)}")
        wanted = limit or _PREFIXES
        found = admin_pb2.ListPrefixesResponse()
        while True:
            request = message(
                admin_pb2.ListPrefixesRequest,
                namespace_id=namespace_id,
                limit=min(wanted - len(found.prefixes), _PAGE),
                page_token=found.next_page_token,
                order=ORDERS[by],
            )
            page = await self._admin("ListPrefixes", request)
            found.prefixes.extend(page.prefixes)
            found.total, found.next_page_token = page.total, page.next_page_token
            found.pinned_blocks, found.pinned_bytes = page.pinned_blocks, page.pinned_bytes
            if not found.next_page_token or len(found.prefixes) >= wanted:
                return found

    async def find_prefix(
        self, prompt: str | TokenIds, *, model: str = "", namespace_id: bytes = b""
    ) -> admin_pb2.FindPrefixResponse:
        """The longest cached prefix of a prompt, which does not count as a use; its key is for `inspect`, `pin` etc.

        The prompt is looked up in the namespace of one of the daemon's models (empty: its first), or in the namespace
        of this id. Raises `NotFoundError` if nothing of it is cached, `UnsupportedError` for a text without a model,
        `PreconditionError` for a text and a model without a tokenizer, or one that is not loaded.
        """
        request = admin_pb2.FindPrefixRequest(model=model, namespace_id=namespace_id)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids = token_bytes(prompt)
        found: admin_pb2.FindPrefixResponse = await self._admin("FindPrefix", request)
        return found

    async def inspect(self, key: str, *, text: bool = False, layers: bool = False) -> admin_pb2.InspectResponse:
        """One prefix, block by block. `key` is the key of its last block, or an unambiguous beginning of it.

        With `text` each block has its text, if a model of the daemon with a tokenizer has computed it. With `layers`
        the first altered blocks have the errors of each layer, for which the daemon reads them from disk. A prefix of
        more than a thousand blocks takes several calls. Raises `NotFoundError`, also if the prefix is evicted between
        them.
        """
        found = await self._inspect(admin_pb2.InspectRequest(key=key, text=text, layers=layers))
        same = f"{found.prefix.namespace_id.hex()}/{found.prefix.key}"
        while len(found.blocks) < found.prefix.blocks:
            request = admin_pb2.InspectRequest(key=same, first_block=len(found.blocks), text=text)
            page = await self._inspect(request)
            if not page.blocks:
                raise ServerError(f"the daemon sent {len(found.blocks)} of the {found.prefix.blocks} blocks of {key}")
            found.blocks.extend(page.blocks)
        return found

    async def _inspect(self, request: admin_pb2.InspectRequest) -> admin_pb2.InspectResponse:
        page: admin_pb2.InspectResponse = await self._admin("Inspect", request)
        return page

    async def warm(
        self,
        *,
        key: str = "",
        tokens: TokenIds | None = None,
        namespace_id: bytes = b"",
        namespace: cache_pb2.Namespace | None = None,
        tenant: str = "",
        timeout_s: float = 600.0,
    ) -> admin_pb2.WarmResponse:
        """Brings a cached prefix to CPU memory ahead of need, from disk or the shared store; returns when it is there.

        The prefix is named by its `key`, or it is the prompt `tokens` in a namespace. Where the daemon does not know
        the namespace yet, it is registered as `namespace` describes it, for `tenant`. Raises `NotFoundError` for an
        unknown key or namespace.
        """
        request = admin_pb2.WarmRequest(namespace_id=namespace_id, namespace=namespace, tenant=tenant)
        if tokens is None:
            request.key = key
        else:
            request.token_ids = token_bytes(tokens)
        warmed: admin_pb2.WarmResponse = await self._admin("Warm", request, timeout_s)
        return warmed

    async def pin(self, key: str, timeout_s: float = 3600.0) -> admin_pb2.PinResponse:
        """Keeps a prefix in the cache until `unpin`; returns once its blocks are on disk. Raises `NotFoundError`.

        In the answer, `durable` is True if the pin outlasts a restart; else `reason` has the cause, such as no disk
        tier.
        """
        pinned: admin_pb2.PinResponse = await self._admin("Pin", admin_pb2.PinRequest(key=key), timeout_s)
        return pinned

    async def unpin(self, key: str, timeout_s: float = 3600.0) -> admin_pb2.UnpinResponse:
        """Undoes `pin`. If the answer is not `durable`, the blocks are pinned again after a restart."""
        unpinned: admin_pb2.UnpinResponse = await self._admin("Unpin", admin_pb2.UnpinRequest(key=key), timeout_s)
        return unpinned

    async def evict(
        self,
        *,
        key: str = "",
        namespace_id: bytes = b"",
        all: bool = False,
        shared: bool = False,
        on_progress: Callable[[admin_pb2.EvictResponse], None] | None = None,
    ) -> admin_pb2.EvictResponse:
        """Drops a prefix with all blocks behind it (`key`), a namespace, or everything: exactly one of the three.

        Held and pinned blocks stay and are counted. With `shared` the blocks are also deleted from the shared store,
        where other hosts may be using them. `on_progress` is called with the counts so far, every tenth of a second. A
        cancelled call leaves the blocks that it has not reached. Raises `InvalidArgumentError` for none or several.
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
        evicted: admin_pb2.EvictResponse = await self._follow("Evict", request, on_progress)
        return evicted

    async def resize_tier(
        self,
        tier: Tier,
        nbytes: int,
        *,
        wait_s: float = 0.0,
        on_progress: Callable[[admin_pb2.ResizeTierResponse], None] | None = None,
    ) -> admin_pb2.ResizeTierResponse:
        """Changes the size of a tier while requests run, to as many whole blocks as fit; only of the GPU tier for now.

        It ends if no memory becomes free for `wait_s` seconds (0: the daemon's 60 s); `unfinished` in the answer then
        has the rest. `on_progress` is called with the progress every tenth of a second. A cancelled call leaves the
        tier at the size that it has reached. Raises `InvalidArgumentError` below two blocks, `ExhaustedError` if the
        device has less memory, `PreconditionError` during another resize or a drain, `UnsupportedError` for another
        tier or without a model.
        """
        if not isinstance(tier, Tier):
            raise InvalidArgumentError(f"tier is {tier!r}; it must be Tier.GPU, the only one that can be resized")
        request = message(admin_pb2.ResizeTierRequest, tier=tier.wire, nbytes=nbytes, wait_s=wait_s)
        resized: admin_pb2.ResizeTierResponse = await self._follow("ResizeTier", request, on_progress)
        return resized

    async def why(self, request_id: str = "", *, last: int = 0, calls: bool = False) -> list[admin_pb2.RequestInfo]:
        """Why requests took their time: those with this id, the caller's own or the daemon's. For operators.

        Without an id, the `last` requests, 64 at most, the latest first; with `calls`, engines' calls among them.
        Raises `NotFoundError` if no request with this id is remembered.
        """
        request = admin_pb2.WhyRequest(request_id=request_id, last=last, calls=calls)
        return list((await self._admin("Why", request)).requests)

    async def tenants(self) -> list[admin_pb2.TenantStats]:
        """All tenants with their use and their quotas. For operators."""
        response = await self._admin("ListTenants", admin_pb2.ListTenantsRequest())
        return list(response.tenants)

    async def set_tenant(
        self,
        name: str,
        *,
        tiers: Mapping[str, tuple[int | None, int | None]] | None = None,
        limits: Mapping[str, float | None] | None = None,
    ) -> admin_pb2.TenantStats:
        """Changes a tenant's quota until the settings are read again; returns its figures. For operators.

        Args:
            name: the tenant.
            tiers: (guaranteed bytes, most bytes) by tier ("gpu", "cpu", "disk"); None: as before, -1: no limit.
            limits: values by the limit's name, such as "sessions"; None: no limit.

        Raises `InvalidArgumentError` for invalid limits, and `NotFoundError` for an unknown tenant.
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
        stats: admin_pb2.TenantStats = await self._admin("SetTenant", request)
        return stats

    async def flush(self, timeout_s: float = 3600.0) -> admin_pb2.FlushResponse:
        """Returns when every block has a durable copy on disk. Raises `PreconditionError` without a disk tier."""
        flushed: admin_pb2.FlushResponse = await self._admin("Flush", admin_pb2.FlushRequest(), timeout_s)
        return flushed

    async def drain(self, *, shutdown: bool = False, timeout_s: float = 3600.0) -> admin_pb2.DrainResponse:
        """Drains the daemon: it takes no new work, finishes running work and writes back; with `shutdown` it ends."""
        request = admin_pb2.DrainRequest(shutdown=shutdown)
        drained: admin_pb2.DrainResponse = await self._admin("Drain", request, timeout_s)
        return drained

    async def undrain(self) -> admin_pb2.UndrainResponse:
        """Makes the daemon take new work again after `drain` without `shutdown`.

        Raises `PreconditionError` while a drain is under way, and when the daemon ends.
        """
        undrained: admin_pb2.UndrainResponse = await self._admin("Undrain", admin_pb2.UndrainRequest())
        return undrained

    async def verify(self) -> AsyncGenerator[admin_pb2.VerifyProgress, None]:
        """Makes the daemon read all blocks on disk and compare checksums; the last progress has `done` set.

        Closing the iterator ends the verification. Raises `PreconditionError` without a disk tier, or if its device
        fails.
        """
        connection = self.connection
        async with aclosing(connection.stream(connection.admin.Verify, admin_pb2.VerifyRequest())) as responses:
            async for response in responses:
                yield response

    async def what_if(self, tenant: str | None = None) -> admin_pb2.WhatIfResponse:
        """What tiers of other sizes and other eviction policies would have found, of all prompts or of a tenant's.

        Raises `PreconditionError` where the daemon estimates nothing, `NotFoundError` for an unknown tenant.
        """
        found: admin_pb2.WhatIfResponse = await self._admin("WhatIf", admin_pb2.WhatIfRequest(tenant=tenant or ""))
        return found

    async def record_trace(self, duration_s: float = 0.0) -> AsyncGenerator[admin_pb2.RecordedRequests, None]:
        """The prompts that come from now on, as hashes of their blocks of 512 tokens; the last answer has `done` set.

        Args:
            duration_s: for how long; 0: until the iterator is closed.

        Raises `PreconditionError` while another recording is under way.
        """
        connection = self.connection
        request = admin_pb2.RecordTraceRequest(duration_s=duration_s)
        async with aclosing(connection.stream(connection.admin.RecordTrace, request)) as responses:
            async for response in responses:
                yield response

    async def check_integrity(self, timeout_s: float = 600.0) -> admin_pb2.CheckIntegrityResponse:
        """Makes the daemon account for every slot, lease and reservation; `violations` has all contradictions."""
        found: admin_pb2.CheckIntegrityResponse = await self._admin(
            "CheckIntegrity", admin_pb2.CheckIntegrityRequest(), timeout_s
        )
        return found

    async def _admin(self, method: str, request: Message, timeout_s: float | None = None) -> Any:
        """The answer to a call of the service Admin."""
        connection = self.connection
        return await connection.call(getattr(connection.admin, method), request, timeout_s)

    async def _follow(self, method: str, request: Message, on_progress: Callable[[Any], None] | None) -> Any:
        """The last answer to a call of the service Admin that reports its progress."""
        connection = self.connection
        async with aclosing(connection.stream(getattr(connection.admin, method), request)) as answers:
            async for answer in answers:
                if answer.done:
                    return answer
                if on_progress is not None:
                    on_progress(answer)
        raise ServerError(f"the daemon ended {method} without reporting that it is done; see its log")
