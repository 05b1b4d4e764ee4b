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
from prefixd.client.spec import LoadEstimate, MatchResult, NamespaceSpec, Prefill, Retention, StoreResult
from prefixd.v1 import admin_pb2, cache_pb2


class Lease(Blocking[AsyncLease]):
    """Blocks that neither move nor go while it lasts. `with` it, or call `release`.

    `blocks` is 0 when nothing was cached, or had room; there is then nothing to release.
    """

    @property
    def first_block(self) -> int:
        """Index in the prompt of the first block here."""
        return self._inner.first_block

    @property
    def blocks(self) -> int:
        """How many blocks are here."""
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
        """The bytes of a part, read-only, in the arena itself; gone with the lease.

        `block` counts from the lease's first, `part` from the first part asked for. Raises `LeaseLost`.
        """
        return self._inner.view(block, part)

    def release(self) -> None:
        """Ends the lease. That it succeeds is the proof that the bytes read under it were the right ones.

        Raises `LeaseLost` when it had ended before; a second call does nothing.
        """
        self._portal.run(self._inner.release())

    def renew(self, ttl_s: float | None = None) -> None:
        """Lets it live for `ttl_s` seconds from now (None: the daemon's default). Raises `LeaseLost`."""
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
        """Whether part `part` of block `block` is here: of a sliding-window group a lease has the window only."""
        return self._inner.has(block, part)

    @property
    def estimate(self) -> LoadEstimate:
        """What the daemon expected of loading the blocks, before it did."""
        return self._inner.estimate

    @property
    def cached_blocks(self) -> int:
        """How much of the prompt is cached, from its first block on and as far as was asked for: more than
        `first_block + blocks` where the daemon's memory has no room for all; 0 from a daemon that does not say."""
        return self._inner.cached_blocks

    def copy_into(self, into: Buffer) -> int:
        """Copies every block to `into` (whole blocks, or a list with one buffer per part); returns their number.

        Of KV groups with a rule, what the rule does not need is left as it was in `into`.

        Raises `BufferSizeError`, `LeaseLost`. The bytes count once `release` has returned.
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
    """Slots to fill for blocks that are not cached. Nothing in them is visible before `commit`.

    `with` gives back what was not committed. `blocks` is 0 when all was cached already. Where it ends
    against its holder's will (it expires, the connection breaks), the daemon gives the slots to nobody else until
    `release` tells it that nothing here writes into them any more, or until this process ends.
    """

    @property
    def first_block(self) -> int:
        """Index in the prompt of the first block here."""
        return self._inner.first_block

    @property
    def blocks(self) -> int:
        """How many blocks are here."""
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
        """The bytes of a slot, writable, in the arena itself; gone with the reservation.

        `block` counts from the reservation's first, `part` from the first part asked for. Raises `LeaseLost`.
        """
        return self._inner.view(block, part)

    def release(self) -> None:
        """Gives the slots back without committing, once the copies under way have stopped.

        The holder's word that nothing writes into them any more, through a `view` either. A second call does nothing.
        """
        self._portal.run(self._inner.release())

    def renew(self, ttl_s: float | None = None) -> None:
        """Lets it live for `ttl_s` seconds from now (None: the daemon's default). Raises `LeaseLost`."""
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
        """Whether part `part` of block `block` is here: of a sliding-window group a lease has the window only."""
        return self._inner.has(block, part)

    def copy_from(self, source: Buffer) -> int:
        """Fills every slot from `source` (whole blocks, or a list with one buffer per part); returns the
        blocks.

        Raises `BufferSizeError`, `LeaseLost`.
        """
        return self._portal.run(self._inner.copy_from(source))

    def commit(
        self, blocks: int | None = None, *, durable: bool = False, retention: Sequence[Retention] = ()
    ) -> StoreResult:
        """Makes the first `blocks` slots (None: all) matchable and ends the reservation, even if it fails.

        With `durable`, returns when they and the prefix before them are on disk, also where all was cached
        already. `retention` gives blocks priorities, from the prompt's first to the last one committed: see
        `Cache.retain`. Raises `LeaseLost` when the reservation had ended before; `PreconditionError` for `durable`
        without a disk tier, or when blocks that were cached already are not any more. Priorities beyond the tenant's
        quota are left out (`StoreResult.retention_refused`).
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

    Every call takes the token ids of the prompt from its start: a sequence of int, or a numpy array, which is
    faster. Blocks are counted from the start of the prompt; only full ones exist, of a prompt without tokens none.
    Every call raises `ServerUnavailable` when the daemon is away, and works again once it is back; `CallTimeout` when
    there is no answer within the client's `timeout_s`.
    """

    @property
    def spec(self) -> NamespaceSpec:
        """What was registered."""
        return self._inner.spec

    @property
    def namespace_id(self) -> bytes:
        """8 bytes, the same for the same namespace of the same tenant in every daemon."""
        return self._inner.namespace_id

    def match(self, tokens: TokenIds, *, counted: bool = False, prefill: Prefill | None = None) -> MatchResult:
        """The longest cached prefix. It takes nothing and promises nothing: all may be evicted a moment
        later.

        `counted`: this is the first lookup of the prompt, and counts it in the daemon's hit rates as asked for; pass
        the result to `acquire` as `found`, which counts what it leases as found. `prefill`: what computing takes, for
        the estimate in the answer.
        """
        return self._portal.run(self._inner.match(tokens, counted=counted, prefill=prefill))

    def prefetch(self, tokens: TokenIds) -> int:
        """Has the prefix brought up to CPU memory ahead of `acquire`; returns the blocks on their way."""
        return self._portal.run(self._inner.prefetch(tokens))

    def persist(self, tokens: TokenIds) -> int:
        """Returns when the cached prefix of `tokens` is on disk, whoever committed it: its length in blocks.

        Raises `PreconditionError` without a disk tier, `ExhaustedError` when the disk tier has no room.
        """
        return self._portal.run(self._inner.persist(tokens))

    def retain(self, tokens: TokenIds, retention: Sequence[Retention]) -> int:
        """Gives the blocks of the cached prefix of `tokens` priorities; returns how many have one other than 0 then.

        Where ranges overlap, the later one counts; blocks in none of them stay as they are. Without any range all
        blocks lose their priorities. Raises `ExhaustedError`, and changes nothing, beyond the tenant's quota.
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

        Blocks on disk are read first. A prefix that is not cached gives a lease of 0 blocks. Where the daemon's memory
        has no room for all, the lease has the longest beginning that fits (`Lease.cached_blocks`): copy it,
        release it, and ask for what is behind it. With `prefix_blocks` the blocks are a slice of a prefix of this
        length, which is read with several leases; with 0 the prompt goes on behind the leased ones. `load` does all of
        that.

        The lease lives for `ttl_s` seconds (None: the daemon's default). `parts` are indexes into the namespace's parts
        (None: all). `counted`: it enters the daemon's hit rates, which count each prompt once; `found`: the `match`
        that has counted the prompt as asked for, so that what is leased here counts as found. Raises
        `MemoryUnavailable` for a client that streams: use `load`. `prefill`: what computing takes, for
        `Lease.estimate`.
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
        """Copies the cached prefix from `first_block` on to `into` and returns how many blocks that was.

        `into` takes whole blocks one after the other, or is a list with one buffer per part. It must hold
        `max_blocks` blocks (0: every full block of `tokens` from `first_block` on); what is not cached, or not needed
        by the rule of its KV group, is left as it was. A prefix longer than the daemon's memory comes in slices. What
        others hold of that memory is waited for, two seconds at the most. Raises `BufferSizeError`, and `LeaseLost`
        when the bytes copied are not to be trusted.
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
        """Gives the cache the blocks of `tokens` from `first_block` on; those it has already are skipped.

        `source` has exactly these blocks, one after the other, or is a list with one buffer per part. With
        `durable`, returns when they and the prefix before them are on disk, those that were cached already too.
        `retention` gives blocks priorities, those that were cached already too: see `retain`.
        Priorities beyond the tenant's quota are left out (`StoreResult.retention_refused`).
        Raises `BufferSizeError`; `ExhaustedError` when there is room for none; `PreconditionError` when the blocks
        before `first_block` are not cached (any more), or when `durable` meets a daemon without a disk tier.
        """
        return self._portal.run(
            self._inner.store(
                tokens, source, first_block=first_block, parts=parts, durable=durable, retention=retention
            )
        )


class Client(Blocking[AsyncClient]):
    """A client of one daemon. `with` it, or call `close`; usable from several threads at once.

    Nothing is sent before the first call. A session is opened by `register`; when the daemon ends it or is
    restarted, calls in flight raise `ServerUnavailable`, leases and reservations raise `LeaseLost`, and the
    next call opens another, registers its namespace again and maps the new arena.
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

        A restarted daemon has another.
        """
        return self._inner.arena

    @property
    def draining(self) -> bool:
        """Whether the daemon has announced that it drains: it takes no new reservations."""
        return self._inner.draining

    def register(self, namespace: NamespaceSpec) -> Cache:
        """Names what must be equal for KV to be reusable, and gives the cache of it. Registering again is
        free.

        With another salt or geometry it is another namespace. Raises `ExhaustedError` when the tenant, or all together,
        have as many namespaces as they may, `InvalidArgumentError` for a geometry that cannot be.
        """
        return Cache(self._portal.run(self._inner.register(namespace)), self._portal)

    def renew(self, holds: Sequence[Lease | Reservation], ttl_s: float | None = None) -> None:
        """Lets leases and reservations live for `ttl_s` seconds from now (None: the daemon's default).

        All of them or, with `LeaseLost` when one is over, none.
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
        """What the daemon's tiers have of the namespaces that are registered here: first all blocks, then what changes.

        Ends with `ClientError` when the session does; what it told does not hold then. Raises `UnsupportedError` with a
        daemon of an earlier version.
        """
        yield from self._portal.each(self._inner.watch_blocks())

    def cancel(self, request_id: str) -> bool:
        """Cancels a generation; False when no such request waits or runs."""
        return self._portal.run(self._inner.cancel(request_id))

    def stats(self) -> admin_pb2.StatsResponse:
        """Tiers, sessions, namespaces, worker and scheduler in numbers."""
        return self._portal.run(self._inner.stats())

    def prefixes(self, namespace_id: bytes = b"", limit: int = 0) -> admin_pb2.ListPrefixesResponse:
        """Cached prefixes, most recently used first; of all namespaces, and 100 of them, unless said otherwise.

        More than a thousand come in several calls: one that is used meanwhile may be missing or be there twice.
        """
        return self._portal.run(self._inner.prefixes(namespace_id, limit))

    def inspect(self, key: str) -> admin_pb2.InspectResponse:
        """One prefix, block by block. `key` is its last block's, or an unambiguous beginning.

        A prefix of more than a thousand blocks comes in several calls. Raises `NotFoundError`, also when it is evicted
        meanwhile.
        """
        return self._portal.run(self._inner.inspect(key))

    def pin(self, key: str, timeout_s: float = 3600.0) -> admin_pb2.PinResponse:
        """Keeps a prefix in the cache until `unpin`; returns its blocks, when they are on disk. `NotFoundError`.

        `durable` in the answer says whether it outlasts a restart, `reason` why it does not, as without a disk tier.
        """
        return self._portal.run(self._inner.pin(key, timeout_s))

    def unpin(self, key: str, timeout_s: float = 3600.0) -> admin_pb2.UnpinResponse:
        """Undoes `pin`; returns the prefix's blocks. If not `durable`, they are pinned again after a restart."""
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
        """Drops a prefix and what continues it, a namespace, or everything: exactly one of the three.

        What is held or pinned stays and is counted. With `shared` the blocks are deleted from the shared store, too,
        where other hosts may be using them. `on_progress` is called with what has been done so far, every tenth of a
        second. A cancelled call leaves what it has not come to. Raises `InvalidArgumentError` for none or several.
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
        """Changes the size of a tier, only the GPU tier for now, while requests run: to as many whole blocks as fit.

        When no memory becomes free for `wait_s` (0: the daemon's 60 s), it ends; what is left to do is in `unfinished`.
        `on_progress` is called with how far it is, every tenth of a second. A cancelled call leaves the tier at the
        size that it has come to. Raises `InvalidArgumentError` below two blocks, `ExhaustedError` when the device has
        not so much, `PreconditionError` while another resize or a drain is under way, `UnsupportedError` for
        another tier or without a model.
        """
        return self._portal.run(self._inner.resize_tier(tier, nbytes, wait_s=wait_s, on_progress=on_progress))

    def tenants(self) -> list[admin_pb2.TenantStats]:
        """All tenants: what each has and may have. For operators."""
        return self._portal.run(self._inner.tenants())

    def set_tenant(
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
        return self._portal.run(self._inner.set_tenant(name, tiers=tiers, limits=limits))

    def flush(self, timeout_s: float = 3600.0) -> admin_pb2.FlushResponse:
        """Returns when every block has a durable copy on disk. `PreconditionError` without a disk tier."""
        return self._portal.run(self._inner.flush(timeout_s))

    def drain(self, *, shutdown: bool = False, timeout_s: float = 3600.0) -> admin_pb2.DrainResponse:
        """Has the daemon take no new work, finish what runs and write back; with `shutdown` it then ends."""
        return self._portal.run(self._inner.drain(shutdown=shutdown, timeout_s=timeout_s))

    def verify(self) -> Iterator[admin_pb2.VerifyProgress]:
        """Has the daemon read everything on disk and compare checksums; the last progress has `done` set.

        Closing the iterator ends it. `PreconditionError` without a disk tier, or when its device fails.
        """
        yield from self._portal.each(self._inner.verify())

    def check_integrity(self, timeout_s: float = 600.0) -> admin_pb2.CheckIntegrityResponse:
        """Has the daemon account for every slot, lease and reservation; what does not add up is in `violations`."""
        return self._portal.run(self._inner.check_integrity(timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
