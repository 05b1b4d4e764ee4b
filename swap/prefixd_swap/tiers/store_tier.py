"""Tiers that are read and written by calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import final

from prefixd_swap.codecs.coding import Decoded
from prefixd_swap.errors import StorageError, SwapError
from prefixd_swap.sealing.rest_keys import RestKey, RestKeys
from prefixd_swap.slab.index.block_record import BlockRecord, DiskPart, NewBlock
from prefixd_swap.slab.index.record_columns import Encryption, Records
from prefixd_swap.tiers.base import Int64s, Tier, UInt32s, UInt64s
from prefixd_swap.tiers.block_transfer import BlockTransfer
from prefixd_swap.tiers.memory import MemoryTier
from prefixd_swap.transfers import PIECE_BYTES, DeviceLimits, Piece, Transfers, Urgency, piece_items

READ_PIECE_BYTES = 1 << 20
"""The most that one piece reads, except a single block. Pieces of writes are larger: each one costs a sync."""

Identity = tuple[bytes, bytes]
"""Namespace id (8 bytes) and block key (16 bytes): a block's name in a store."""

Places = tuple[DiskPart | None, ...]
"""Each part of a block in a store; None for a part that was not given."""


@dataclass(frozen=True, slots=True)
class Loads:
    """n blocks to read from a store into memory, in columns."""

    slots: Int64s
    """[n, p]: the parts' slots in the store; NO_SLOT for parts not to read."""
    checksums: UInt64s
    """[n, p]: xxh3_64 of what is stored of each part."""
    addresses: Int64s
    """[n, p]: where to put the bytes, in memory that a CPU can address."""
    nbytes: tuple[int, ...]
    """[p]: bytes of each part, decoded."""
    coded: UInt32s | None = None
    """[n, p]: stored bytes of each part that is coded, 0 for a raw one; None: all are raw."""
    names: Sequence[Identity] | None = None
    """[n]: the blocks' names; needed where some are encrypted."""
    parts: tuple[int, ...] | None = None
    """[p]: the parts' numbers in their block, likewise."""

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, rows: slice) -> Loads:
        """A slice; views, no copies."""
        coded = None if self.coded is None else self.coded[rows]
        names = None if self.names is None else self.names[rows]
        arrays = self.slots[rows], self.checksums[rows], self.addresses[rows]
        return Loads(*arrays, self.nbytes, coded, names, self.parts)


DecodedParts = tuple[Decoded | None, ...]
"""Of each part of a block what was decoded; None for a raw part, or one that was not read."""
BlockRead = StorageError | DecodedParts | None
"""The outcome of reading a block: its error, or what was decoded, None if all its parts are raw."""


class StoreTier(Tier):
    """A tier that is read and written by calls, in pieces on its own two paths of `Transfers`.

    The caller orders writes and removals of one block: transfers of different urgency may overtake each other.

    Args:
        name: the tier's and its device's; see `Tier`.
        level: see `Tier`.
        transfers: orders and limits the pieces; gets the device and its two paths.
        limits: of the device, for reads and writes together.
        writes: the most write and removal calls under way at once.
        threads: whether the pieces run in threads.

    Raises:
        OutOfMemoryError: the system gives this process no more threads.
    """

    addressable = False
    on_device = False
    shared = False

    def __init__(
        self, name: str, level: int, transfers: Transfers, limits: DeviceLimits, *, writes: int, threads: bool
    ) -> None:
        super().__init__(name, level)
        self.writable = True
        """Whether blocks are written to it; False from a failure until a probe succeeds."""
        self.readable = True
        """Whether blocks are read from it; likewise."""
        self.keys = RestKeys()
        """Encrypt and decrypt blocks; a tier without keys keeps all in clear."""
        self.least_piece_bytes = 0
        """A separate write should have at least these bytes, unless nothing more is to be written."""
        self.transfers = transfers
        self._parallel = limits.in_flight
        transfers.add_device(name, limits, threads=threads)
        transfers.add_path(self.read_path, name)
        transfers.add_path(self.write_path, name, min(writes, limits.in_flight))

    @property
    def read_path(self) -> str:
        return f"{self.name} read"

    @property
    def write_path(self) -> str:
        return f"{self.name} write"

    # -- blocks, as transfers -------------------------------------------------------------------------------------

    @final
    def submit_read(
        self, loads: Loads, urgency: Urgency, *, deadline_s: float | None = None
    ) -> BlockTransfer[BlockRead]:
        """Starts to read blocks, decode them, and verify them at their addresses.

        After an error there is garbage at the block's addresses. The memory must stay until the transfer has ended.
        """
        nbytes = sum(loads.nbytes)
        step = piece_items(nbytes, len(loads), at_least=self._parallel, most_bytes=READ_PIECE_BYTES)
        pieces = (
            (len(some), self._read_piece(some, len(some) * nbytes))
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

    @final
    def submit_write(
        self,
        blocks: Iterable[NewBlock],
        urgency: Urgency,
        *,
        count: int,
        nbytes: int,
        piece_bytes: int = PIECE_BYTES,
        deadline_s: float | None = None,
    ) -> BlockTransfer[Places | None]:
        """Starts to store blocks durably, piece by piece; the result is each block's places, or None without room.

        If a piece fails, its blocks and all later ones get its error, and none of them is stored.

        Args:
            blocks: taken when their piece starts, parents before children; their bytes must not change until the
                transfer has ended. A stored block is replaced; none may be given twice.
            urgency: see `Urgency`.
            count: number of blocks.
            nbytes: bytes of one block.
            piece_bytes: the most that one piece writes, except a single block; each piece costs syncs.
            deadline_s: when the transfer should end.
        """
        step = piece_items(nbytes, count, most_bytes=piece_bytes)
        given = iter(blocks)
        pieces = (
            (len(some), self._write_piece(some, len(some) * nbytes))
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
            deadline_s=deadline_s,
            in_order=True,
        )

    @final
    def submit_verify(
        self, expected: Sequence[BlockRecord], nbytes: int, urgency: Urgency = Urgency.SCRUB
    ) -> BlockTransfer[StorageError | None]:
        """Starts to verify stored blocks; the result is the error of each damaged or missing block, or None.

        After `IndexUnavailableError` the block's state is unknown.

        Args:
            expected: the records that the blocks must have.
            nbytes: bytes of one block.
            urgency: see `Urgency`.
        """
        step = piece_items(nbytes, len(expected), most_bytes=READ_PIECE_BYTES)
        pieces = (
            (len(some), self._verify_piece(some, len(some) * nbytes))
            for some in (expected[start : start + step] for start in range(0, len(expected), step))
        )
        return BlockTransfer(
            self.transfers,
            self.read_path,
            pieces,
            urgency,
            blocks=len(expected),
            nbytes=len(expected) * nbytes,
            count=-(-len(expected) // step),
        )

    @abstractmethod
    def _read_piece(self, loads: Loads, nbytes: int) -> Piece[list[BlockRead]]:
        """A piece that reads `loads`, `nbytes` bytes in all."""

    @abstractmethod
    def _write_piece(self, blocks: list[NewBlock], nbytes: int) -> Piece[list[Places | None]]:
        """A piece that stores `blocks`, all at once or, if it raises a StorageError, none."""

    @abstractmethod
    def _verify_piece(self, expected: Sequence[BlockRecord], nbytes: int) -> Piece[list[StorageError | None]]:
        """A piece that verifies blocks."""

    # -- blocks, from beginning to end ----------------------------------------------------------------------------

    @final
    async def read(self, loads: Loads, urgency: Urgency) -> list[DecodedParts | SwapError | None]:
        """Reads blocks as `submit_read` does and waits for the end, as `BlockTransfer.finish` does."""
        return await self.submit_read(loads, urgency).finish()

    @final
    async def write(self, blocks: Sequence[NewBlock], urgency: Urgency) -> list[Places | SwapError | None]:
        """Writes blocks as `submit_write` does and waits for the end, as `BlockTransfer.finish` does."""
        sizes = [sum(part.nbytes for part in block.parts if part is not None) for block in blocks]
        return await self.submit_write(blocks, urgency, count=len(blocks), nbytes=max(sizes, default=0)).finish()

    @final
    async def verify(self, expected: Sequence[BlockRecord], nbytes: int) -> list[SwapError | None]:
        """Verifies blocks as `submit_verify` does and waits for the end, as `BlockTransfer.finish` does."""
        return await self.submit_verify(expected, nbytes).finish()

    @abstractmethod
    async def remove(self, names: Sequence[Identity], urgency: Urgency, *, damaged: bool = False) -> None:
        """Removes blocks, children before parents; unknown ones are ignored. Returns when that is durable.

        Args:
            names: the blocks.
            urgency: see `Urgency`.
            damaged: their records are damaged and may name other blocks' slots: slots that then have no record are
                freed by `revive`.

        Raises:
            StorageError: I/O failed; some or all of the blocks are still there.
        """

    @abstractmethod
    async def drop_parts(self, parts: Sequence[tuple[bytes, bytes, Collection[int]]], urgency: Urgency) -> None:
        """Removes some parts of blocks that stay. Returns when that is durable.

        Args:
            parts: of each block its namespace id, its key, and the parts' numbers.
            urgency: see `Urgency`.

        Raises:
            StorageError: I/O failed; some or all of the parts are still there.
        """

    @abstractmethod
    def room(self, nbytes: int) -> int:
        """How many more parts of `nbytes` bytes each could be written now."""

    # -- what is stored -------------------------------------------------------------------------------------------

    @abstractmethod
    def load(self) -> Records:
        """All blocks, in columns. Blocks the caller: for the start.

        Raises:
            StorageError: the index cannot be read.
        """

    @abstractmethod
    def namespaces(self) -> dict[bytes, bytes]:
        """All namespaces: encoded specs by id. Blocks the caller: for the start."""

    @abstractmethod
    def discard(self, names: Sequence[Identity], reason: str) -> None:
        """Removes unusable blocks, for `reason`; a copy of the index before it is set aside. Blocks the caller: for the
        start.

        Raises:
            StorageError: the copy cannot be made, or I/O failed; some or all of the blocks are still there.
        """

    @abstractmethod
    def forget(self, names: Sequence[Identity], parts: Sequence[tuple[bytes, bytes, int]]) -> None:
        """Removes good blocks that are not wanted any more, children before parents, and the bytes of others, whose
        records stay. Blocks the caller: for the start.

        Args:
            names: blocks to remove.
            parts: of the others their namespace id, their key, and how many parts they have.

        Raises:
            StorageError: I/O failed; some or all of it is still there.
        """

    @abstractmethod
    def discard_namespaces(self, namespaces: Collection[bytes]) -> None:
        """As `remove_namespaces`, and blocks the caller: for the start."""

    @abstractmethod
    async def encryption(self) -> Encryption:
        """Which keys encrypt the blocks.

        Raises:
            StorageError: the index cannot be read.
        """

    @abstractmethod
    def reseal_namespaces(self, encryption: Mapping[bytes, RestKey | None]) -> None:
        """Encrypts specs of namespaces with other keys, None: stores them in clear. Blocks the caller: for the start.

        Raises:
            StorageError: I/O failed.
        """

    @abstractmethod
    async def put_namespace(self, namespace: bytes, spec: bytes, encryption: RestKey | None = None) -> None:
        """Stores a namespace's encoded spec durably, encrypted if there is a key.

        Raises:
            StorageError: I/O failed.
        """

    @abstractmethod
    async def remove_namespaces(self, namespaces: Collection[bytes]) -> None:
        """Removes namespaces without blocks durably; unknown ones are ignored.

        Raises:
            StorageError: I/O failed.
        """

    @abstractmethod
    async def pin(self, names: Sequence[Identity], pinned: bool) -> int:
        """Pins or unpins blocks durably; returns the number of them that are stored.

        Blocks that are not stored are ignored. A pin is removed with its block.

        Raises:
            StorageError: I/O failed; some or all of the pins are as they were.
        """

    @abstractmethod
    def pins(self) -> list[Identity]:
        """Every block that is pinned. Blocks the caller: for the start.

        Raises:
            StorageError: the index cannot be read.
        """

    # -- failures -------------------------------------------------------------------------------------------------

    @abstractmethod
    async def try_read(self) -> None:
        """Checks that the device can be read.

        Raises:
            StorageError: it cannot.
        """

    @abstractmethod
    async def try_write(self) -> None:
        """Checks that the index accepts changes.

        Raises:
            StorageError: it does not.
        """

    @abstractmethod
    async def audit(self) -> Records | None:
        """Every record as of now, records without a parent included; checks slots as `check_integrity` does.

        None from a commit of unknown outcome until `revive`.

        Raises:
            IntegrityError: the accounting contradicts itself.
            StorageError: the index cannot be read.
        """

    @abstractmethod
    async def revive(self, known: Int64s) -> Int64s:
        """Checks that it accepts writes again, and cleans up after failed ones.

        Args:
            known: all slots of blocks that the caller considers stored. It must not write or remove meanwhile.

        Returns:
            Those of `known` that are not stored: the bytes are lost.

        Raises:
            StorageError: it still refuses; try again later.
        """

    @abstractmethod
    async def lost_slots(self) -> Int64s:
        """Slots whose bytes are gone.

        Raises:
            StorageError: a file cannot be inspected.
        """

    @abstractmethod
    async def has_shrunk(self) -> bool:
        """Whether the file system has refused a slab within the capacity, and has not gained room for one since."""

    @abstractmethod
    def close(self) -> None:
        """Ends the threads of this object; every call must have returned."""


def can_move(source: Tier, target: Tier) -> bool:
    """Whether blocks move between the tiers directly: a store reads and writes only memory that a CPU can address."""
    if isinstance(source, MemoryTier) and isinstance(target, MemoryTier):
        return True
    memory = source if isinstance(source, MemoryTier) else target
    return isinstance(memory, MemoryTier) and memory.addressable
