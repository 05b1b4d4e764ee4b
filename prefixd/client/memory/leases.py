"""The right to read blocks, and the right to fill slots, of the daemon's arena."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from prefixd.client.connecting.connection import Connection
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
from prefixd.client.memory.namespace import SessionSource
from prefixd.client.spec import LoadEstimate, Retention, StoreResult, retention_to_proto
from prefixd.v1 import cache_pb2

_FAREWELL_S = 2.0  # what closing a client may wait for a daemon that does not answer
_TELL_ATTEMPTS = 3


_PIECE_BLOCKS = 4096  # listed and copied at a time
_PIECE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What the daemon granted, and what it takes to use and end it."""

    hold_id: str
    """Empty when nothing was granted, and there is nothing to end."""
    first_block: int
    blocks: int
    offsets: Sequence[int]
    part_bytes: tuple[int, ...]
    expires_s: float
    """By `clock`."""
    session: Session
    client: SessionSource
    connection: Connection
    persist: Callable[[], Awaitable[int]]
    """Returns when the cached prefix of the prompt is on disk: its blocks."""
    retain: Callable[[Sequence[Retention]], Awaitable[str]]
    """Gives the cached blocks of the prompt priorities."""
    asked_blocks: int
    """Full blocks of the prompt."""


class Hold(ABC):
    """What leases and reservations share: some blocks' bytes in the arena, until a moment."""

    _word = "hold"
    first_block: int
    """Index in the prompt of the first block here."""
    blocks: int
    """How many blocks are here."""
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
        self._granted = granted
        self._session = granted.session
        self._connection = granted.connection
        self._views: list[memoryview] = []
        self._ended = not self._id
        self._lost_because: str | None = None
        self._copies = 0
        self._still = asyncio.Event()  # set while no copy is under way
        self._still.set()
        if not self._ended:
            self._session.add(self)
            if self._session.lost_because is not None:
                # Lost between the daemon's answer and now: nobody else will tell.
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
        """Ends it before its time."""

    async def renew(self, ttl_s: float | None = None) -> None:
        """Lets it live for `ttl_s` seconds from now (None: the daemon's default). Raises `LeaseLost`."""
        await renew([self], ttl_s)

    @property
    def remaining_s(self) -> float:
        """Seconds until it expires unless it is renewed; 0 when it has ended."""
        return 0.0 if self._ended else max(0.0, self._expires_s - self._granted.client.clock())

    def on_session_lost(self, reason: str) -> None:
        """Called by the session: nothing here may be touched any more."""
        self._lost_because = reason
        self._end()

    @abstractmethod
    async def before_close(self) -> None:
        """Called by the session when it has been lost on purpose and is about to be closed."""

    def check(self) -> None:
        """Raises `LeaseLost` when the right has ended: released, expired, or its session is gone."""
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
        """Whether part `part` of block `block` is here: of a sliding-window group a lease has the window only."""
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

    def _pairs(self, buffers: BlockBuffers, first: int, at: int, blocks: int) -> list[tuple[Bytes, Bytes]]:
        """(arena bytes, the caller's bytes) of `blocks` blocks from `at` on, which are `first` onwards in `buffers`."""
        parts, bytes_at = len(self.part_bytes), self._arena().bytes_at
        return [
            (bytes_at(run.arena_offset, run.user.nbytes), run.user)
            for run in list(buffers.runs(self.offsets[at * parts : (at + blocks) * parts], first, blocks))
        ]

    @contextmanager
    def copying(self) -> Iterator[None]:
        """For a copy that the caller makes itself, at `offset`: as long as it lasts, the daemon is not told that
        nothing here touches the bytes any more, also when the client is closed meanwhile. Raises `LeaseLost`.
        """
        self.check()
        self._copies += 1
        self._still.clear()
        try:
            yield
        finally:
            self._copies -= 1
            if not self._copies:
                self._still.set()

    async def _copy(self, buffers: BlockBuffers, first: int, *, out: bool, renew: bool = False) -> None:
        """Copies every block between the arena and `buffers`, whose block `first` is the first one here.

        Piece by piece, for others run on the event loop, too. With `renew` it is renewed when less than half of the
        daemon's default time is left before a piece: the copy may take as long as it takes.
        """
        granted = self._granted
        step = max(1, min(_PIECE_BLOCKS, _PIECE_BYTES // max(1, sum(self.part_bytes))))
        with self.copying():
            for at in range(0, self.blocks, step):
                if renew and self.remaining_s < self._session.default_ttl_s / 2:
                    await self.renew()
                pairs = self._pairs(buffers, first + at, at, min(step, self.blocks - at))
                copies = [(user, shared) for shared, user in pairs] if out else pairs
                await granted.client.copier.copy(copies, self.check)
                await asyncio.sleep(0)

    def _end(self) -> None:
        self._ended = True
        self._session.discard(self)
        views, self._views = self._views, []
        for view in views:
            # An array made from the view keeps it; it must not be read, but it does not crash.
            with suppress(BufferError):
                view.release()


async def renew(holds: Sequence[Hold], ttl_s: float | None = None) -> None:
    """Lets leases and reservations of one client live for `ttl_s` seconds from now (None: the daemon's default).

    The daemon caps `ttl_s` at its longest. Raises `LeaseLost` when one of them is over; then none is renewed.
    """
    for hold in holds:
        hold.check()
    held = [hold for hold in holds if hold._id]
    if not held:
        return
    granted = held[0]._granted
    session = granted.session
    if any(hold._session is not session for hold in held):
        raise InvalidArgumentError("leases of several clients cannot be renewed at once: renew each client's own")
    asked_at_s = granted.client.clock()
    before = [hold._expires_s for hold in held]
    # The new life may be shorter than the old, and begins when the daemon hears of it.
    for hold in held:
        hold._expires_s = min(hold._expires_s, asked_at_s + (ttl_s or session.default_ttl_s))
    request = cache_pb2.RenewRequest(
        session_id=session.session_id, lease_ids=[hold._id for hold in held], ttl_s=ttl_s or 0.0
    )
    try:
        response = await granted.connection.call(granted.connection.cache.Renew, request)
    except (NotFoundError, InvalidArgumentError) as error:
        for hold, expires_s in zip(held, before, strict=True):
            hold._expires_s = expires_s
        if isinstance(error, NotFoundError):
            raise LeaseLost(f"nothing was renewed: {error}") from error
        raise
    for hold in held:
        hold._expires_s = asked_at_s + response.ttl_s


class AsyncLease(Hold):
    """Blocks that neither move nor go while it lasts. `async with` it, or call `release`.

    `blocks` is 0 when nothing was cached, or had room; there is then nothing to release.
    """

    _word = "lease"
    estimate: LoadEstimate
    """What the daemon expected of loading the blocks, before it did."""
    cached_blocks: int
    """How much of the prompt is cached, from its first block on and as far as was asked for: more than
    `first_block + blocks` where the daemon's memory has no room for all; 0 from a daemon that does not say."""

    def __init__(self, granted: Granted, estimate: LoadEstimate, cached_blocks: int) -> None:
        super().__init__(granted)
        self.estimate = estimate
        self.cached_blocks = cached_blocks

    def view(self, block: int, part: int = 0) -> memoryview:
        """The bytes of a part, read-only, in the arena itself; gone with the lease.

        `block` counts from the lease's first, `part` from the first part asked for. Raises `LeaseLost`.
        """
        return self._view(block, part, writable=False)

    async def copy_into(self, into: Buffer) -> int:
        """Copies every block to `into` (whole blocks, or a list with one buffer per part); returns their number.

        Of KV groups with a rule, what the rule does not need is left as it was in `into`.

        Raises `BufferSizeError`, `LeaseLost`. The bytes count once `release` has returned.
        """
        buffers = BlockBuffers(into, self.part_bytes, self.blocks, writable=True)
        return await self.copy_out(buffers)

    async def copy_out(self, buffers: BlockBuffers, first: int = 0) -> int:
        """`copy_into` for buffers that are checked already; the lease's first block is their block `first`."""
        if self.blocks:
            self.check()
            await self._copy(buffers, first, out=True)
            self.check()
        return self.blocks

    async def release(self) -> None:
        """Ends the lease. That it succeeds is the proof that the bytes read under it were the right ones.

        Raises `LeaseLost` when it had ended before; a second call does nothing.
        """
        if self._ended and self._lost_because is None:
            return
        try:
            self.check()
        finally:
            self._end()
        try:
            await self._connection.call(
                self._connection.cache.Release,
                cache_pb2.ReleaseRequest(session_id=self._session.session_id, lease_id=self._id),
            )
        except (NotFoundError, ServerUnavailable) as error:
            # A daemon that is away has ended it, even where its session's end has not been heard of yet.
            raise LeaseLost(f"the lease ended before it was released: {error}") from error

    async def before_close(self) -> None:
        """Nothing: who only reads leaves nothing behind."""


class AsyncReservation(Hold):
    """Slots to fill for blocks that are not cached. Nothing in them is visible before `commit`.

    `async with` gives back what was not committed. `blocks` is 0 when all was cached already. Where it ends
    against its holder's will (it expires, the connection breaks), the daemon gives the slots to nobody else until
    `release` tells it that nothing here writes into them any more, or until this process ends.
    """

    _word = "reservation"

    def __init__(self, granted: Granted) -> None:
        self._told = not granted.hold_id  # the daemon knows that nothing here writes into the slots any more
        super().__init__(granted)

    def view(self, block: int, part: int = 0) -> memoryview:
        """The bytes of a slot, writable, in the arena itself; gone with the reservation.

        `block` counts from the reservation's first, `part` from the first part asked for. Raises `LeaseLost`.
        """
        return self._view(block, part, writable=True)

    async def copy_from(self, source: Buffer) -> int:
        """Fills every slot from `source` (whole blocks, or a list with one buffer per part); returns the
        blocks.

        Raises `BufferSizeError`, `LeaseLost`.
        """
        buffers = BlockBuffers(source, self.part_bytes, self.blocks, writable=False)
        return await self.copy_in(buffers, 0)

    async def copy_in(self, buffers: BlockBuffers, first: int, *, renew: bool = False) -> int:
        """`copy_from` for buffers that are checked already; the first slot is their block `first`. With `renew` it does
        not expire meanwhile, nor soon after."""
        if self.blocks:
            self.check()
            await self._copy(buffers, first, out=False, renew=renew)
            if renew and self.remaining_s < self._session.default_ttl_s / 2:
                await self.renew()
        return self.blocks

    async def commit(
        self, blocks: int | None = None, *, durable: bool = False, retention: Sequence[Retention] = ()
    ) -> StoreResult:
        """Makes the first `blocks` slots (None: all) matchable and ends the reservation, even if it fails.

        With `durable`, returns when they and the prefix before them are on disk, also where all was cached
        already. `retention` gives blocks priorities, from the prompt's first to the last one committed: see
        `AsyncCache.retain`. Raises `LeaseLost` when the reservation had ended before; `PreconditionError` for `durable`
        without a disk tier, or when blocks that were cached already are not any more. Priorities beyond the tenant's
        quota are left out (`StoreResult.retention_refused`).
        """
        count = self.blocks if blocks is None else blocks
        if not 0 <= count <= self.blocks:
            raise InvalidArgumentError(f"cannot commit {count} blocks of a reservation of {self.blocks}")
        if not self._id:
            refused = await self._granted.retain(retention)
            if durable:
                await self._persist()
            return StoreResult(0, 0, 0, refused)
        self.check()
        await self._still.wait()
        request = cache_pb2.CommitRequest(
            session_id=self._session.session_id,
            reservation_id=self._id,
            blocks=count,
            durable=durable,
            retention=retention_to_proto(retention),
        )
        self._end()  # from here on the slots may be blocks that others read: nothing here may write to them
        try:
            response = await self._connection.call(self._connection.cache.Commit, request)
        except NotFoundError as error:
            self._lost_because = str(error)
            await self._tell()
            raise LeaseLost(f"the reservation ended before it was committed: {error}") from error
        except ClientError:
            await self._tell()  # where it was committed, this is NOT_FOUND
            raise
        self._told = True
        return StoreResult(response.committed, response.duplicates, 0, response.retention_refused)

    async def release(self) -> None:
        """Gives the slots back without committing, once the copies under way have stopped.

        The holder's word that nothing writes into them any more, through a `view` either. A second call does nothing.
        """
        self._end()
        await self._tell()

    async def before_close(self) -> None:
        """The last chance to tell, in the session itself."""
        if not self._told:
            self._told = True
            await self._still.wait()
            with suppress(ClientError):  # a daemon that is away has nothing to be told
                await self._release_in(self._session, _FAREWELL_S)

    async def _tell(self) -> None:
        """Tells the daemon, once, that nothing here writes into the slots any more.

        Where that fails, the slots come back when this process ends.
        """
        if self._told:
            return
        self._told = True
        await self._still.wait()
        with suppress(ClientError):
            for _ in range(_TELL_ATTEMPTS):
                # In a new session where the old one has ended; the old one's end may be heard of only meanwhile.
                session = self._session if self._session.alive else await self._granted.client.session()
                try:
                    await self._release_in(session)
                    return
                except SessionUnknown as error:
                    session.disown(str(error))
                except (NotFoundError, ServerUnavailable):
                    if session.alive:
                        return

    async def _release_in(self, session: Session, timeout_s: float | None = None) -> None:
        request = cache_pb2.ReleaseRequest(session_id=session.session_id, lease_id=self._id)
        await self._connection.call(self._connection.cache.Release, request, timeout_s)

    async def _persist(self) -> None:
        there, asked = await self._granted.persist(), self._granted.asked_blocks
        if there < asked:
            raise PreconditionError(
                f"only {there} of the prompt's {asked} blocks are on disk: the others were evicted meanwhile, or parts "
                "of them are yet to be committed; reserve again"
            )
