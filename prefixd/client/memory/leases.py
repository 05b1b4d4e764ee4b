"""The right to read blocks, and the right to fill slots, of the daemon's arena."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from prefixd.client.connecting.session import Session
from prefixd.client.errors import (
    ClientError,
    InvalidArgumentError,
    LeaseLost,
    NotFoundError,
    PreconditionError,
    ServerUnavailable,
    SessionUnknown,
)
from prefixd.client.memory.buffers import BlockBuffers, Buffer
from prefixd.client.memory.holds import Granted, Hold
from prefixd.client.spec import LoadEstimate, Retention, StoreResult, retention_to_proto
from prefixd.v1 import cache_pb2

_FAREWELL_S = 2.0  # what closing a client may wait for a daemon that does not answer
_TELL_ATTEMPTS = 3


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
