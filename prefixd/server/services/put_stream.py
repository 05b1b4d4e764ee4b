"""A call of Put: it reserves slots window by window and copies the stream's bytes into them.

    header ... | window: reserved -> filled -> committed | window: ... | until all blocks are stored

A window that was filled stays cached even if the stream fails later. The last window is committed at the stream's end,
so a prompt of one window is stored as a whole or not at all. A client that falls silent loses its window.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, PreconditionError, TooSlowError
from prefixd.base.long_work.pacer import Pacer
from prefixd.cache import Lease, Reservation, Session, TieredCache
from prefixd.cache.sessions.reservations import ToFill
from prefixd.observability.request_record import StageName
from prefixd.server.retention_messages import retention_requests
from prefixd.server.rpc.door import deliver, outlive
from prefixd.server.services.call_records import CallRecords
from prefixd.v1 import cache_pb2 as pb
from prefixd_swap import round_to_slot

WINDOW_BYTES = 16 << 20
"""Most bytes of slots that are reserved ahead of a stream's bytes, at least one block: a silent client holds them."""
SILENCE_S = 30.0
"""Time without a message after which a stream ends; 0.3 Mbit/s are enough for a piece of 1 MiB."""
LEAST_BYTES_PER_S = 100_000
"""Least speed of the bytes of a reserved window; a stream of 1 Mbit/s is fast enough."""

_COPIED_AS_A_PIECE = 4096  # bytes: a microsecond
_PART_WORK = 2


class Put:
    """One call.

    Args:
        cache: where the blocks go.
        session_of: the caller's open session with an id.
        requests: the messages.
        records: gets the record of the call.

    Every method raises TooSlowError when the client is silent for too long.
    """

    def __init__(
        self,
        cache: TieredCache,
        session_of: Callable[[str], Session],
        requests: AsyncIterator[pb.PutRequest],
        records: CallRecords,
    ) -> None:
        self._cache = cache
        self._session_of = session_of
        self._stream = _Stream(requests)
        self._window: Reservation | None = None
        """The reservation that is not committed."""
        self._known = 0
        """Cached blocks, from the prompt's first on, when the window was reserved."""
        self._retention_refused = ""
        self._records = records

    async def begin(self) -> None:
        """Reads the header and reserves the first window.

        Raises:
            PrefixdError: the header is wrong, or there is no room.
        """
        self._header = header = await self._stream.header()
        cache = self._cache
        if header.durable and cache.tiers.durable is None:
            raise PreconditionError("durable Put without a disk tier; set disk.bytes or send without durable")
        self._session = self._session_of(header.session_id)
        self._namespace = namespace = self._cache.open_in(self._session, header.namespace_id)
        self._retention = retention_requests(header.retention)
        self._parts = namespace.check_parts(header.parts)
        self._chain = cache.chain(namespace, header.token_ids)
        trie = cache.trie(namespace)
        self._sizes = [trie.part_bytes[part] for part in self._parts]
        if self._retention:  # each window asks again; priorities that cannot be granted as a whole are left out now
            groups = int(np.bitwise_or.reduce(trie.part_mask[list(self._parts)]))
            grant = await cache.grant_retention(namespace, self._chain, len(self._chain), groups, self._retention)
            grant.end()
            self._leave_out(grant.refused)
        await self._reserve(header.first_block)
        if self._known < header.first_block:
            self.give_back()
            raise PreconditionError(
                f"the stream begins at block {header.first_block}, but only {self._known} blocks before it are cached; "
                f"begin at block {self._known} or earlier"
            )
        self._stream.expect(len(self._chain) - header.first_block, sum(self._sizes))

    async def store(self) -> pb.PutResponse:
        """Stores the bytes, window by window.

        Raises:
            PrefixdError: the stream has too few bytes or too many, or the session has ended.
        """
        with self._records.store("Put", self._session, self._namespace, StageName.FILL) as record:
            record.prompt_tokens = self._chain.tokens
            stored = await self._store()
            record.blocks = stored.committed
            return stored

    async def _store(self) -> pb.PutResponse:
        first = at = self._header.first_block
        total, block_bytes = len(self._chain), sum(self._sizes)
        committed = duplicates = 0
        durable = False
        while self._known >= at:  # else blocks that were just committed are evicted: the prompt has no room
            self._set_deadline((self._known - at) * block_bytes)
            await self._stream.skip((self._known - at) * block_bytes)
            duplicates += self._known - at
            at = self._known
            if self._window is None:
                if self._retention:
                    try:
                        await self._cache.retain(self._namespace, self._chain, self._retention)
                    except ExhaustedError as error:
                        self._leave_out(str(error))
                break
            await self._fill(self._window)
            at += len(self._window.slots)
            durable = self._header.durable and at == total
            new, old = await self._commit(durable)
            committed, duplicates = committed + new, duplicates + old
            if at == total:
                break
            try:
                await self._reserve(at)
            except ExhaustedError:
                break
        self.give_back()
        await self._stream.skip((total - at) * block_bytes)
        await self._stream.finish()
        if self._header.durable and not durable:  # blocks that were evicted meanwhile do not count
            there = max(await self._cache.persist(self._namespace, self._chain) - first, 0)
            committed = min(committed, there)
            duplicates = min(duplicates, there - committed)
        return pb.PutResponse(committed=committed, duplicates=duplicates, retention_refused=self._retention_refused)

    def give_back(self) -> None:
        """Ends the reservation that is not committed."""
        window, self._window = self._window, None
        give_back(self._cache, window)

    def _leave_out(self, refused: str) -> None:
        """Leaves out all priorities if they were refused for the reason `refused` (empty: they were granted)."""
        if refused:
            self._retention, self._retention_refused = [], refused

    async def _reserve(self, first_block: int) -> None:
        """Reserves slots for the next blocks that are not cached."""
        reservation = await deliver(
            self._cache.reserve(
                self._session,
                self._namespace,
                self._chain,
                ToFill(
                    self._parts,
                    first_block,
                    max_blocks=max(1, WINDOW_BYTES // sum(map(round_to_slot, self._sizes))),
                    ttl_s=self._cache.leases.max_ttl_s,
                    by_daemon=True,
                ),
            ),
            partial(give_back, self._cache),
        )
        if isinstance(reservation, Reservation):
            self._window, self._known = reservation, reservation.first_block
        else:
            self._window, self._known = None, reservation

    async def _fill(self, window: Reservation) -> None:
        """Copies the next bytes into the window's slots; for the last window, waits for the stream's end."""
        leases, arena, pacer = self._cache.leases, self._cache.tiers.arena, Pacer()
        for index, slot in enumerate(window.slots.ravel().tolist()):
            size, filled = self._sizes[index % len(self._sizes)], 0
            while filled < size:
                data = await self._stream.some(size - filled)
                leases.find(window.session, window.id)  # if it ended while we waited, its slots are another's
                arena.array(slot, size)[filled : filled + len(data)] = data
                filled += len(data)
                await pacer.worked(_PART_WORK + len(data) // _COPIED_AS_A_PIECE)
        if window.first_block + len(window.slots) == len(self._chain):
            await self._stream.finish()
        self._stream.until_s = None

    async def _commit(self, durable: bool) -> tuple[int, int]:
        window, self._window = self._window, None
        if window is None:
            return 0, 0
        commit = self._cache.commit(window, len(window.slots), durable=durable, retention=self._retention)
        try:
            return await asyncio.shield(outlive(commit))
        finally:
            self._leave_out(window.retention_refused)

    def _set_deadline(self, before: int) -> None:
        """Sets the time until which the window must be full, behind `before` bytes that are skipped."""
        if self._window is not None:
            nbytes = before + len(self._window.slots) * sum(self._sizes)
            self._stream.until_s = asyncio.get_running_loop().time() + SILENCE_S + nbytes / LEAST_BYTES_PER_S


class _Stream:
    """The messages of a Put: a header, then a known number of bytes.

    Attributes:
        until_s: the time until which the present window must be full, by the loop's clock; None without a window.
    """

    def __init__(self, requests: AsyncIterator[pb.PutRequest]) -> None:
        self.until_s: float | None = None
        self._requests = aiter(requests)
        self._left: npt.NDArray[np.uint8] = np.empty(0, np.uint8)  # of the last message
        self._received = self._blocks = self._block_bytes = 0

    async def header(self) -> pb.PutHeader:
        """Reads the first message."""
        first = await self._next()
        if first is None or first.WhichOneof("content") != "header":
            raise InvalidArgumentError("the first message of Put has no header; send the header, then the data")
        return first.header

    def expect(self, blocks: int, block_bytes: int) -> None:
        """Sets the number of bytes that the stream must have."""
        self._blocks, self._block_bytes = blocks, block_bytes

    async def some(self, most: int) -> npt.NDArray[np.uint8]:
        """Returns the next bytes, at least one and at most `most`."""
        while not len(self._left):
            if not await self._read():
                raise self._wrong_length()
        data, self._left = self._left[:most], self._left[most:]
        return data

    async def skip(self, nbytes: int) -> None:
        """Skips bytes without slots."""
        while nbytes:
            nbytes -= len(await self.some(nbytes))

    async def finish(self) -> None:
        """Waits for the end of the stream. Raises InvalidArgumentError if it has more bytes."""
        while not len(self._left):
            if not await self._read():
                return
        raise self._wrong_length()

    async def _read(self) -> bool:
        """Reads the next message, which may be empty; returns False at the end."""
        message = await self._next()
        if message is None:
            return False
        if message.WhichOneof("content") != "data":
            raise InvalidArgumentError("a message of Put after the first has no data; send one header only")
        self._left = np.frombuffer(message.data, np.uint8)
        self._received += len(self._left)
        return True

    async def _next(self) -> pb.PutRequest | None:
        silent_s = asyncio.get_running_loop().time() + SILENCE_S
        slow = self.until_s is not None and self.until_s < silent_s
        try:
            async with asyncio.timeout_at(self.until_s if slow else silent_s):
                return await anext(self._requests, None)
        except TimeoutError:
            why = f"it has less than {LEAST_BYTES_PER_S} bytes a second" if slow else f"silent for {SILENCE_S:g} s"
            raise TooSlowError(
                f"the stream is given up after {self._received} bytes ({why}), so that others get what was reserved "
                "for it; send what is not cached again"
            ) from None

    def _wrong_length(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"the stream had {self._received} bytes, but {self._blocks} blocks of {self._block_bytes} bytes are "
            f"{self._blocks * self._block_bytes}; send whole blocks"
        )


def give_back(cache: TieredCache, grant: Lease | Reservation | int | None) -> None:
    """Ends a grant of a caller that has gone, unless it has ended with its session. Ignores other values."""
    if isinstance(grant, Lease | Reservation) and grant.id in grant.session.grants:
        cache.release(grant.session, grant.id)
