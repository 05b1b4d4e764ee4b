"""The right to read blocks, and the right to fill slots, of the daemon's arena."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from prefixd.client.arena import Arena
from prefixd.client.buffers import BlockBuffers, Buffer, Bytes
from prefixd.client.connection import Connection
from prefixd.client.copying import Copier
from prefixd.client.errors import (
    ClientError,
    InvalidArgumentError,
    LeaseLost,
    MemoryUnavailable,
    NotFoundError,
    ServerUnavailable,
)
from prefixd.client.session import Session
from prefixd.client.spec import StoreResult
from prefixd.v1 import cache_pb2


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
    connection: Connection
    copier: Copier
    clock: Callable[[], float]


class _Hold(ABC):
    """What leases and reservations share: some blocks' bytes in the arena, until a moment."""

    _word = "hold"

    def __init__(self, granted: Granted) -> None:
        self.first_block = granted.first_block
        """Index in the prompt of the first block here."""
        self.blocks = granted.blocks
        self.offsets = granted.offsets
        """Byte offset in the arena of each block's parts: block-major, blocks * parts entries."""
        self.part_bytes = granted.part_bytes
        self._id = granted.hold_id
        self._granted = granted
        self._session = granted.session
        self._connection = granted.connection
        self._views: list[memoryview] = []
        self._ended = not self._id
        self._lost_because: str | None = None
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

    @property
    def remaining_s(self) -> float:
        """Seconds until it expires; 0 when it has ended. Time to be done, as nothing extends it."""
        return 0.0 if self._ended else max(0.0, self._granted.expires_s - self._granted.clock())

    def on_session_lost(self, reason: str) -> None:
        """Called by the session: nothing here may be touched any more."""
        self._lost_because = reason
        self._end()

    def check(self) -> None:
        """Raises `LeaseLost` when the right has ended: released, expired, or its session is gone."""
        if self._lost_because is not None:
            raise LeaseLost(f"the {self._word} is lost: {self._lost_because}")
        if self._ended and self._id:
            raise LeaseLost(f"the {self._word} was released")
        if self._id and self.remaining_s <= 0:
            raise LeaseLost(f"the {self._word} has expired: ask for a longer ttl_s, or fewer blocks at a time")

    def offset(self, block: int, part: int = 0) -> int:
        """Byte offset in the arena of part `part` of block `block`, both counted from what was asked for."""
        if not 0 <= block < self.blocks or not 0 <= part < len(self.part_bytes):
            raise InvalidArgumentError(
                f"block {block}, part {part} is not here: the {self._word} has {self.blocks} blocks "
                f"of {len(self.part_bytes)} parts"
            )
        return self.offsets[block * len(self.part_bytes) + part]

    def _arena(self) -> Arena:
        arena = self._session.arena
        if arena is None:
            raise MemoryUnavailable("this client does not share memory with the daemon: use load and store")
        return arena

    def _view(self, block: int, part: int, *, writable: bool) -> memoryview:
        offset = self.offset(block, part)
        self.check()
        view = self._arena().bytes_at(offset, self.part_bytes[part]).data
        if not writable:
            view = view.toreadonly()
        self._views.append(view)
        return view

    def _pairs(self, buffers: BlockBuffers, first: int, blocks: int) -> list[tuple[Bytes, Bytes]]:
        """(arena bytes, the caller's bytes) of `blocks` blocks, starting at block `first` of `buffers`."""
        return [
            (self._arena().bytes_at(run.arena_offset, run.user.nbytes), run.user)
            for run in buffers.runs(self.offsets, first, blocks)
        ]

    def _end(self) -> None:
        self._ended = True
        self._session.discard(self)
        views, self._views = self._views, []
        for view in views:
            # An array made from the view keeps it; it must not be read, but it does not crash.
            with suppress(BufferError):
                view.release()

    async def _release(self) -> None:
        """Ends it here and at the daemon. Raises `LeaseLost` when it had ended before."""
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
            raise LeaseLost(f"the {self._word} ended before it was released: {error}") from error


class AsyncLease(_Hold):
    """Blocks that neither move nor go while it lasts. `async with` it, or call `release`.

    `blocks` is 0 when nothing was cached; there is then nothing to release.
    """

    _word = "lease"

    def view(self, block: int, part: int = 0) -> memoryview:
        """The bytes of a part, read-only, in the arena itself; gone with the lease.

        `block` counts from the lease's first, `part` from the first part asked for. Raises `LeaseLost`.
        """
        return self._view(block, part, writable=False)

    async def copy_into(self, into: Buffer) -> int:
        """Copies every block to `into` (whole blocks, or a list with one buffer per part); returns their
        number.

        Raises `BufferSizeError`, `LeaseLost`. The bytes count once `release` has returned.
        """
        buffers = BlockBuffers(into, self.part_bytes, self.blocks, writable=True)
        return await self.copy_out(buffers)

    async def copy_out(self, buffers: BlockBuffers) -> int:
        """`copy_into` for buffers that are checked already."""
        if self.blocks:
            self.check()
            pairs = [(user, shared) for shared, user in self._pairs(buffers, 0, self.blocks)]
            await self._granted.copier.copy(pairs, self.check)
            self.check()
        return self.blocks

    async def release(self) -> None:
        """Ends the lease. That it succeeds is the proof that the bytes read under it were the right ones.

        Raises `LeaseLost` when it had ended before; a second call does nothing.
        """
        await self._release()


class AsyncReservation(_Hold):
    """Slots to fill for blocks that are not cached. Nothing in them is visible before `commit`.

    `async with` gives back what was not committed. `blocks` is 0 when all was cached already.
    """

    _word = "reservation"

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

    async def copy_in(self, buffers: BlockBuffers, first: int) -> int:
        """`copy_from` for buffers that are checked already; the first slot is their block `first`."""
        if self.blocks:
            self.check()
            await self._granted.copier.copy(self._pairs(buffers, first, self.blocks), self.check)
        return self.blocks

    async def commit(self, blocks: int | None = None, *, durable: bool = False) -> StoreResult:
        """Makes the first `blocks` slots (None: all) matchable and ends the reservation.

        With `durable`, returns when they are on disk. Raises `LeaseLost` when the reservation had ended
        before; `PreconditionError` for `durable` without a disk tier.
        """
        count = self.blocks if blocks is None else blocks
        if not 0 <= count <= self.blocks:
            raise InvalidArgumentError(f"cannot commit {count} blocks of a reservation of {self.blocks}")
        if not self._id:
            return StoreResult(0, 0)
        self.check()
        request = cache_pb2.CommitRequest(
            session_id=self._session.session_id, reservation_id=self._id, blocks=count, durable=durable
        )
        try:
            response = await self._connection.call(self._connection.cache.Commit, request)
        except NotFoundError as error:
            self._lost_because = str(error)
            self._end()
            raise LeaseLost(f"the reservation ended before it was committed: {error}") from error
        except ServerUnavailable:
            # Whether it was committed is unknown; either way the daemon has ended it.
            self._end()
            raise
        self._end()
        return StoreResult(response.committed, response.duplicates)

    async def release(self) -> None:
        """Gives the slots back without committing; does nothing when the reservation has ended."""
        with suppress(LeaseLost):
            await self._release()
