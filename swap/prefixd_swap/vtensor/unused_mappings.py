"""Unmaps what no request uses: idle rows and the ends of rows keep their mappings until then (vAttention, 6.2.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from prefixd_swap.number_runs import consecutive_runs, true_runs
from prefixd_swap.vmem.base import FrameId
from prefixd_swap.vtensor.frame_lists import NO_FRAME
from prefixd_swap.vtensor.physical_set import PhysicalSet
from prefixd_swap.vtensor.row_mapping import RowMapping
from prefixd_swap.vtensor.virtual_set import Row, VirtualSet
from prefixd_swap.vtensor.virtual_tensor import VirtualTensor


class UnusedMappings:
    """The mappings of blocks without a request: of idle rows, and of rows in use behind the last block or on blocks
    without memory.

    Each method first waits for what is mapped in the background.

    Args:
        virtual: the rows.
        physical: the frames.
        mapping: makes the mappings.
        live: the virtual tensors that are not released, by row.
    """

    def __init__(
        self, virtual: VirtualSet, physical: PhysicalSet, mapping: RowMapping, live: Mapping[int, VirtualTensor]
    ) -> None:
        self._virtual = virtual
        self._physical = physical
        self._mapping = mapping
        self._live = live

    def reclaim_behind(self, tensor: VirtualTensor) -> int:
        """Unmap everything behind the last block of `tensor`; returns the number of blocks unmapped."""
        self._mapping.drain()
        return self._virtual.unmap(tensor._row, len(tensor._frames))

    def reclaim(self, frames: Iterable[FrameId] | None = None) -> int:
        """Unmap blocks that no request uses; returns the number of blocks unmapped.

        With `frames`: on each row only from the first block with one of them on. Frames must be mapped nowhere before
        they are destroyed (`physical.p_free`, a tier that shrinks).
        """
        self._mapping.drain()
        if frames is None:
            return sum(self._virtual.unmap(*unused) for unused in self._unused(self._virtual.idle()))
        frames = set(frames)
        self._mapping.ahead.forget(frames)
        unmapped = 0
        idle = {row.number for row in self._virtual.idle()}
        for number, blocks in self._virtual.find(frames).items():
            row, tensor = self._virtual.rows[number], self._live.get(number)
            if tensor is None:
                unmapped += self._virtual.unmap(row, int(blocks[0])) if number in idle else 0
                continue
            behind = blocks[blocks >= len(tensor._frames)]
            if len(behind):
                unmapped += self._virtual.unmap(row, int(behind[0]))
            # Of the blocks that a window has left behind, only these: a pass that still runs may read their neighbours.
            passed = [block for block in blocks.tolist() if block < len(tensor._frames)]
            empty = [block for block in passed if tensor._frames[block] == NO_FRAME]
            unmapped += sum(self._virtual.unmap(row, run.start, run.stop) for run in consecutive_runs(empty))
        return unmapped

    def reclaim_until(self, unmapped: int) -> int:
        """Reclamation below a watermark (vAttention, 6.2.2); returns the number of blocks unmapped.

        Unmaps unused blocks until `unmapped` free frames are mapped nowhere, or nothing is left to unmap. The longest
        idle rows come first, each from its end; then unused blocks of rows in use. The row of the next `create` keeps
        its mappings.
        """
        self._mapping.drain()
        spared = self._virtual.next_row(is_free=self._physical.is_free)
        done = 0
        lacking = unmapped - self._physical.unmapped_count
        for row, first, stop in self._unused(row for row in self._virtual.idle() if row is not spared):
            while lacking > 0 and stop > first:
                start = max(first, stop - lacking)
                done += (here := self._virtual.unmap(row, start, stop))
                stop = start
                if here:
                    lacking = unmapped - self._physical.unmapped_count
        return done

    def still_mapped(self, frames: Iterable[FrameId]) -> set[FrameId]:
        """Those of `frames` that are held by a block of any row, in use or not."""
        self._mapping.drain()
        found, rows = self._virtual.find(frames), self._virtual.rows
        return {FrameId(frame) for number, blocks in found.items() for frame in rows[number].held[blocks].tolist()}

    def _unused(self, idle: Iterable[Row]) -> list[tuple[Row, int, int]]:
        """(row, first, stop): the blocks of `idle` rows, and of rows in use the blocks without memory and those behind
        the last block."""
        unused = [(row, 0, self._virtual.blocks) for row in idle]
        for tensor in self._live.values():
            frames = tensor._frames
            if tensor._passed or NO_FRAME in frames:
                unused += [(tensor._row, run.start, run.stop) for run in true_runs(np.array(frames) == NO_FRAME)]
            unused.append((tensor._row, len(frames), self._virtual.blocks))
        return unused
