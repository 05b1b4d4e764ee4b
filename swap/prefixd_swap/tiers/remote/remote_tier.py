"""The remote tier: blocks in a store that other hosts read and write, too.

The store names its objects by content, so the tier allocates no slots. In the index a slot of this tier is a number,
which stands for the block's digest (`names`) in this process.

All calls of the store run on an event loop of their own, in a thread: a client library's work on a megabyte must not
hold the daemon's loop. Codecs work in other threads, so that they do not hold the store's loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from prefixd_swap.errors import (
    BadObjectError,
    IntegrityError,
    OutOfMemoryError,
    RemoteStoreError,
    StorageError,
)
from prefixd_swap.stores.base import NAME_BYTES, ObjectStore
from prefixd_swap.stores.names import DIGEST_BYTES, BlockIdentity
from prefixd_swap.threads import started_threads
from prefixd_swap.tiers.base import NO_SLOT, Int64s, Tier
from prefixd_swap.tiers.block_transfer import BlockTransfer
from prefixd_swap.tiers.remote.remote_parts import PartRead, RemotePart
from prefixd_swap.tiers.remote.store_loop import StoreLoop
from prefixd_swap.transfers import DeviceLimits, Piece, Transfers, Urgency, piece_items

if TYPE_CHECKING:  # they need packages that only a remote tier needs
    from prefixd_swap.stores.sealed import Seal
    from prefixd_swap.tiers.remote.part_objects import PartObject

T = TypeVar("T")

PIECE_BYTES = 1 << 20
_LEAST_BYTES_PER_S = 1 << 20
"""A slower store is out of service: the deadline of a call grows with its bytes at this rate."""
_RESERVED = 2  # pieces that only demand may start
_CODING_THREADS = 2

BlockParts = tuple[PartRead, ...]
"""What was read of a block's parts."""


@dataclass(frozen=True, slots=True)
class RemoteLoad:
    """Parts of a block to read into their memory."""

    block: BlockIdentity
    parts: tuple[RemotePart, ...]


@dataclass(frozen=True, slots=True)
class RemoteSave:
    """Parts of a block to write."""

    block: BlockIdentity
    parts: tuple[RemotePart, ...]


class RemoteTier(Tier):
    """Blocks in a shared store. Closing the tier closes the store.

    Args:
        store: has the objects.
        transfers: orders and limits the pieces; a device and two paths are added to it.
        seal: makes and verifies objects.
        name: see `Tier`.
        level: see `Tier`.
        timeout_s: the time for a call, plus the time of its bytes at 1 MiB/s.
        ttl_s: the store keeps an object for this time; 0: until it evicts the object.
        in_flight: pieces under way at a time of all urgencies; two more are for demand alone.

    Raises:
        OutOfMemoryError: the system gives this process no more threads.
    """

    addressable = False
    on_device = False
    durable = True
    shared = True

    def __init__(
        self,
        store: ObjectStore,
        transfers: Transfers,
        seal: Seal,
        *,
        name: str = "remote",
        level: int = 3,
        timeout_s: float = 1.0,
        ttl_s: float = 0.0,
        in_flight: int = 4,
    ) -> None:
        super().__init__(name, level)
        self.store = store
        self.transfers = transfers
        self.ttl_s = ttl_s
        self.writable = True
        """Whether blocks are written to it; False from a failure until a probe succeeds."""
        self.readable = True
        """Whether it is asked for blocks and read; likewise."""
        self.on_failure: Callable[[RemoteStoreError, bool], None] = lambda error, writing: None
        """Called at once with the error of a call, and whether it was a write; it may set `readable` to False."""
        self.bad_objects: Counter[str] = Counter()
        """Objects that were read and must not be used, by kind."""
        self.read_bytes = 0
        """Bytes of parts read since the start, as the store has them."""
        self.written_bytes = 0
        """Bytes of parts written since the start, as the store has them."""
        self.saved_bytes = 0
        """Bytes by which codecs have made these fewer."""
        self.refused: Counter[str] = Counter()
        """Parts that were written as they are though a codec was chosen, by reason."""
        self.seal = seal
        self._timeout_s = timeout_s
        self._parallel = in_flight
        self._digests = np.empty((0, DIGEST_BYTES), np.uint8)
        self._parts = array("i")  # for each number, the slots in the index that have it
        self._free = array("q")
        transfers.add_device(name, DeviceLimits(in_flight=in_flight + _RESERVED, reserved=_RESERVED), threads=False)
        transfers.add_path(self.read_path, name)
        transfers.add_path(self.write_path, name, max(1, in_flight // 2))
        self._coders: ThreadPoolExecutor | None = None
        self._loop = StoreLoop(f"prefixd-{name}")

    @property
    def read_path(self) -> str:
        return f"{self.name} read"

    @property
    def write_path(self) -> str:
        return f"{self.name} write"

    @property
    def capacity_bytes(self) -> int:
        """0: the store's size is not known here."""
        return 0

    @property
    def used_bytes(self) -> int:
        """0: what others have there is not known here."""
        return 0

    # -- numbers that stand for digests ---------------------------------------------------------------------------

    def enter(self, digests: Sequence[bytes], parts: Int64s) -> Int64s:
        """Numbers for blocks with these digests: the slots of their parts in the index, until `free`.

        Args:
            digests: [m].
            parts: [m]: number of parts of each block that are entered, 1 or more.
        """
        count = len(digests)
        while len(self._free) < count:
            used = len(self._parts)
            larger = max(1024, 2 * used)
            grown = np.empty((larger, DIGEST_BYTES), np.uint8)
            grown[:used] = self._digests
            self._digests = grown
            self._parts.extend([0] * (larger - used))
            self._free.extend(range(larger - 1, used - 1, -1))
        numbers = np.array(self._free[len(self._free) - count :], np.int64)
        del self._free[len(self._free) - count :]
        self._digests[numbers] = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)
        for number, of_block in zip(numbers.tolist(), parts.tolist(), strict=True):
            self._parts[number] = of_block
        return numbers

    def add_parts(self, numbers: Int64s, parts: Int64s) -> None:
        """Count more entered parts of blocks that have a number."""
        for number, more in zip(numbers.tolist(), parts.tolist(), strict=True):
            self._parts[number] += more

    def free(self, slots: Int64s) -> None:
        """Uncount slots that the index no longer names; `NO_SLOT` is ignored."""
        for number in slots[slots != NO_SLOT].tolist():
            self._parts[number] -= 1
            if not self._parts[number]:
                self._free.append(number)

    @property
    def entered_parts(self) -> int:
        """Slots in the index that are a number of this tier."""
        return sum(self._parts)

    def digest(self, number: int) -> bytes:
        """The digest that a number stands for."""
        digest: bytes = self._digests[number].tobytes()
        return digest

    def check_integrity(self) -> None:
        free = set(self._free.tolist())
        named = {number for number, parts in enumerate(self._parts) if parts}
        if len(free) != len(self._free) or free & named or len(free) + len(named) != len(self._parts):
            raise IntegrityError(
                f"{len(self._parts)} numbers of the {self.name} tier, of which {len(named)} are in use and "
                f"{len(self._free)} free"
            )

    # -- blocks ---------------------------------------------------------------------------------------------------

    async def exist(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each object is in the store; see `object_name`.

        Raises:
            RemoteStoreError: the store does not answer in time.
        """
        return await self._loop.run(lambda: self.store.exists(names, self._timeout_s))

    async def delete(self, names: Sequence[bytes]) -> None:
        """Deletes objects, which other hosts may be using; unknown ones are ignored.

        Raises:
            RemoteStoreError: some may still be there.
        """
        await self._loop.run(lambda: self.store.delete(names, self._deadline_s(len(names) << 10)))

    def submit_read(
        self, loads: Sequence[RemoteLoad], nbytes: int, urgency: Urgency, *, deadline_s: float | None = None
    ) -> BlockTransfer[BlockParts | StorageError]:
        """Starts to read and verify blocks of `nbytes` bytes each; the result of each is what was read, or its error.

        `LostBytesError`: an object is gone. `BadObjectError`: the object is not the block's. After an error there is
        garbage at the block's addresses. The memory must stay until the transfer has ended.
        """
        step = piece_items(nbytes, len(loads), at_least=self._parallel, most_bytes=PIECE_BYTES)
        pieces: Iterator[tuple[int, Piece[list[BlockParts | StorageError]]]] = (
            (len(some), Piece(len(some) * nbytes, partial(self._read, some), True))
            for some in (loads[start : start + step] for start in range(0, len(loads), step))
        )
        return BlockTransfer(
            self.transfers,
            self.read_path,
            pieces,
            urgency,
            blocks=len(loads),
            nbytes=len(loads) * nbytes,
            count=-(-len(loads) // step),
            deadline_s=deadline_s,
        )

    def submit_write(
        self, saves: Iterable[RemoteSave], nbytes: int, urgency: Urgency, *, count: int
    ) -> BlockTransfer[bool]:
        """Starts to write `count` blocks of `nbytes` bytes each, piece after piece; True for each that is stored.

        The bytes must not change until the transfer has ended.
        """
        step, given = piece_items(nbytes, count, most_bytes=PIECE_BYTES), iter(saves)
        pieces: Iterator[tuple[int, Piece[list[bool]]]] = (
            (len(some), Piece(len(some) * nbytes, partial(self._write, some), True))
            for some in (list(islice(given, min(step, count - start))) for start in range(0, count, step))
        )
        return BlockTransfer(
            self.transfers,
            self.write_path,
            pieces,
            urgency,
            blocks=count,
            nbytes=count * nbytes,
            count=-(-count // step),
            in_order=True,
        )

    async def try_out(self) -> None:
        """Check that the store answers, also to `exist`, which every prompt calls.

        Raises:
            RemoteStoreError: it does not.
        """
        await self._loop.run(lambda: self.store.ping(self._timeout_s))
        await self.exist([bytes(NAME_BYTES)])

    async def close(self) -> None:
        """Closes the store and ends the threads; every call must have returned."""
        await self._loop.close(self.store.close)
        if self._coders is not None:
            self._coders.shutdown()

    async def _read(self, loads: Sequence[RemoteLoad]) -> list[BlockParts | StorageError]:
        if not self.readable:  # after one failed piece, the others do not wait for their deadlines
            raise RemoteStoreError(f"{self.store.address} is out of service")
        try:
            return await self._loop.run(lambda: self._read_there(loads))
        except RemoteStoreError as error:
            self.on_failure(error, False)
            raise

    async def _read_there(self, loads: Sequence[RemoteLoad]) -> list[BlockParts | StorageError]:
        """On the store's loop."""
        from prefixd_swap.tiers.remote.part_objects import open_object, read_of_part

        parts = [(load.block, part) for load in loads for part in load.parts]
        reads = [read_of_part(self.seal, block, part) for block, part in parts]
        came = await self.store.get(reads, self._deadline_s(sum(part.span.nbytes for _, part in parts)))
        self.read_bytes += sum(nbytes - self.seal.head_bytes for nbytes in came if nbytes is not None)
        opened = iter(
            await self._each(
                [
                    (part.coding is not None, partial(open_object, self.seal, block, part, read, nbytes))
                    for (block, part), read, nbytes in zip(parts, reads, came, strict=True)
                ]
            )
        )
        return [self._outcome(list(islice(opened, len(load.parts)))) for load in loads]

    def _outcome(self, opened: Sequence[PartRead | StorageError]) -> BlockParts | StorageError:
        parts = []
        for part in opened:
            if isinstance(part, StorageError):
                if isinstance(part, BadObjectError):
                    self.bad_objects[part.kind] += 1
                return part
            parts.append(part)
        return tuple(parts)

    async def _each(self, works: Sequence[tuple[bool, Callable[[], T]]]) -> list[T | StorageError]:
        """The result or error of each of `works`: what a codec does, (True, work), runs in a thread.

        All have ended when this returns, since they use memory of the caller.
        """
        threads, loop = self._threads() if any(coded for coded, _ in works) else None, asyncio.get_running_loop()
        running = [
            _result(work) if threads is None or not coded else loop.run_in_executor(threads, _result, work)
            for coded, work in works
        ]
        if waiting := [each for each in running if isinstance(each, asyncio.Future)]:
            await asyncio.wait(waiting)
        return [each.result() if isinstance(each, asyncio.Future) else each for each in running]

    def _threads(self) -> ThreadPoolExecutor | None:
        """Those of the codecs; None while the system gives none: then the store's loop has to do it."""
        if self._coders is None:
            with suppress(OutOfMemoryError):
                self._coders = started_threads(_CODING_THREADS, f"prefixd-{self.name}-codecs")
        return self._coders

    async def _write(self, saves: Sequence[RemoteSave]) -> list[bool]:
        try:
            return await self._loop.run(lambda: self._write_there(saves))
        except RemoteStoreError as error:
            self.on_failure(error, True)
            raise

    async def _write_there(self, saves: Sequence[RemoteSave]) -> list[bool]:
        """On the store's loop."""
        from prefixd_swap.tiers.remote.part_objects import make_object

        parts = [(save.block, part) for save in saves for part in save.parts]
        works = [(part.coding is not None, partial(make_object, self.seal, block, part)) for block, part in parts]
        objects: list[PartObject] = []
        for made in await self._each(works):
            if isinstance(made, StorageError):
                raise made
            objects.append(made)
        nbytes = sum(each.nbytes for each in objects)
        await self.store.put([each.write for each in objects], self.ttl_s, self._deadline_s(nbytes))
        self.written_bytes += nbytes
        self.saved_bytes += sum(part.span.nbytes for _, part in parts) - nbytes
        self.refused.update(each.refused for each in objects if each.refused)
        return [True] * len(saves)

    def _deadline_s(self, nbytes: int) -> float:
        return self._timeout_s + nbytes / _LEAST_BYTES_PER_S


def _result(work: Callable[[], T]) -> T | StorageError:
    try:
        return work()
    except StorageError as error:
        return error
