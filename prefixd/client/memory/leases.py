"""The right to read blocks, and the right to fill slots, of the daemon's arena."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from prefixd.client.connecting.mapped_arena import Arena
from prefixd.client.connecting.session import Session
from prefixd.client.errors import (
    ClientError,
    InvalidArgumentError,
    LeaseLost,
    MemoryUnavailable,
    NotFoundError,
    PreconditionError,
    ServerUnavailable,
    SessionUnknown,
)
from prefixd.client.memory.buffers import NO_OFFSET, BlockBuffers, Buffer, Bytes
from prefixd.client.memory.namespace import RegisteredNamespace
from prefixd.client.messages import message
from prefixd.client.spec import LoadEstimate, Retention, StoreResult, retention_to_proto
from prefixd.v1 import cache_pb2

_CLOSING_S = 2.0  # longest wait for the daemon's answer while the client is closed
_RELEASE_ATTEMPTS = 3
_PIECE_BLOCKS = 4096  # listed and copied at a time
_PIECE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The daemon's answer to Acquire or Reserve, and the prompt that it is about."""

    hold_id: str
    """Empty if the daemon granted nothing; nothing has to be ended then."""
    first_block: int
    blocks: int
    offsets: Sequence[int]
    part_bytes: tuple[int, ...]
    expires_s: float
    """By the client's clock."""
    session: Session
    namespace: RegisteredNamespace
    prompt: bytes
    """Token ids as little-endian uint32."""


class Hold(ABC):
    """The base of leases and reservations: bytes of some blocks in the arena, held until they expire."""

    _word = "hold"
    first_block: int
    """Index in the prompt of the first block here."""
    blocks: int
    """Number of blocks here."""
    offsets: Sequence[int]
    """Byte offset in the arena of each block's parts: block-major, blocks * parts entries, `NO_OFFSET` for a part
    that the rule of its KV group does not need."""
    part_bytes: tuple[int, ...]
    """Bytes of each part of a block."""

    def __init__(self, granted: Granted) -> None:
        self.first_block = granted.first_block
        self.blocks = granted.blocks
        self.offsets = granted.offsets
        self.part_bytes = granted.part_bytes
        self._id = granted.hold_id
        self._expires_s = granted.expires_s
        self._session = granted.session
        self._namespace = granted.namespace
        self._client = granted.namespace.client
        self._prompt = granted.prompt
        self._views: list[memoryview] = []
        self._ended = not self._id
        self._lost_because: str | None = None
        self._copies = 0
        self._no_copies = asyncio.Event()  # set while no copy is under way
        self._no_copies.set()
        if not self._ended:
            self._session.add(self)
            if self._session.lost_because is not None:
                # The session was lost after the daemon's answer; it calls only holders that it knew by then.
                self.on_session_lost(self._session.lost_because)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.release()
        else:
            with suppress(ClientError):
                await self.release()

    @abstractmethod
    def view(self, block: int, part: int = 0) -> memoryview:
        """The bytes of one part of one block, in the arena itself."""

    @abstractmethod
    async def release(self) -> None:
        """Ends it before it expires."""

    async def renew(self, ttl_s: float | None = None) -> None:
        """Sets its lifetime to `ttl_s` seconds from now (None: the daemon's default). Raises `LeaseLost`."""
        await renew([self], ttl_s)

    @property
    def remaining_s(self) -> float:
        """Seconds until it expires unless it is renewed; 0 when it has ended."""
        return 0.0 if self._ended else max(0.0, self._expires_s - self._client.clock())

    def on_session_lost(self, reason: str) -> None:
        """The session has ended: the bytes must not be touched any more."""
        self._lost_because = reason
        self._end()

    @abstractmethod
    async def before_close(self) -> None:
        """The client is being closed: `on_session_lost` was called, and the daemon can still be called."""

    def check(self) -> None:
        """Raises `LeaseLost` if it was released, has expired, or its session has ended."""
        if self._lost_because is not None:
            raise LeaseLost(f"the {self._word} is lost: {self._lost_because}")
        if self._ended and self._id:
            raise LeaseLost(f"the {self._word} was released")
        if self._id and self.remaining_s <= 0:
            raise LeaseLost(f"the {self._word} has expired: renew it in time, or ask for a longer ttl_s")

    def offset(self, block: int, part: int = 0) -> int:
        """Byte offset in the arena of part `part` of block `block`, both counted from what was asked for.

        `NO_OFFSET` for a part that the rule of its KV group does not need; see `has`.
        """
        if not 0 <= block < self.blocks or not 0 <= part < len(self.part_bytes):
            raise InvalidArgumentError(
                f"block {block}, part {part} is not here: the {self._word} has {self.blocks} blocks "
                f"of {len(self.part_bytes)} parts"
            )
        return self.offsets[block * len(self.part_bytes) + part]

    def has(self, block: int, part: int = 0) -> bool:
        """Whether part `part` of block `block` is here. Of a sliding-window group, a lease has only the window."""
        return self.offset(block, part) != NO_OFFSET

    def _arena(self) -> Arena:
        arena = self._session.arena
        if arena is None:
            raise MemoryUnavailable("this client does not share memory with the daemon: use load and store")
        return arena

    def _view(self, block: int, part: int, *, writable: bool) -> memoryview:
        offset = self.offset(block, part)
        if offset == NO_OFFSET:
            raise InvalidArgumentError(
                f"part {part} of block {block} is not here: the rule of its KV group does not need it in a prefix of "
                "this length; ask `has` first"
            )
        self.check()
        view = self._arena().bytes_at(offset, self.part_bytes[part]).data
        if not writable:
            view = view.toreadonly()
        self._views.append(view)
        return view

    def _copy_pairs(self, buffers: BlockBuffers, first: int, at: int, blocks: int) -> list[tuple[Bytes, Bytes]]:
        """Pairs (arena bytes, the caller's bytes) of the blocks `at` to `at + blocks` here, which are the blocks
        `first` onwards of `buffers`."""
        parts, bytes_at = len(self.part_bytes), self._arena().bytes_at
        return [
            (bytes_at(run.arena_offset, run.user.nbytes), run.user)
            for run in buffers.runs(self.offsets[at * parts : (at + blocks) * parts], first, blocks)
        ]

    @contextmanager
    def copying(self) -> Iterator[None]:
        """A context for a copy that the caller makes itself, at `offset`. Until it ends, the daemon does not give the
        bytes to others, even if the client is closed meanwhile. Raises `LeaseLost`.
        """
        self.check()
        self._copies += 1
        self._no_copies.clear()
        try:
            yield
        finally:
            self._copies -= 1
            if not self._copies:
                self._no_copies.set()

    async def _copy(self, buffers: BlockBuffers, first: int, *, out: bool, renew: bool = False) -> None:
        """Copies every block between the arena and `buffers`; the first block here is block `first` of `buffers`.

        It copies piece by piece, so that other tasks of the event loop run in between. With `renew`, it renews the
        hold before a piece if less than half of the daemon's default lifetime is left: a copy may take any time.
        """
        step = max(1, min(_PIECE_BLOCKS, _PIECE_BYTES // max(1, sum(self.part_bytes))))
        with self.copying():
            for at in range(0, self.blocks, step):
                if renew:
                    await self._renew_if_due()
                pairs = self._copy_pairs(buffers, first + at, at, min(step, self.blocks - at))
                copies = [(user, shared) for shared, user in pairs] if out else pairs
                await self._client.copier.copy(copies, self.check)
                await asyncio.sleep(0)

    async def _renew_if_due(self) -> None:
        if self.remaining_s < self._session.default_ttl_s / 2:
            await self.renew()

    async def _release_in(self, session: Session, timeout_s: float | None = None) -> None:
        connection = session.connection
        request = cache_pb2.ReleaseRequest(session_id=session.session_id, lease_id=self._id)
        await connection.call(connection.cache.Release, request, timeout_s)

    def _end(self) -> None:
        self._ended = True
        self._session.discard(self)
        views, self._views = self._views, []
        for view in views:
            # An array made from the view keeps the view alive; its bytes are not valid, but reading them is safe.
            with suppress(BufferError):
                view.release()


async def renew(holds: Sequence[Hold], ttl_s: float | None = None) -> None:
    """Sets the lifetime of leases and reservations of one client to `ttl_s` seconds from now (None: the daemon's
    default).

    The daemon caps `ttl_s` at its longest. Raises `LeaseLost` if one of them has ended; then none is renewed.
    """
    for hold in holds:
        hold.check()
    held = [hold for hold in holds if hold._id]
    if not held:
        return
    session = held[0]._session
    if any(hold._session is not session for hold in held):
        raise InvalidArgumentError("leases of several clients cannot be renewed at once: renew each client's own")
    request = message(
        cache_pb2.RenewRequest,
        session_id=session.session_id,
        lease_ids=[hold._id for hold in held],
        ttl_s=ttl_s or 0.0,
    )
    asked_at_s = held[0]._client.clock()
    before = [hold._expires_s for hold in held]
    # The new lifetime may be shorter than the rest of the old one, and begins when the daemon gets the request.
    for hold in held:
        hold._expires_s = min(hold._expires_s, asked_at_s + (ttl_s or session.default_ttl_s))
    connection = session.connection
    try:
        response = await connection.call(connection.cache.Renew, request)
    except (NotFoundError, InvalidArgumentError) as error:
        for hold, expires_s in zip(held, before, strict=True):
            hold._expires_s = expires_s
        if isinstance(error, NotFoundError):
            raise LeaseLost(f"nothing was renewed: {error}") from error
        raise
    for hold in held:
        hold._expires_s = asked_at_s + response.ttl_s


class AsyncLease(Hold):
    """Blocks that the daemon neither moves nor evicts while the lease lasts. `async with` it, or call `release`.

    `blocks` is 0 if no block was cached, or there was no room for one; there is then nothing to release.
    """

    _word = "lease"
    estimate: LoadEstimate
    """The daemon's estimate, made before it loaded the blocks."""
    cached_blocks: int
    """Cached blocks of the prompt, from its first block on and as far as was asked for: more than
    `first_block + blocks` if the daemon's memory has no room for all; 0 from a daemon that does not report it."""

    def __init__(self, granted: Granted, estimate: LoadEstimate, cached_blocks: int) -> None:
        super().__init__(granted)
        self.estimate = estimate
        self.cached_blocks = cached_blocks

    def view(self, block: int, part: int = 0) -> memoryview:
        """The bytes of a part, read-only, in the arena itself; valid until the lease ends.

        `block` counts from the lease's first, `part` from the first part asked for. Raises `LeaseLost`.
        """
        return self._view(block, part, writable=False)

    async def copy_into(self, into: Buffer) -> int:
        """Copies every block to `into` (whole blocks, or a list with one buffer per part); returns their number.

        Parts that the rule of their KV group does not need are not written to `into`.

        Raises `BufferSizeError`, `LeaseLost`. The bytes are valid once `release` has returned.
        """
        buffers = BlockBuffers(into, self.part_bytes, self.blocks, writable=True)
        return await self.copy_out(buffers)

    async def copy_out(self, buffers: BlockBuffers, first: int = 0) -> int:
        """As `copy_into`, for checked buffers; the lease's first block is their block `first`."""
        if self.blocks:
            self.check()
            await self._copy(buffers, first, out=True)
            self.check()
        return self.blocks

    async def release(self) -> None:
        """Ends the lease. If it succeeds, the bytes that were read under the lease were the right ones.

        Raises `LeaseLost` if the lease had ended before; a second call does nothing.
        """
        if self._ended and self._lost_because is None:
            return
        try:
            self.check()
        finally:
            self._end()
        try:
            await self._release_in(self._session)
        except (NotFoundError, ServerUnavailable) as error:
            # A daemon that is away has ended the lease, even if the session does not know of its own end yet.
            raise LeaseLost(f"the lease ended before it was released: {error}") from error

    async def before_close(self) -> None:
        """Does nothing: the lease ends with the session."""


class AsyncReservation(Hold):
    """Slots for blocks that are not cached; the caller fills them. No reader sees their bytes before `commit`.

    `async with` gives slots back that were not committed. `blocks` is 0 if all blocks were cached already. If the
    reservation expires or the connection breaks, the daemon does not reuse the slots until `release` reports that this
    process does not write into them any more, or until this process ends.
    """

    _word = "reservation"

    def __init__(self, granted: Granted) -> None:
        self._reported = not granted.hold_id  # the daemon knows that this process does not write into the slots
        super().__init__(granted)

    def view(self, block: int, part: int = 0) -> memoryview:
        """The bytes of a slot, writable, in the arena itself; valid until the reservation ends.

        `block` counts from the reservation's first, `part` from the first part asked for. Raises `LeaseLost`.
        """
        return self._view(block, part, writable=True)

    async def copy_from(self, source: Buffer) -> int:
        """Fills every slot from `source` (whole blocks, or a list with one buffer per part); returns their number.

        Raises `BufferSizeError`, `LeaseLost`.
        """
        buffers = BlockBuffers(source, self.part_bytes, self.blocks, writable=False)
        return await self.copy_in(buffers, 0)

    async def copy_in(self, buffers: BlockBuffers, first: int, *, renew: bool = False) -> int:
        """As `copy_from`, for checked buffers; the first slot is their block `first`. With `renew` the reservation does
        not expire during the copy, nor soon after it."""
        if self.blocks:
            self.check()
            await self._copy(buffers, first, out=False, renew=renew)
            if renew:
                await self._renew_if_due()
        return self.blocks

    async def commit(
        self, blocks: int | None = None, *, durable: bool = False, retention: Sequence[Retention] = ()
    ) -> StoreResult:
        """Makes the first `blocks` slots (None: all) matchable and ends the reservation, even if it fails.

        With `durable`, returns when they and the prefix before them are on disk, even if all blocks were cached
        already. `retention` gives priorities to the prompt's blocks up to the last committed one, as
        `AsyncCache.retain` does. Raises `LeaseLost` if the reservation had ended before; `PreconditionError` for
        `durable` without a disk tier, or if blocks that were cached already were evicted meanwhile. Priorities beyond
        the tenant's quota are left out (`StoreResult.retention_refused`).
        """
        count = self.blocks if blocks is None else blocks
        request = message(
            cache_pb2.CommitRequest,
            session_id=self._session.session_id,
            reservation_id=self._id,
            blocks=count,
            durable=durable,
            retention=retention_to_proto(retention),
        )
        if count > self.blocks:
            raise InvalidArgumentError(f"cannot commit {count} blocks of a reservation of {self.blocks}")
        if not self._id:
            refused = await self._namespace.try_to_retain(self._prompt, retention)
            if durable:
                await self._persist()
            return StoreResult(0, 0, 0, refused)
        self.check()
        await self._no_copies.wait()
        self._end()  # from here on other processes may read the slots as blocks: no copy may write to them
        connection = self._session.connection
        try:
            response = await connection.call(connection.cache.Commit, request)
        except NotFoundError as error:
            self._lost_because = str(error)
            await self._report_end()
            raise LeaseLost(f"the reservation ended before it was committed: {error}") from error
        except ClientError:
            await self._report_end()  # if the daemon has committed it, this call fails with NOT_FOUND
            raise
        self._reported = True
        return StoreResult(response.committed, response.duplicates, 0, response.retention_refused)

    async def release(self) -> None:
        """Gives the slots back without committing, once the copies under way have stopped.

        The caller must not write into the slots any more, nor through a `view`. A second call does nothing.
        """
        self._end()
        await self._report_end()

    async def before_close(self) -> None:
        """Reports the end of writing in the session that is being closed."""
        if not self._reported:
            self._reported = True
            await self._no_copies.wait()
            with suppress(ClientError):  # a daemon that is away needs no report
                await self._release_in(self._session, _CLOSING_S)

    async def _report_end(self) -> None:
        """Reports to the daemon, once, that this process does not write into the slots any more.

        If that fails, the daemon gets the slots back when this process ends.
        """
        if self._reported:
            return
        self._reported = True
        await self._no_copies.wait()
        with suppress(ClientError):
            for _ in range(_RELEASE_ATTEMPTS):
                # In a new session if the old one has ended; its end may become known only during the call.
                session = self._session if self._session.alive else await self._client.session()
                try:
                    await self._release_in(session)
                    return
                except SessionUnknown as error:
                    session.disown(str(error))
                except (NotFoundError, ServerUnavailable):
                    if session.alive:
                        return

    async def _persist(self) -> None:
        on_disk, asked = await self._namespace.persist(self._prompt), self._namespace.full_blocks(self._prompt)
        if on_disk < asked:
            raise PreconditionError(
                f"only {on_disk} of the prompt's {asked} blocks are on disk: the others were evicted meanwhile, or "
                "parts of them are yet to be committed; reserve again"
            )
