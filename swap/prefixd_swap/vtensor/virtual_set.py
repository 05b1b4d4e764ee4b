"""vTensor's vSet: the addresses of virtual tensors, in one reservation of fixed stride (vAttention, section 5.2.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import GeometryError, IntegrityError, MemoryMisuseError, SwapError
from prefixd_swap.geometry import KvGeometry
from prefixd_swap.vmem.base import FrameId, VirtualMemory
from prefixd_swap.vmem.frame_table import FrameTable

if TYPE_CHECKING:
    import torch

_NOTHING = FrameId(-1)


class Row:
    """The addresses of one request, and which frame is mapped on each of its blocks.

    A block has one piece, or one a layer, and the system maps and unmaps them one by one. So a call that fails can
    leave a block of which some pieces are mapped: it is `held`, but nobody may use it, and it counts as not `mapped`.

    ```
    block      0   1    2    3
    mapped     7   3   -1   -1
    held       7   3    4   -1      unmapping frame 4 from block 2 failed half way
    ```

    Mappings stay after a request has ended (lazy deallocation, vTensor 5.3.2): what is mapped on an idle row harms
    nobody, because nobody reads or writes there, and the next request may want just these frames.

    mapped: the frame on each block, all of it; it is read everywhere, and written by the methods here alone.
    held: the frame of which pieces are mapped on each block, all or some.
    mapped_blocks: on how many blocks something is mapped, also if it is held only.
    """

    def __init__(self, number: int, blocks: int) -> None:
        self.number = number
        self.mapped: list[FrameId] = [_NOTHING] * blocks
        self.held: npt.NDArray[np.int32] = np.full(blocks, _NOTHING, np.int32)
        self.mapped_blocks = 0

    def suspend(self, first: int, stop: int) -> None:
        """The pieces on blocks [first, stop) are about to be unmapped: until `put` they are held only."""
        self.mapped[first:stop] = [_NOTHING] * (stop - first)

    def begin(self, first: int, frames: Sequence[FrameId]) -> None:
        """The pieces of `frames` are about to be mapped on the blocks from `first` on: until `put` they are held
        only."""
        self.suspend(first, first + len(frames))
        held = self.held[first : first + len(frames)]
        self.mapped_blocks += len(frames) - frames.count(_NOTHING) - int(np.count_nonzero(held != _NOTHING))
        held[:] = frames

    def put(self, first: int, frames: Sequence[FrameId]) -> None:
        """Note what is mapped on the blocks from `first` on now."""
        self.begin(first, frames)
        self.mapped[first : first + len(frames)] = frames

    def held_blocks(self, first: int, stop: int) -> list[int]:
        """The blocks in [first, stop) on which something is mapped, ascending."""
        found: list[int] = (first + np.flatnonzero(self.held[first:stop] != _NOTHING)).tolist()
        return found

    def common(self, frames: Sequence[FrameId]) -> int:
        """How many of `frames`, from the first on, are mapped here on the blocks where they are wanted.

        Where the first ones are -1, nothing is wanted there: it is counted from the first that is wanted."""
        wanted = list(frames[: len(self.mapped)])
        skipped = next((block for block, frame in enumerate(wanted) if frame != _NOTHING), len(wanted))
        wanted, mapped = wanted[skipped:], self.mapped[skipped:] if skipped else self.mapped
        # By halves: lists are compared a hundred times as fast as their elements one by one, and every new request
        # asks every idle row.
        least, most = 0, len(wanted) if wanted[:1] == mapped[:1] else 0
        while least < most:
            middle = (least + most + 1) // 2
            if mapped[least:middle] == wanted[least:middle]:
                least = middle
            else:
                most = middle - 1
        return least

    def leading(self, is_free: Callable[[FrameId], bool]) -> int:
        """On how many blocks, from the first on, frames are mapped that are free to take."""
        return sum(1 for _ in takewhile(is_free, self.mapped))


class VirtualSet:
    """Rows of addresses, all in one reservation, so that a batch of virtual tensors is one tensor.

    ```
    layout "token"   | row 0: block 0, block 1, ... | row 1 | ... | row R-1 |
    layout "layer"   | layer 0: row 0 | row 1 | ... | layer 1: row 0 | row 1 | ... |
    ```

    `kv` is ``[requests, tokens, layers, 2, kv_heads, head_dim]`` in either layout; row `i` of it is a request's keys
    and values, and ``kv.flatten(0, 1)`` is what an attention kernel takes for the whole batch, with sequence `i` at
    ``i * tokens``. Only what is mapped may be touched.

    Where a block takes several frames (`frames_per_block`), they lie one behind the other, and each has a block's place
    in the row: what is said here of a row's blocks is then true of each of its frames.

    Map and unmap act on runs of blocks. They may be called from any thread, for different rows at the same time.

    Args:
        memory: where the addresses are reserved.
        table: the frames' chunks.
        geometry: the shape; a piece of a block has to be whole chunks.
        requests: rows.
        tokens: longest request, in tokens; rounded up to whole blocks.
        frames_per_block: frames that a block of the geometry takes; more than one only in the layout "token".

    Raises GeometryError for a frame that is not whole chunks, OutOfMemoryError without address space.
    """

    def __init__(
        self,
        memory: VirtualMemory,
        table: FrameTable,
        geometry: KvGeometry,
        requests: int,
        tokens: int,
        frames_per_block: int = 1,
    ) -> None:
        if requests < 1 or tokens < 1:
            raise MemoryMisuseError(f"{requests} requests of {tokens} tokens are not possible; give at least 1 of each")
        geometry.check_chunk(memory.chunk_bytes)
        if geometry.piece_bytes % (frames_per_block * memory.chunk_bytes) or geometry.pieces > 1 < frames_per_block:
            raise GeometryError(
                f"a block of {geometry.block_bytes} bytes in {geometry.pieces} pieces is not {frames_per_block} frames "
                f'of whole chunks of {memory.chunk_bytes} bytes; use the layout "token" and frames that divide it'
            )
        self.geometry = geometry
        self.frames_per_block = frames_per_block
        blocks = -(-tokens // geometry.block_tokens)
        self.blocks = blocks * frames_per_block
        self.tokens = blocks * geometry.block_tokens
        self._table = table
        self._piece_bytes = geometry.piece_bytes // frames_per_block
        self._row_bytes = self.blocks * self._piece_bytes
        self._region_bytes = requests * self._row_bytes
        self._range = memory.reserve(geometry.pieces * self._region_bytes)
        self.rows = [Row(number, self.blocks) for number in range(requests)]
        self._idle: dict[int, Row] = dict(enumerate(self.rows))  # in the order in which they became idle
        self.kv: torch.Tensor = self._view(requests)

    @property
    def idle_count(self) -> int:
        """How many rows no request has."""
        return len(self._idle)

    def idle(self) -> Iterator[Row]:
        """The rows that no request has, the one that has been idle longest first."""
        return iter(self._idle.values())

    def next_row(
        self, wanted: Sequence[FrameId] = (), is_free: Callable[[FrameId], bool] = lambda frame: False
    ) -> Row | None:
        """The row that `v_alloc` would take; None if all are taken.

        The one on which most of `wanted`, from the first on, are mapped already. Among equals the one on which most
        frames that are free, from the first block on, are mapped; then one on which nothing is; then the one that has
        been idle longest.
        """

        def worth(row: Row) -> tuple[int, int, bool]:
            return row.common(wanted), row.leading(is_free), not row.mapped_blocks

        return max(self._idle.values(), key=worth, default=None)

    def v_alloc(
        self, wanted: Sequence[FrameId] = (), is_free: Callable[[FrameId], bool] = lambda frame: False
    ) -> Row | None:
        """Take the row that `next_row` names; None if all are taken."""
        row = self.next_row(wanted, is_free)
        if row is not None:
            del self._idle[row.number]
        return row

    def v_free(self, row: Row) -> None:
        """Give a row back; its mappings stay until somebody needs others there. Nothing on the device uses it."""
        if row.number in self._idle:
            raise MemoryMisuseError(f"row {row.number} is free already; free what v_alloc gave, once")
        self._idle[row.number] = row

    def map(self, row: Row, first: int, frames: Sequence[FrameId]) -> int:
        """Have `frames` mapped on the blocks of `row` from `first` on; returns how many had to be mapped.

        Where -1 stands for a frame, whatever is mapped stays. What is mapped already stays; others that are mapped
        there are unmapped: the caller has made sure that nothing on the device uses those blocks. All of them or, when
        this raises, none of those that were not there before: the call can be made again.
        Raises MemoryMisuseError past the row's end or for a frame that does not exist, OutOfMemoryError when the
        process has no mapping left.
        """
        if first < 0 or first + len(frames) > self.blocks:
            raise MemoryMisuseError(
                f"blocks {first} to {first + len(frames)} do not fit: a request has at most {self.blocks} blocks"
            )
        self._table.chunks([frame for frame in frames if frame != _NOTHING] if _NOTHING in frames else frames)
        changed = [index for index, frame in enumerate(frames) if frame not in (row.mapped[first + index], _NOTHING)]
        for start, stop in runs(changed):
            self.unmap(row, first + start, first + stop)
        done: list[tuple[int, int]] = []
        try:
            for start, stop in runs(changed):
                self._map_run(row, first + start, frames[start:stop])
                done.append((start, stop))
        except SwapError:
            for start, stop in done:
                self.unmap(row, first + start, first + stop)
            raise
        return len(changed)

    def unmap(self, row: Row, first: int = 0, stop: int | None = None) -> int:
        """Unmap what is mapped on blocks [first, stop) of `row`, in runs; returns how many blocks that were.

        Raises OutOfMemoryError when the process has no mapping left, which taking a part out of a run needs. A block
        that has lost some of its pieces then counts as not mapped; the rest goes when this is called again, or when
        something else is mapped there.
        """
        held = row.held_blocks(first, self.blocks if stop is None else stop)
        for start, end in runs(held):
            row.suspend(start, end)
            for piece in range(self.geometry.pieces):
                self._range.clear(self._offset(row, piece, start), (end - start) * self._piece_bytes)
            row.put(start, [_NOTHING] * (end - start))
        return len(held)

    def find(self, frames: Iterable[FrameId]) -> dict[int, npt.NDArray[np.int64]]:
        """On which blocks, ascending, of which rows pieces of any of `frames` are mapped; rows without are left out.

        A shrinking tier asks this hundreds of times between two passes, so it is a look-up in an array for each row on
        which something is mapped.
        """
        numbers = np.fromiter(frames, np.int64)
        # One element more than there are frames: the last one stays false, and is that of _NOTHING, -1.
        wanted = np.zeros(max(self._table.size, int(numbers.max(initial=-1)) + 1) + 1, bool)
        wanted[numbers] = True
        used = [row for row in self.rows if row.mapped_blocks]
        found = {row.number: np.flatnonzero(wanted[row.held]) for row in used}
        return {number: blocks for number, blocks in found.items() if len(blocks)}

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the reservation maps on every row the chunks of the frames noted there, and of
        those that are held no others."""
        for row in self.rows:
            counted = len(row.held_blocks(0, self.blocks))
            if counted != row.mapped_blocks:
                raise IntegrityError(f"row {row.number} maps {counted} blocks, but counts {row.mapped_blocks}")
            for block, (frame, held) in enumerate(zip(row.mapped, row.held.tolist(), strict=True)):
                if frame not in (held, _NOTHING):
                    raise IntegrityError(f"block {block} of row {row.number} maps frame {frame}, but holds {held}")
                for piece in range(self.geometry.pieces):
                    chunks = self._range.chunks(self._offset(row, piece, block), self._piece_bytes)
                    expected = np.full(len(chunks), -1) if held == _NOTHING else self._pieces([FrameId(held)])[piece]
                    if frame == _NOTHING:
                        expected = np.where(chunks == -1, -1, expected)
                    if not np.array_equal(chunks, expected):
                        raise IntegrityError(
                            f"block {block} of row {row.number} maps chunks {chunks.tolist()}, not {expected.tolist()}"
                        )

    def close(self) -> None:
        """Unmap everything and give the addresses back; `kv` and every view of it must not be used any more."""
        self._range.discard()

    def _map_run(self, row: Row, first: int, frames: Sequence[FrameId]) -> None:
        pieces = self._pieces(frames)
        row.begin(first, frames)
        try:
            for piece in range(self.geometry.pieces):
                self._range.map(self._offset(row, piece, first), pieces[piece])
        except SwapError:
            self.unmap(row, first, first + len(frames))
            raise
        row.put(first, frames)

    def _pieces(self, frames: Sequence[FrameId]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """[pieces, chunks]: the chunks of each piece of all frames, block by block."""
        chunks = self._table.chunks(frames).reshape(len(frames), self.geometry.pieces, -1)
        return chunks.swapaxes(0, 1).reshape(self.geometry.pieces, -1)

    def _offset(self, row: Row, piece: int, block: int) -> int:
        return piece * self._region_bytes + row.number * self._row_bytes + block * self._piece_bytes

    def _view(self, requests: int) -> torch.Tensor:
        import torch

        shape = self.geometry
        heads = shape.kv_heads * shape.head_dim
        if shape.layout == "token":
            token, layer = shape.layers * 2 * heads, 2 * heads
        else:
            token, layer = 2 * heads, self._region_bytes // shape.element_bytes
        return self._range.tensor(
            (requests, self.tokens, shape.layers, 2, shape.kv_heads, shape.head_dim),
            getattr(torch, shape.dtype),
            (self.tokens * token, token, layer, heads, shape.head_dim, 1),
        )


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as (start, stop) of consecutive ones."""
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield numbers[start], numbers[index - 1] + 1
            start = index
