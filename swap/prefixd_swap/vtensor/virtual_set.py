"""vTensor's vSet: the addresses of virtual tensors, in one reservation of fixed stride (vAttention, section 5.2.3)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import GeometryError, IntegrityError, MemoryMisuseError, SwapError
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.number_runs import consecutive_runs
from prefixd_swap.vmem.base import FrameId, VirtualMemory
from prefixd_swap.vmem.frame_table import FrameTable

if TYPE_CHECKING:
    import torch

_NOTHING = FrameId(-1)


class Row:
    """The addresses of one request, and the frame that is mapped on each block.

    A block has one piece, or one a layer, and the system maps and unmaps piece by piece. So a call that fails can leave
    a block with only some pieces mapped: the block is `held`, no request may use it, and it is not `mapped`.

    ```
    block      0   1    2    3
    mapped     7   3   -1   -1
    held       7   3    4   -1      unmapping frame 4 from block 2 failed half way
    ```

    Mappings stay after a request has ended (lazy deallocation, vTensor 5.3.2): nothing reads or writes an idle row, and
    the next request may need the same frames there.

    mapped: the frame on each block, if all its pieces are mapped. Only the methods here write it.
    held: the frame on each block, if at least one of its pieces is mapped.
    mapped_blocks: number of blocks that are held.
    """

    def __init__(self, number: int, blocks: int) -> None:
        self.number = number
        self.mapped: list[FrameId] = [_NOTHING] * blocks
        self.held: npt.NDArray[np.int32] = np.full(blocks, _NOTHING, np.int32)
        self.mapped_blocks = 0

    def suspend(self, first: int, stop: int) -> None:
        """Before pieces on blocks [first, stop) are unmapped: until `put` they are held only."""
        self.mapped[first:stop] = [_NOTHING] * (stop - first)

    def begin(self, first: int, frames: Sequence[FrameId]) -> None:
        """Before pieces of `frames` are mapped on the blocks from `first` on: until `put` they are held only."""
        self.suspend(first, first + len(frames))
        held = self.held[first : first + len(frames)]
        self.mapped_blocks += len(frames) - frames.count(_NOTHING) - int(np.count_nonzero(held != _NOTHING))
        held[:] = frames

    def put(self, first: int, frames: Sequence[FrameId]) -> None:
        """After `frames` were mapped on the blocks from `first` on, or (-1) unmapped."""
        self.begin(first, frames)
        self.mapped[first : first + len(frames)] = frames

    def held_blocks(self, first: int, stop: int) -> list[int]:
        """The blocks in [first, stop) that are held, ascending."""
        found: list[int] = (first + np.flatnonzero(self.held[first:stop] != _NOTHING)).tolist()
        return found

    def common(self, frames: Sequence[FrameId]) -> int:
        """Number of `frames`, from the first on, that are mapped here on the block of their position.

        Leading -1 in `frames` are skipped: counting starts at the first frame.
        """
        wanted = list(frames[: len(self.mapped)])
        skipped = next((block for block, frame in enumerate(wanted) if frame != _NOTHING), len(wanted))
        wanted, mapped = wanted[skipped:], self.mapped[skipped:] if skipped else self.mapped
        # Binary search: comparing lists is a hundred times as fast as comparing elements, and every new request asks
        # every idle row.
        least, most = 0, len(wanted) if wanted[:1] == mapped[:1] else 0
        while least < most:
            middle = (least + most + 1) // 2
            if mapped[least:middle] == wanted[least:middle]:
                least = middle
            else:
                most = middle - 1
        return least

    def leading(self, is_free: Callable[[FrameId], bool]) -> int:
        """Number of leading blocks on which free frames are mapped."""
        return sum(1 for _ in takewhile(is_free, self.mapped))


class VirtualSet:
    """Rows of addresses in one reservation, so that a batch of virtual tensors is one tensor.

    ```
    layout "token"   | row 0: block 0, block 1, ... | row 1 | ... | row R-1 |
    layout "layer"   | layer 0: row 0 | row 1 | ... | layer 1: row 0 | row 1 | ... |
    ```

    `kv` is ``[requests, tokens, layers, 2, kv_heads, head_dim]`` in either layout. Row `i` has a request's keys and
    values, and ``kv.flatten(0, 1)`` is an attention kernel's input for the whole batch, with sequence `i` at
    ``i * tokens``; the stride of tokens is the geometry's, with its padding. Only mapped addresses may be touched.

    If a block takes several frames (`frames_per_block`), they follow each other, and each frame has the place of a
    block in the row: "block" here then means one of its frames.

    Map and unmap act on runs of blocks. They may be called from any thread, for different rows at the same time.

    Args:
        memory: where the addresses are reserved.
        table: the frames' chunks.
        geometry: the shape; a piece of a block is whole chunks.
        requests: number of rows.
        tokens: the longest request, in tokens; rounded up to whole blocks.
        frames_per_block: frames of a block of the geometry; more than one only in the layout "token".

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
        """Rows without a request."""
        return len(self._idle)

    def idle(self) -> Iterator[Row]:
        """The rows without a request, the longest idle first."""
        return iter(self._idle.values())

    def is_idle(self, row: Row) -> bool:
        """Whether no request has the row."""
        return row.number in self._idle

    def make_newest(self, row: Row) -> None:
        """Count an idle row as the one that became idle last."""
        self._idle[row.number] = self._idle.pop(row.number)

    def next_row(
        self,
        wanted: Sequence[FrameId] = (),
        is_free: Callable[[FrameId], bool] = lambda frame: False,
        spared: Container[int] = (),
    ) -> Row | None:
        """The idle row that `v_alloc` takes; None if all are in use.

        It is the row with the most leading frames of `wanted` mapped. Ties go to the row with the most leading free
        frames, then to a row that is not `spared`, then to one with nothing mapped, then to the longest idle.
        """

        def worth(row: Row) -> tuple[int, int, bool, bool]:
            return row.common(wanted), row.leading(is_free), row.number not in spared, not row.mapped_blocks

        return max(self._idle.values(), key=worth, default=None)

    def v_alloc(
        self,
        wanted: Sequence[FrameId] = (),
        is_free: Callable[[FrameId], bool] = lambda frame: False,
        spared: Container[int] = (),
    ) -> Row | None:
        """Take the row of `next_row`; None if all are in use."""
        row = self.next_row(wanted, is_free, spared)
        if row is not None:
            del self._idle[row.number]
        return row

    def v_free(self, row: Row) -> None:
        """Give a row back, which nothing on the device uses; its mappings stay until other frames are mapped there."""
        if row.number in self._idle:
            raise MemoryMisuseError(f"row {row.number} is free already; free what v_alloc gave, once")
        self._idle[row.number] = row

    def map(self, row: Row, first: int, frames: Sequence[FrameId]) -> int:
        """Map `frames` on the blocks of `row` from `first` on; returns the number of frames that were not mapped yet.

        A frame that is mapped there already stays; another frame is unmapped first. A block with -1 in `frames` stays
        as it is. The caller has made sure that nothing on the device uses the blocks that change. When this raises, no
        new frame is mapped, and the call can be repeated. Raises MemoryMisuseError past the row's end or for a frame
        that does not exist, OutOfMemoryError when the process has no mapping left.
        """
        if first < 0 or first + len(frames) > self.blocks:
            raise MemoryMisuseError(
                f"blocks {first} to {first + len(frames)} do not fit: a request has at most {self.blocks} blocks"
            )
        self._table.chunks([frame for frame in frames if frame != _NOTHING] if _NOTHING in frames else frames)
        changed = [index for index, frame in enumerate(frames) if frame not in (row.mapped[first + index], _NOTHING)]
        for run in consecutive_runs(changed):
            self.unmap(row, first + run.start, first + run.stop)
        done: list[range] = []
        try:
            for run in consecutive_runs(changed):
                self._map_run(row, first + run.start, frames[run.start : run.stop])
                done.append(run)
        except SwapError:
            for run in done:
                self.unmap(row, first + run.start, first + run.stop)
            raise
        return len(changed)

    def unmap(self, row: Row, first: int = 0, stop: int | None = None) -> int:
        """Unmap all held blocks in [first, stop) of `row`; returns the number of them.

        Raises OutOfMemoryError if unmapping splits a mapping of the kernel and the process has no mapping left. A block
        that has lost some of its pieces is then held, not mapped; a repeated call, or a new mapping there, removes the
        rest.
        """
        held = row.held_blocks(first, self.blocks if stop is None else stop)
        for run in consecutive_runs(held):
            row.suspend(run.start, run.stop)
            for piece in range(self.geometry.pieces):
                self._range.clear(self._offset(row, piece, run.start), len(run) * self._piece_bytes)
            row.put(run.start, [_NOTHING] * len(run))
        return len(held)

    @contextmanager
    def scratch(self, rows: int, tokens: int) -> Iterator[None]:
        """Have memory, which nobody else uses, behind the first `tokens` tokens of the first `rows` rows.

        It is one block or few, mapped in all rows: token i of a row and token i of another are the same bytes. In the
        layout "layer" all layers share it, too. No request has a row, and nothing is mapped on these. Nothing on the
        device uses them when the context ends. Raises OutOfMemoryError.
        """
        nbytes = -(-tokens // self.geometry.block_tokens) * self.geometry.piece_bytes
        places = [(piece, row) for piece in range(self.geometry.pieces) for row in self.rows[:rows]]
        with self._range.scratch([self._offset(row, piece, 0) for piece, row in places], nbytes):
            yield

    def find(self, frames: Iterable[FrameId]) -> dict[int, npt.NDArray[np.int64]]:
        """The blocks, ascending, by row number, that hold one of `frames`; rows without such a block are left out.

        A shrinking tier calls this hundreds of times between two passes, so it is one array look-up for each row with
        held blocks.
        """
        numbers = np.fromiter(frames, np.int64)
        # One element more than there are frames: the index -1 (_NOTHING) reads the last one, which stays false.
        wanted = np.zeros(max(self._table.size, int(numbers.max(initial=-1)) + 1) + 1, bool)
        wanted[numbers] = True
        used = [row for row in self.rows if row.mapped_blocks]
        found = {row.number: np.flatnonzero(wanted[row.held]) for row in used}
        return {number: blocks for number, blocks in found.items() if len(blocks)}

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the reservation maps exactly the chunks of each row's frames.

        A block that is only held may lack pieces, but has no chunk of another frame.
        """
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
        token, layer, *inner = shape.strides
        if shape.layout == "layer":
            layer = self._region_bytes // shape.element_bytes
        return self._range.tensor(
            (requests, self.tokens, shape.layers, 2, shape.kv_heads, shape.head_dim),
            getattr(torch, shape.dtype),
            (self.tokens * token, token, layer, *inner),
        )
