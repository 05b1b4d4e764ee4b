"""KV in blocks anywhere in one pool, found through block tables: the design of PagedAttention, as a baseline.

A sequence is a list of frame numbers. A kernel that knows block tables reads through them (`varlen_attn`, on a GPU);
any other needs the blocks of a sequence copied together first, in every layer of every step, which is what `read` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

import torch

from prefixd.worker.kv_memory import KvSequence, Segment, Spans
from prefixd.worker.protocol import KvUsage, StateFrames
from prefixd.worker.to_device import to_device
from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.geometry import KvGeometry
from prefixd_swap.vmem import FrameId, FrameTable, VirtualMemory


class BlockTable:
    """The frames of one sequence, block by block."""

    def __init__(self, frames: Sequence[int]) -> None:
        self.frames = list(frames)

    @property
    def blocks(self) -> int:
        """How many blocks have memory."""
        return len(self.frames)


class PagedKv:
    """Sequences as block tables over one pool of frames.

    The pool is mapped once, so that a frame lies at its number; frames that come later are mapped when first used.

    Args:
        memory: the memory of all frames.
        table: the frames' chunks.
        geometry: the shape of the KV.
        frames: most frames that there will be.
        max_tokens: the longest sequence.
    """

    def __init__(
        self, memory: VirtualMemory, table: FrameTable, geometry: KvGeometry, *, frames: int, max_tokens: int
    ) -> None:
        self._table = table
        self._geometry = geometry
        self._max_blocks = -(-max_tokens // geometry.block_tokens)
        self._range = memory.reserve(frames * geometry.block_bytes)
        self._mapped: set[int] = set()
        self._users: Counter[int] = Counter()  # by frame: how many sequences have it
        self._shared = 0
        self._copied = 0
        self.pool = self._view(frames)

    def open(self, frames: Sequence[int], state: StateFrames | None = None) -> BlockTable:
        """See `KvMemory.open`."""
        del state
        sequence = BlockTable(())
        self.extend(sequence, frames)
        return sequence

    def extend(self, sequence: KvSequence, frames: Sequence[int]) -> None:
        """See `KvMemory.extend`."""
        table = _table(sequence)
        if len(table.frames) + len(frames) > self._max_blocks:
            raise MemoryMisuseError(
                f"{len(frames)} more blocks do not fit: {len(table.frames)} of {self._max_blocks} are taken"
            )
        chunks = self._table.chunks([FrameId(frame) for frame in frames])
        for frame, of_frame in zip(frames, chunks, strict=True):
            if frame not in self._mapped:
                self._range.map(frame * self._geometry.block_bytes, of_frame)
                self._mapped.add(frame)
        table.frames += frames
        for frame in frames:
            self._shared += self._users[frame] > 0
            self._users[frame] += 1

    def assign(self, sequence: KvSequence, frames: Sequence[int]) -> None:
        """See `KvMemory.assign`."""
        self._let_go(_table(sequence))
        self.extend(sequence, frames)

    def copy(self, source: KvSequence, target: KvSequence, first: int, stop: int) -> None:
        """See `KvMemory.copy`."""
        block = self._geometry.block_tokens
        while first < stop:
            end = (first // block + 1) * block
            offsets = slice(first % block, block)
            from_frame, to_frame = (_table(sequence).frames[first // block] for sequence in (source, target))
            self.pool[to_frame, offsets].copy_(self.pool[from_frame, offsets])
            self._copied += 1
            first = end

    def pass_by(self, sequence: KvSequence, tokens: int) -> None:
        """Nothing: without groups every layer needs all."""
        del sequence, tokens

    def ready(self, sequence: KvSequence, tokens: int) -> bool:
        """Always: nothing happens in the background."""
        del sequence, tokens
        return True

    def wait(self, sequence: KvSequence, tokens: int) -> None:
        """Nothing to wait for."""
        del sequence, tokens

    def close(self, sequence: KvSequence, on_closed: Callable[[], None]) -> None:
        """See `KvMemory.close`. The frames stay mapped: a frame's next owner is ordered behind on the same stream."""
        self._let_go(_table(sequence))
        on_closed()

    def poll(self, wait: bool = False) -> int:
        """Nothing is ever left."""
        del wait
        return 0

    def forget(self, frames: Sequence[int]) -> None:
        """See `KvMemory.forget`. What reads them for a sequence that was closed may still be queued: waits for it."""
        mapped = self._mapped.intersection(frames)
        if mapped and self.pool.is_cuda:
            torch.cuda.synchronize(self.pool.device)
        for frame in mapped:
            self._range.unmap(frame * self._geometry.block_bytes, self._geometry.block_bytes)
        self._mapped -= mapped

    def step(self, segments: Sequence[Segment]) -> PagedStep:
        """See `KvMemory.step`."""
        return PagedStep(self.pool, segments)

    def usage(self) -> KvUsage:
        """See `KvMemory.usage`; nothing is mapped for a request."""
        return KvUsage(shared_blocks=self._shared, copied_blocks=self._copied)

    def end(self) -> None:
        """Give the addresses back."""
        self._range.discard()

    def _let_go(self, table: BlockTable) -> None:
        for frame in table.frames:
            self._users[frame] -= 1
            self._shared -= self._users[frame] > 0
        table.frames = []

    def _view(self, frames: int) -> torch.Tensor:
        """``[frames, block_tokens, layers, 2, kv_heads, head_dim]``, whatever the layout."""
        shape = self._geometry
        heads = shape.kv_heads * shape.head_dim
        if shape.layout == "token":
            token, layer = shape.layers * 2 * heads, 2 * heads
        else:
            token, layer = 2 * heads, shape.block_tokens * 2 * heads
        return self._range.tensor(
            (frames, shape.block_tokens, shape.layers, 2, shape.kv_heads, shape.head_dim),
            getattr(torch, shape.dtype),
            (shape.block_bytes // shape.element_bytes, token, layer, heads, shape.head_dim, 1),
        )


class PagedStep:
    """A pass over block tables. pool: ``[frames, block_tokens, layers, 2, kv_heads, head_dim]``."""

    def __init__(self, pool: torch.Tensor, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self._pool = pool
        self._block = pool.shape[1]
        frames, offsets = [], []
        for segment in segments:
            table = _table(segment.sequence)
            frames += [table.frames[token // self._block] for token in range(segment.start, segment.stop)]
            offsets += [token % self._block for token in range(segment.start, segment.stop)]
        self._frames, self._offsets = to_device([frames, offsets], torch.int64, pool.device)
        self._blocks: dict[Spans, list[torch.Tensor]] = {}

    def write(self, layer: int, pairs: torch.Tensor) -> None:
        """One scatter for all segments."""
        self._pool[:, :, layer].index_put_((self._frames, self._offsets), pairs)

    def scrub(self, segment: int, end: int) -> None:
        """See `StepKv.scrub`."""
        part = self.segments[segment]
        if part.stop < end:
            first = part.stop % self._block
            frame = _table(part.sequence).frames[part.stop // self._block]
            self._pool[frame, first : first + end - part.stop].zero_()

    def read(self, layer: int, spans: Spans) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies: the blocks of each sequence, gathered."""
        if spans not in self._blocks:
            tables = [_table(segment.sequence).frames for segment in self.segments]
            self._blocks[spans] = [
                to_device(table[start // self._block : -(-end // self._block)], torch.int64, self._pool.device)
                for table, (start, end) in zip(tables, spans, strict=True)
            ]
        read = []
        for blocks, (start, end) in zip(self._blocks[spans], spans, strict=True):
            first = start // self._block * self._block
            gathered = self._pool[:, :, layer].index_select(0, blocks).flatten(0, 1)[start - first : end - first]
            read.append((gathered[:, 0].transpose(0, 1), gathered[:, 1].transpose(0, 1)))
        return read

    def varlen_arguments(self) -> tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], dict[str, object]]:
        """The pool, and every sequence's block table, filled up with zeros to the longest."""
        tables = [_table(segment.sequence).frames for segment in self.segments]
        width = max(map(len, tables))
        device, pool = self._pool.device, self._pool
        return lambda layer: (pool[:, :, layer, 0], pool[:, :, layer, 1]), {
            "cu_seq_k": None,
            "max_k": width * self._block,
            "seqused_k": to_device([part.stop for part in self.segments], torch.int32, device),
            "block_table": to_device([[*table, *[0] * (width - len(table))] for table in tables], torch.int32, device),
        }


def _table(sequence: KvSequence) -> BlockTable:
    return cast(BlockTable, sequence)
