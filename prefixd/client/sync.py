"""The client without async: the same calls, each blocking its thread until the answer is there.

Made from the asyncio classes by `proto/generate_sync.py` (`make proto`): change those. A call runs the asyncio one in
the client's own thread, in which callbacks are called too. Clients and caches may be used by several threads at once;
a lease or reservation belongs to one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from types import TracebackType
from typing import Self

from prefixd.base.clocks import elapsed_s
from prefixd.base.sampling import Sampling
from prefixd.base.tiers import Tier
from prefixd.client.cache import AsyncCache
from prefixd.client.client import AsyncClient
from prefixd.client.connecting.mapped_arena import Arena
from prefixd.client.connecting.portal import Blocking, Portal
from prefixd.client.connecting.session import MemoryMode, NewSession
from prefixd.client.errors import ClientClosed, ClientError
from prefixd.client.inference import GenerateEvent
from prefixd.client.memory.buffers import Buffer
from prefixd.client.memory.leases import AsyncLease, AsyncReservation
from prefixd.client.messages import TokenIds
from prefixd.client.spec import ClaimResult, LoadEstimate, MatchResult, NamespaceSpec, Prefill, Retention, StoreResult
from prefixd.v1 import admin_pb2, cache_pb2


class Lease(Blocking[AsyncLease]):
    """Blocks that the daemon neither moves nor evicts while the lease lasts. `with` it, or call `release`.

    `blocks` is 0 if no block was cached, or there was no room for one; there is then nothing to release.
    """

    @property
    def first_block(self) -> int:
        """Index in the prompt of the first block here."""
        return self._inner.first_block

    @property
    def blocks(self) -> int:
        """Number of blocks here."""
        return self._inner.blocks

    @property
    def offsets(self) -> Sequence[int]:
        """Byte offset in the arena of each block's parts: block-major, blocks * parts entries, `NO_OFFSET` for a part
        that the rule of its KV group does not need."""
        return self._inner.offsets

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part of a block."""
        return self._inner.part_bytes

    def view(self, block: int, part: int = 0) -> memoryview:
        """The bytes of a part, read-only, in the arena itself; valid until the lease ends.

        `block` counts from the lease's first, `part` from the first part asked for. Raises `LeaseLost`.
        """
        return self._inner.view(block, part)

    def release(self) -> None:
        """Ends the lease. If it succeeds, the bytes that were read under the lease were the right ones.

        Raises `LeaseLost` if the lease had ended before; a second call does nothing.
        """
        self._portal.run(self._inner.release())

    def renew(self, ttl_s: float | None = None) -> None:
        """Sets its lifetime to `ttl_s` seconds from now (None: the daemon's default). Raises `LeaseLost`."""
        self._portal.run(self._inner.renew(ttl_s))

    @property
    def remaining_s(self) -> float:
        """Seconds until it expires unless it is renewed; 0 when it has ended."""
        return self._inner.remaining_s

    def offset(self, block: int, part: int = 0) -> int:
        """Byte offset in the arena of part `part` of block `block`, both counted from what was asked for.

        `NO_OFFSET` for a part that the rule of its KV group does not need; see `has`.
        """
        return self._inner.offset(block, part)

    def has(self, block: int, part: int = 0) -> bool:
        """Whether part `part` of block `block` is here. Of a sliding-window group, a lease has only the window."""
        return self._inner.has(block, part)

    @property
    def estimate(self) -> LoadEstimate:
        """The daemon's estimate, made before it loaded the blocks."""
        return self._inner.estimate

    @property
    def cached_blocks(self) -> int:
        """Cached blocks of the prompt, from its first block on and as far as was asked for: more than
        `first_block + blocks` if the daemon's memory has no room for all; 0 from a daemon that does not report it."""
        return self._inner.cached_blocks

    def copy_into(self, into: Buffer) -> int:
        """Copies every block to `into` (whole blocks, or a list with one buffer per part); returns their number.

        Parts that the rule of their KV group does not need are not written to `into`.

        Raises `BufferSizeError`, `LeaseLost`. The bytes are valid once `release` has returned.
        """
        return self._portal.run(self._inner.copy_into(into))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(*(() if kind is None else (ClientError,))):
            self.release()


class Reservation(Blocking[AsyncReservation]):
    """Slots for blocks that are not cached; the caller fills them. No reader sees their bytes before `commit`.

    `with` gives slots back that were not committed. `blocks` is 0 if all blocks were cached already. If the
    reservation expires or the connection breaks, the daemon does not reuse the slots until `release` reports that this
    process does not write into them any more, or until this process ends.
    """

    @property
    def first_block(self) -> int:
        """Index in the prompt of the first block here."""
        return self._inner.first_block

    @property
    def blocks(self) -> int:
        """Number of blocks here."""
        return self._inner.blocks

    @property
    def offsets(self) -> Sequence[int]:
        """Byte offset in the arena of each block's parts: block-major, blocks * parts entries, `NO_OFFSET` for a part
        that the rule of its KV group does not need."""
        return self._inner.offsets

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part of a block."""
        return self._inner.part_bytes

    def view(self, block: int, part: int = 0) -> memoryview:
        """The bytes of a slot, writable, in the arena itself; valid until the reservation ends.

        `block` counts from the reservation's first, `part` from the first part asked for. Raises `LeaseLost`.
        """
        return self._inner.view(block, part)

    def release(self) -> None:
        """Gives the slots back without committing, once the copies under way have stopped.

        The caller must not write into the slots any more, nor through a `view`. A second call does nothing.
        """
        self._portal.run(self._inner.release())

    def renew(self, ttl_s: float | None = None) -> None:
        """Sets its lifetime to `ttl_s` seconds from now (None: the daemon's default). Raises `LeaseLost`."""
        self._portal.run(self._inner.renew(ttl_s))

    @property
    def remaining_s(self) -> float:
        """Seconds until it expires unless it is renewed; 0 when it has ended."""
        return self._inner.remaining_s

    def offset(self, block: int, part: int = 0) -> int:
        """Byte offset in the arena of part `part` of block `block`, both counted from what was asked for.

        `NO_OFFSET` for a part that the rule of its KV group does not need; see `has`.
        """
        return self._inner.offset(block, part)

    def has(self, block: int, part: int = 0) -> bool:
        """Whether part `part` of block `block` is here. Of a sliding-window group, a lease has only the window."""
        return self._inner.has(block, part)

    def copy_from(self, source: Buffer) -> int:
        """Fills every slot from `source` (whole blocks, or a list with one buffer per part); returns their number.

        Raises `BufferSizeError`, `LeaseLost`.
        """
        return self._portal.run(self._inner.copy_from(source))

    def commit(
        self, blocks: int | None = None, *, durable: bool = False, retention: Sequence[Retention] = ()
    ) -> StoreResult:
        """Makes the first `blocks` slots (None: all) matchable and ends the reservation, even if it fails.

        With `durable`, returns when they and the prefix before them are on disk, even if all blocks were cached
        already. `retention` gives priorities to the prompt's blocks up to the last committed one, as
        `Cache.retain` does. Raises `LeaseLost` if the reservation had ended before; `PreconditionError` for
        `durable` without a disk tier, or if blocks that were cached already were evicted meanwhile. Priorities beyond
        the tenant's quota are left out (`StoreResult.retention_refused`).
        """
        return self._portal.run(self._inner.commit(blocks, durable=durable, retention=retention))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(*(() if kind is None else (ClientError,))):
            self.release()


class Cache(Blocking[AsyncCache]):
    """A registered namespace. Made by `Client.register`.

    Every call takes the token ids of the prompt from its start: a sequence of int, or a numpy array, which is faster.
    Blocks are counted from the start of the prompt. Only full blocks exist, so a prompt without tokens has none. Every
    call raises `ServerUnavailable` if the daemon is away, and works again once it is back; `CallTimeout` if there is no
    answer within the client's `timeout_s`.
    """

    @property
    def spec(self) -> NamespaceSpec:
        """The namespace as it was registered."""
        return self._inner.spec

    @property
    def namespace_id(self) -> bytes:
        """8 bytes; one namespace of one tenant has the same id in every daemon."""
        return self._inner.namespace_id

    def match(self, tokens: TokenIds, *, counted: bool = False, prefill: Prefill | None = None) -> MatchResult:
        """The longest cached prefix. It holds no block: all of them may be evicted a moment later.

        `counted`: this is the first lookup of the prompt, and counts the prompt in the daemon's hit rates as asked for;
        pass the result to `acquire` as `found`, which counts the leased blocks as found. `prefill`: the cost of
        computing, for the estimate in the answer.
        """
        return self._portal.run(self._inner.match(tokens, counted=counted, prefill=prefill))

    def match_many(
        self, prompts: Sequence[TokenIds], *, counted: bool | Sequence[bool] = False, prefill: Prefill | None = None
    ) -> list[MatchResult]:
        """`match` of several prompts, in one call for up to 256 of them; returns their results in order.

        `counted`: as in `match`, for all prompts or for each. A daemon that is older than this call is asked about one
        prompt after the other.
        """
        return self._portal.run(self._inner.match_many(prompts, counted=counted, prefill=prefill))

    def claim(self, tokens: TokenIds, *, wait_s: float = 0.0, ttl_s: float | None = None) -> ClaimResult:
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
        return self._portal.run(self._inner.claim(tokens, wait_s=wait_s, ttl_s=ttl_s))

    def end_claim(self, claim: ClaimResult, *, in_s: float = 0.0) -> bool:
        """Ends a claim; the first client that waits for its blocks gets the next one. Returns False if it had ended by
        itself, or there was none.

        `in_s`: end it so many seconds from now, since the blocks are computed and being stored.
        """
        return self._portal.run(self._inner.end_claim(claim, in_s=in_s))

    def prefetch(self, tokens: TokenIds) -> int:
        """Makes the daemon bring the prefix to CPU memory before `acquire`; returns the number of blocks on their
        way."""
        return self._portal.run(self._inner.prefetch(tokens))

    def persist(self, tokens: TokenIds) -> int:
        """Waits until the cached prefix of `tokens` is on disk, also blocks of other clients; returns its length in
        blocks.

        Raises `PreconditionError` without a disk tier, `ExhaustedError` if the disk tier has no room.
        """
        return self._portal.run(self._inner.persist(tokens))

    def retain(self, tokens: TokenIds, retention: Sequence[Retention]) -> int:
        """Gives priorities to the blocks of the cached prefix of `tokens`; returns the number of blocks that then have
        another priority than 0.

        Of overlapping ranges the last one counts; blocks outside of all ranges stay as they are. An empty sequence
        removes the priorities of all blocks. Raises `ExhaustedError`, and changes nothing, beyond the tenant's quota.
        """
        return self._portal.run(self._inner.retain(tokens, retention))

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
        """Leases the longest cached prefix from `first_block` on, at most `max_blocks` blocks (0: all of it).

        The daemon first reads blocks that are on disk. If no prefix is cached, the lease has 0 blocks. If the daemon's
        memory has no room for all blocks, the lease has as many of the first ones as fit (compare
        `Lease.cached_blocks`): copy them, release the lease, and ask for the blocks behind them. With
        `prefix_blocks` the blocks are a slice of a prefix of this length, which is read with several leases; 0: the
        engine computes the tokens behind the leased blocks. `load` does all of that.

        The lease lives for `ttl_s` seconds (None: the daemon's default). `parts` are indexes into the namespace's parts
        (None: all). `counted`: this call counts in the daemon's hit rates, which count each prompt once. `found`: the
        `match` that has counted the prompt as asked for; the leased blocks then count as found. `prefill`: the cost of
        computing, for `Lease.estimate`. Raises `MemoryUnavailable` for a client that streams: use `load`.
        """
        return Lease(
            self._portal.run(
                self._inner.acquire(
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
            ),
            self._portal,
        )

    def reserve(
        self, tokens: TokenIds, *, first_block: int = 0, ttl_s: float | None = None, parts: Sequence[int] | None = None
    ) -> Reservation:
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
        return Reservation(
            self._portal.run(self._inner.reserve(tokens, first_block=first_block, ttl_s=ttl_s, parts=parts)),
            self._portal,
        )

    def load(
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
        return self._portal.run(
            self._inner.load(tokens, into, first_block=first_block, max_blocks=max_blocks, parts=parts)
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
        """Stores the blocks of `tokens` from `first_block` on; skips those that are cached already.

        `source` has exactly these blocks, one after the other, or is a list with one buffer per part. With `durable`,
        returns when they and the prefix before them are on disk. `retention` gives priorities to the prompt's blocks as
        `retain` does. Both apply to blocks that were cached already, too. Priorities beyond the tenant's quota are left
        out (`StoreResult.retention_refused`). Raises `BufferSizeError`; `ExhaustedError` if there is room for no block;
        `PreconditionError` if the blocks before `first_block` are not cached (any more), or for `durable` if the daemon
        has no disk tier.
        """
        return self._portal.run(
            self._inner.store(
                tokens, source, first_block=first_block, parts=parts, durable=durable, retention=retention
            )
        )


class Client(Blocking[AsyncClient]):
    """A client of one daemon. `with` it, or call `close`; usable from several threads at once.

    It connects at the first call. `register` opens a session. When the daemon ends the session or is restarted, calls
    in flight raise `ServerUnavailable`, leases and reservations raise `LeaseLost`, and the next call opens another
    session, registers its namespace again and maps the new arena.
    """

    @property
    def address(self) -> str:
        """The daemon's address."""
        return self._inner.address

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
        super().__init__(
            AsyncClient(
                address,
                name=name,
                memory=memory,
                timeout_s=timeout_s,
                copy_threads=copy_threads,
                tls_ca=tls_ca,
                tls_cert=tls_cert,
                tls_key=tls_key,
                token=token,
                clock=clock,
                on_new_session=on_new_session,
            ),
            Portal(),
        )

    def close(self) -> None:
        """Ends the session, and with it every lease and reservation, and the connection."""
        with suppress(ClientClosed):
            self._portal.run(self._inner.close())
        self._portal.stop()

    @property
    def arena(self) -> Arena | None:
        """The daemon's memory as mapped here, to pin for CUDA; None without a session or when bytes are
        streamed.

        A restarted daemon has a new one.
        """
        return self._inner.arena

    @property
    def draining(self) -> bool:
        """True while the daemon drains, as it has announced: it takes no new reservations."""
        return self._inner.draining

    def register(self, namespace: NamespaceSpec) -> Cache:
        """Registers a namespace, which names everything that must be equal for KV to be reusable; returns its cache.

        A namespace may be registered again at no cost. Another salt or geometry makes another namespace. Raises
        `ExhaustedError` if the tenant, or all tenants together, have as many namespaces as they may,
        `InvalidArgumentError` for an invalid geometry.
        """
        return Cache(self._portal.run(self._inner.register(namespace)), self._portal)

    def renew(self, holds: Sequence[Lease | Reservation], ttl_s: float | None = None) -> None:
        """Sets the lifetime of leases and reservations to `ttl_s` seconds from now (None: the daemon's default).

        Raises `LeaseLost` if one of them has ended; then none is renewed.
        """
        self._portal.run(self._inner.renew([each._inner for each in holds], ttl_s))

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
        yield from self._portal.each(
            self._inner.generate(
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
        )

    def watch_blocks(self) -> Iterator[cache_pb2.BlockChange]:
        """The blocks that the daemon's tiers have of the namespaces that are registered here: all blocks, then changes.

        It raises `ClientError` when the session ends; what it reported is then outdated. Raises `UnsupportedError` with
        a daemon of an earlier version.
        """
        yield from self._portal.each(self._inner.watch_blocks())

    def cancel(self, request_id: str) -> bool:
        """Cancels a generation; False if no such request waits or runs."""
        return self._portal.run(self._inner.cancel(request_id))

    def stats(self, last_s: float = 0.0) -> admin_pb2.StatsResponse:
        """Figures of tiers, sessions, namespaces, worker and scheduler.

        With `last_s` above 0 `period` has what happened in the last so many seconds, a day at most.
        """
        return self._portal.run(self._inner.stats(last_s))

    def prefixes(
        self, namespace_id: bytes = b"", limit: int = 0, by: str = "last-use"
    ) -> admin_pb2.ListPrefixesResponse:
        """Cached prefixes, most recently used first: of one namespace or all (empty), at most `limit` (0: 100).

        With `by` "size" the largest come first; with "hits" those that most prompts found, and only prefixes that some
        prompt found. More than a thousand take several calls: a prefix whose place changes between them may be missing
        or listed twice. Raises `InvalidArgumentError` for another order.
        """
        return self._portal.run(self._inner.prefixes(namespace_id, limit, by))

    def find_prefix(
        self, prompt: str | TokenIds, *, model: str = "", namespace_id: bytes = b""
    ) -> admin_pb2.FindPrefixResponse:
        """The longest cached prefix of a prompt, which does not count as a use; its key is for `inspect`, `pin` etc.

        The prompt is looked up in the namespace of one of the daemon's models (empty: its first), or in the namespace
        of this id. Raises `NotFoundError` if nothing of it is cached, `UnsupportedError` for a text without a model,
        `PreconditionError` for a text and a model without a tokenizer, or one that is not loaded.
        """
        return self._portal.run(self._inner.find_prefix(prompt, model=model, namespace_id=namespace_id))

    def inspect(self, key: str, *, text: bool = False, layers: bool = False) -> admin_pb2.InspectResponse:
        """One prefix, block by block. `key` is the key of its last block, or an unambiguous beginning of it.

        With `text` each block has its text, if a model of the daemon with a tokenizer has computed it. With `layers`
        the first altered blocks have the errors of each layer, for which the daemon reads them from disk. A prefix of
        more than a thousand blocks takes several calls. Raises `NotFoundError`, also if the prefix is evicted between
        them.
        """
        return self._portal.run(self._inner.inspect(key, text=text, layers=layers))

    def warm(
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
        return self._portal.run(
            self._inner.warm(
                key=key,
                tokens=tokens,
                namespace_id=namespace_id,
                namespace=namespace,
                tenant=tenant,
                timeout_s=timeout_s,
            )
        )

    def pin(self, key: str, timeout_s: float = 3600.0) -> admin_pb2.PinResponse:
        """Keeps a prefix in the cache until `unpin`; returns once its blocks are on disk. Raises `NotFoundError`.

        In the answer, `durable` is True if the pin outlasts a restart; else `reason` has the cause, such as no disk
        tier.
        """
        return self._portal.run(self._inner.pin(key, timeout_s))

    def unpin(self, key: str, timeout_s: float = 3600.0) -> admin_pb2.UnpinResponse:
        """Undoes `pin`. If the answer is not `durable`, the blocks are pinned again after a restart."""
        return self._portal.run(self._inner.unpin(key, timeout_s))

    def evict(
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
        return self._portal.run(
            self._inner.evict(key=key, namespace_id=namespace_id, all=all, shared=shared, on_progress=on_progress)
        )

    def resize_tier(
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
        return self._portal.run(self._inner.resize_tier(tier, nbytes, wait_s=wait_s, on_progress=on_progress))

    def why(self, request_id: str = "", *, last: int = 0, calls: bool = False) -> list[admin_pb2.RequestInfo]:
        """Why requests took their time: those with this id, the caller's own or the daemon's. For operators.

        Without an id, the `last` requests, 64 at most, the latest first; with `calls`, engines' calls among them.
        Raises `NotFoundError` if no request with this id is remembered.
        """
        return self._portal.run(self._inner.why(request_id, last=last, calls=calls))

    def tenants(self) -> list[admin_pb2.TenantStats]:
        """All tenants with their use and their quotas. For operators."""
        return self._portal.run(self._inner.tenants())

    def set_tenant(
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
        return self._portal.run(self._inner.set_tenant(name, tiers=tiers, limits=limits))

    def flush(self, timeout_s: float = 3600.0) -> admin_pb2.FlushResponse:
        """Returns when every block has a durable copy on disk. Raises `PreconditionError` without a disk tier."""
        return self._portal.run(self._inner.flush(timeout_s))

    def drain(self, *, shutdown: bool = False, timeout_s: float = 3600.0) -> admin_pb2.DrainResponse:
        """Drains the daemon: it takes no new work, finishes running work and writes back; with `shutdown` it ends."""
        return self._portal.run(self._inner.drain(shutdown=shutdown, timeout_s=timeout_s))

    def undrain(self) -> admin_pb2.UndrainResponse:
        """Makes the daemon take new work again after `drain` without `shutdown`.

        Raises `PreconditionError` while a drain is under way, and when the daemon ends.
        """
        return self._portal.run(self._inner.undrain())

    def verify(self) -> Iterator[admin_pb2.VerifyProgress]:
        """Makes the daemon read all blocks on disk and compare checksums; the last progress has `done` set.

        Closing the iterator ends the verification. Raises `PreconditionError` without a disk tier, or if its device
        fails.
        """
        yield from self._portal.each(self._inner.verify())

    def what_if(self, tenant: str | None = None) -> admin_pb2.WhatIfResponse:
        """What tiers of other sizes and other eviction policies would have found, of all prompts or of a tenant's.

        Raises `PreconditionError` where the daemon estimates nothing, `NotFoundError` for an unknown tenant.
        """
        return self._portal.run(self._inner.what_if(tenant))

    def record_trace(self, duration_s: float = 0.0) -> Iterator[admin_pb2.RecordedRequests]:
        """The prompts that come from now on, as hashes of their blocks of 512 tokens; the last answer has `done` set.

        Args:
            duration_s: for how long; 0: until the iterator is closed.

        Raises `PreconditionError` while another recording is under way.
        """
        yield from self._portal.each(self._inner.record_trace(duration_s))

    def check_integrity(self, timeout_s: float = 600.0) -> admin_pb2.CheckIntegrityResponse:
        """Makes the daemon account for every slot, lease and reservation; `violations` has all contradictions."""
        return self._portal.run(self._inner.check_integrity(timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
