"""Copies between two memory tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from prefixd_swap.block_layers import BlockLayers
from prefixd_swap.copies.address_columns import AddressColumns
from prefixd_swap.copies.copy_engine import CopyEngine
from prefixd_swap.copies.row_columns import RowColumns
from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.padded_rows import PaddedRows
from prefixd_swap.tiers.base import NO_SLOT, Int64s
from prefixd_swap.tiers.block_transfer import BlockTransfer
from prefixd_swap.tiers.memory import MemoryTier
from prefixd_swap.transfers import PIECE_BYTES, DeviceLimits, Piece, Transfers, Urgency, piece_items

LIMITS = DeviceLimits(in_flight=3, reserved=1)
"""A copy is listed while the one before runs; a third slot stays free for demand."""
COPY_PIECE_BYTES = 32 << 20
"""A piece costs the event loop 0.1 ms, in which a GPU copies 5 MB: on an H200, pieces of PIECE_BYTES came to 18 and
24 GB/s, these to 49 and 50. Demand waits for two under way: 1.4 ms instead of 0.7 (`benchmarks.gpu`)."""


class MemoryCopies:
    """Moves blocks between memory tiers, each direction on a device of its own: a GPU copies both ways at once.

    Args:
        engine: copies the bytes; the caller closes it.
        transfers: orders and limits the pieces.
        limits: the limits of each direction.
        piece_bytes: the most bytes of a piece of several blocks (`piece_items`). A piece that starts before more urgent
            ones has at most PIECE_BYTES.
    """

    def __init__(
        self,
        engine: CopyEngine,
        transfers: Transfers,
        *,
        limits: DeviceLimits = LIMITS,
        piece_bytes: int = COPY_PIECE_BYTES,
    ) -> None:
        self._engine = engine
        self._transfers = transfers
        self._limits = limits
        self._piece_bytes = piece_bytes

    @staticmethod
    def path(source: MemoryTier, target: MemoryTier) -> str:
        """The path of a direction, for example "gpu to cpu"."""
        return f"{source.name} to {target.name}"

    def submit(
        self,
        source: MemoryTier,
        out: Int64s,
        target: MemoryTier,
        into: Int64s,
        nbytes: Sequence[int],
        urgency: Urgency,
        *,
        deadline_s: float | None = None,
        padded: Sequence[PaddedRows | None] = (),
    ) -> BlockTransfer[None]:
        """Starts to copy n blocks of p parts.

        Args:
            source: the tier to copy from.
            out: the slots in it, [n, p].
            target: the tier to copy to.
            into: the slots in it, [n, p]. A part with NO_SLOT on either side is not copied.
            nbytes: bytes of each part, [p].
            urgency: see `Urgency`.
            deadline_s: time at which the blocks are needed.
            padded: of each part, [p], how its `nbytes` bytes lie in the nearer of the two tiers, where they are padded;
                the other one has them packed. None: alike in both.

        Raises:
            MemoryMisuseError: the arrays have different shapes, or a slot lies outside its tier.
        """
        if out.shape != into.shape or out.shape[1:] != (len(nbytes),):
            raise MemoryMisuseError(
                f"slots {out.shape} cannot be copied to slots {into.shape} in parts of {list(nbytes)} bytes; give two "
                "arrays [blocks, parts]"
            )
        path = self._add_path(source, target)
        blocks, block_bytes = len(out), sum(nbytes)
        at_least = self._limits.in_flight
        small = piece_items(block_bytes, blocks, at_least=at_least, most_bytes=min(PIECE_BYTES, self._piece_bytes))
        large = piece_items(block_bytes, blocks, at_least=at_least, most_bytes=self._piece_bytes)
        large -= large % small
        there = (out != NO_SLOT) & (into != NO_SLOT)
        sources, targets = source.addresses(out), target.addresses(into)

        sizes = np.broadcast_to(np.array(nbytes, np.int64), there.shape)

        turn = RowColumns.unpack if target.level < source.level else RowColumns.pack

        async def copy_rows(rows: slice) -> list[None]:
            copies: list[RowColumns] = []
            for part, size in enumerate(nbytes):
                present = there[rows, part]
                to, at = targets[rows, part][present], sources[rows, part][present]
                columns = AddressColumns(to, at, np.full(len(to), size), target.on_device, source.on_device)
                copies += turn(columns, padded[part] or PaddedRows(size, size, size))
            await self._engine.copy_rows(copies)
            return [None] * len(there[rows])

        async def copy(rows: slice) -> list[None]:
            present = there[rows]
            to, at, each = targets[rows][present], sources[rows][present], sizes[rows][present]
            await self._engine.copy_columns(AddressColumns(to, at, each, target.on_device, source.on_device))
            return [None] * len(present)

        def pieces() -> Iterator[tuple[int, Piece[list[None]]]]:
            start = 0
            while start < blocks:
                count = min(small if self._transfers.out_of_turn(path) else large, blocks - start)
                work = partial(copy_rows if any(padded) else copy, slice(start, start + count))
                yield count, Piece(count * block_bytes, work, True, -(-count // small))
                start += count

        return BlockTransfer(
            self._transfers,
            path,
            pieces(),
            urgency,
            blocks=blocks,
            nbytes=blocks * block_bytes,
            count=-(-blocks // small),
            deadline_s=deadline_s,
        )

    def submit_layers(
        self,
        source: MemoryTier,
        out: Int64s,
        target: MemoryTier,
        into: Int64s,
        layers: BlockLayers,
        slabs: Sequence[tuple[int, int]],
        arrived: Callable[[int], None],
        urgency: Urgency,
        *,
        padded: bool,
    ) -> BlockTransfer[None]:
        """Starts to copy n blocks of one part, the first layers of all of them first.

        Args:
            source: the tier to copy from.
            out: the slots in it, [n].
            target: the tier to copy to.
            into: the slots in it, [n].
            layers: how the layers lie in a block.
            slabs: the first layer of each slab, and the one behind its last, in order; together all layers.
            arrived: called on the event loop with the number of layers of all blocks that are in `target`, after each
                slab before which all have come, the last one included.
            urgency: see `Urgency`.
            padded: tokens are padded in the nearer of the two tiers, and packed in the other one; else alike in both.

        Returns:
            A transfer whose blocks have come all together or not at all.
        """
        path, blocks = self._add_path(source, target), len(out)
        sources, targets = source.addresses(out), target.addresses(into)
        to_padded, from_padded = (
            not padded or near.level < far.level for near, far in ((target, source), (source, target))
        )
        sizes = [layers.nbytes * (last - first) // layers.layers for first, last in slabs]
        steps = [piece_items(size, blocks, most_bytes=self._piece_bytes) for size in sizes]
        left = [-(-blocks // step) for step in steps]  # pieces of each slab that have not ended
        count, come = sum(left), 0

        async def copy(slab: int, some: slice, last_piece: bool) -> list[None]:
            nonlocal come
            to, at = (layers.rows(*slabs[slab], padded=side) for side in (to_padded, from_padded))
            columns = RowColumns(
                *(targets[some] + to.offset, sources[some] + at.offset, to.width, to.rows, to.pitch, at.pitch),
                *(target.on_device, source.on_device),
            )
            await self._engine.copy_rows([columns])
            left[slab] -= 1
            before = come
            while come < len(slabs) and not left[come]:
                come += 1
            if come > before:
                arrived(slabs[come - 1][1])
            return [None] * (blocks if last_piece else 0)

        def pieces() -> Iterator[tuple[int, Piece[list[None]]]]:
            made = 0
            for slab, (size, step) in enumerate(zip(sizes, steps, strict=True)):
                for start in range(0, blocks, step):
                    made += 1
                    some = slice(start, min(start + step, blocks))
                    work = partial(copy, slab, some, made == count)
                    yield blocks if made == count else 0, Piece((some.stop - some.start) * size, work, True)

        nbytes = blocks * layers.nbytes
        return BlockTransfer(self._transfers, path, pieces(), urgency, blocks=blocks, nbytes=nbytes, count=count)

    def _add_path(self, source: MemoryTier, target: MemoryTier) -> str:
        """The path of a direction, with a device of its own."""
        path = self.path(source, target)
        if not self._transfers.has_path(path):
            self._transfers.add_device(path, self._limits, threads=False)
            self._transfers.add_path(path, path)
        return path
