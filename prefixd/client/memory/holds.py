"""What a lease and a reservation have in common: some blocks' bytes in the daemon's arena, until a moment."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from prefixd.client.connecting.arena import Arena
from prefixd.client.connecting.connection import Connection
from prefixd.client.connecting.session import Session
from prefixd.client.errors import ClientError, InvalidArgumentError, LeaseLost, MemoryUnavailable, NotFoundError
from prefixd.client.memory.buffers import NO_OFFSET, BlockBuffers, Bytes
from prefixd.client.memory.namespace import SessionSource
from prefixd.client.spec import Retention
from prefixd.v1 import cache_pb2

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
        parts = len(self.part_bytes)
        return [
            (self._arena().bytes_at(run.arena_offset, run.user.nbytes), run.user)
            for run in buffers.runs(self.offsets[at * parts : (at + blocks) * parts], first, blocks)
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
