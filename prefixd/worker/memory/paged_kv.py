"""KV in blocks anywhere in one pool, found through block tables: the design of PagedAttention, as a baseline.

A sequence is a list of pages, each of one frame or of several side by side (`frame_window.Pages`). A kernel for block
tables reads through them (`extent_attention`, on a GPU). For any other kernel `read` copies the blocks of a sequence
together, in every layer of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from prefixd.worker.memory.frame_window import FrameWindow
from prefixd.worker.memory.kv_memory import KvSequence, Segment, Spans, cut_at_chunks
from prefixd.worker.memory.paged_blocks import BlockTable, Extents
from prefixd.worker.to_device import to_device
from prefixd.worker_protocol.protocol import KvUsage, StateFrames
from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.group_shape import KvGeometry


class PagedKv:
    """Sequences as block tables over one pool of frames.

    Args:
        window: all frames; groups share it.
        geometry: the shape of the KV; a block fills whole frames.
        max_tokens: the longest sequence.
    """

    def __init__(self, window: FrameWindow, geometry: KvGeometry, *, max_tokens: int) -> None:
        self.pages = window.pages(geometry.block_bytes // window.frame_bytes)
        self._geometry = geometry
        self._max_blocks = -(-max_tokens // geometry.block_tokens)
        self._copied = 0
        self.pool = self._view()

    def open(self, frames: Sequence[int], state: StateFrames | None = None) -> BlockTable:
        """A sequence with these frames as its first blocks; -1 where a block has none."""
        del state
        sequence = BlockTable(())
        self.extend(sequence, frames)
        return sequence

    def extend(self, sequence: KvSequence, frames: Sequence[int]) -> None:
        """More frames for a sequence."""
        table = _table(sequence)
        if table.blocks + len(frames) > self._max_blocks:
            raise MemoryMisuseError(
                f"{len(frames)} more blocks do not fit: {table.blocks} of {self._max_blocks} are taken"
            )
        self.pages.add(frames)
        table.append(frames)

    def assign(self, sequence: KvSequence, frames: Sequence[int]) -> None:
        """Give a sequence, which no pass uses now, these frames in place of those it has."""
        self._let_go(_table(sequence))
        self.extend(sequence, frames)

    def copy(self, source: KvSequence, target: KvSequence, first: int, stop: int) -> None:
        """Copy the KV of tokens [first, stop), queued on the device behind the passes so far."""
        block = self._geometry.block_tokens
        while first < stop:
            end = (first // block + 1) * block
            offsets = slice(first % block, block)
            from_page, to_page = (int(_table(sequence).pages[first // block]) for sequence in (source, target))
            self.pool[to_page, offsets].copy_(self.pool[from_page, offsets])
            self._copied += 1
            first = end

    def pass_by(self, sequence: KvSequence, tokens: int) -> None:
        """Does nothing: without groups every layer needs all blocks."""
        del sequence, tokens

    def give_up(self, sequence: KvSequence, frames: int) -> None:
        """Give up the first `frames` pages of a sequence; nothing reads or writes them any more."""
        table = _table(sequence)
        self.pages.remove(table.give_up(frames))

    def ready(self, sequence: KvSequence, tokens: int) -> bool:
        """True: nothing is mapped in the background."""
        del sequence, tokens
        return True

    def wait(self, sequence: KvSequence, tokens: int) -> None:
        """Nothing to wait for."""
        del sequence, tokens

    def close(self, sequence: KvSequence, on_closed: Callable[[], None]) -> None:
        """End a sequence; `on_closed` is called, now or by `poll`, when nothing reads or writes its frames any more.
        The pages stay mapped: a page's next owner in this process is ordered behind on the same stream."""
        self._let_go(_table(sequence))
        self.pages.window.retire(on_closed)

    def poll(self, wait: bool = False) -> int:
        """Finish what `close` began as far as the device is, or with `wait` all of it; returns how many are left."""
        return self.pages.window.poll(wait)

    def forget(self, frames: Sequence[int]) -> None:
        """Unmap frames that no sequence has and that are about to be no more."""
        self.pages.window.forget(frames)

    def expect(self, frames: Sequence[int]) -> None:
        """Does nothing: all frames are mapped."""
        del frames

    def map_ahead(self) -> None:
        """Does nothing, as `expect`."""

    def step(self, segments: Sequence[Segment]) -> PagedStep:
        """The memory of a forward pass over these segments."""
        page, token = self.pool.stride()[:2]
        joined = page * self.pages.width == self._geometry.block_tokens * token
        return PagedStep(self.pool, segments, self.pages.width if joined else None)

    def usage(self) -> KvUsage:
        """What is shared now, and what was done since the start. Nothing is mapped for a request."""
        return KvUsage(shared_blocks=self.pages.shared, copied_blocks=self._copied)

    def end(self) -> None:
        """Give the addresses back."""
        self.pages.window.end()

    def _let_go(self, table: BlockTable) -> None:
        self.pages.remove(table.give_up(table.blocks))
        table.clear()

    def _view(self) -> torch.Tensor:
        """``[pages, block_tokens, layers, 2, kv_heads, head_dim]``, whatever the layout; a page for every frame that
        one may begin at."""
        shape = self._geometry
        token, layer, *inner = shape.strides
        if shape.layout == "layer":
            layer = shape.block_tokens * token
        window = self.pages.window
        return window.tensor(
            (self.pages.count, shape.block_tokens, shape.layers, 2, shape.kv_heads, shape.head_dim),
            getattr(torch, shape.dtype),
            (window.frame_bytes // shape.element_bytes, token, layer, *inner),
        )


class PagedStep:
    """A pass over block tables.

    pool: ``[pages, block_tokens, layers, 2, kv_heads, head_dim]``.
    width: frames of a page, where the tokens of adjacent pages follow each other at one distance; else None.
    """

    def __init__(self, pool: torch.Tensor, segments: Sequence[Segment], width: int | None = None) -> None:
        self.segments = tuple(segments)
        self._pool = pool
        self._width = width
        self._block = pool.shape[1]
        tokens = [np.arange(segment.start, segment.stop) for segment in segments]
        pages = []
        for segment, own in zip(segments, tokens, strict=True):
            first = segment.start // self._block
            written = _table(segment.sequence).pages[first : -(-segment.stop // self._block)]
            pages.append(written[own // self._block - first])
        places = np.stack([np.concatenate(pages), np.concatenate(tokens) % self._block])
        self._pages, self._offsets = to_device(places, torch.int64, pool.device)
        self._blocks: dict[Spans, list[torch.Tensor]] = {}

    def write(self, layer: int, pairs: torch.Tensor) -> None:
        """One scatter for all segments."""
        self._pool[:, :, layer].index_put_((self._pages, self._offsets), pairs)

    def scrub(self, segment: int, end: int) -> None:
        """Zero a segment's memory from its last token to token `end`, which lies in the same block."""
        part = self.segments[segment]
        if part.stop < end:
            first = part.stop % self._block
            page = int(_table(part.sequence).pages[part.stop // self._block])
            self._pool[page, first : first + end - part.stop].zero_()

    def read(self, layer: int, spans: Spans) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies: the blocks of each sequence, gathered."""
        if spans not in self._blocks:
            tables = [_table(segment.sequence).pages for segment in self.segments]
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

    def in_chunks(self, tokens: int) -> PagedStep:
        """The same pages, each part of a segment with those from its chunk on."""
        segments = []
        for _, chunk, part in cut_at_chunks(self.segments, tokens):
            pages = _table(part.sequence).pages[chunk // self._block : (chunk + tokens) // self._block]
            segments.append(replace(part, sequence=BlockTable(pages)))
        return PagedStep(self._pool, segments, self._width)

    def varlen_arguments(self) -> tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], dict[str, object]]:
        """The pool, and every sequence's block table, with zeros in place of missing pages."""
        tables = [_table(segment.sequence).pages for segment in self.segments]
        width = max(map(len, tables))
        filled = np.zeros((len(tables), width), np.int32)
        for row, table in zip(filled, tables, strict=True):
            np.maximum(table, 0, out=row[: len(table)])
        device, pool = self._pool.device, self._pool
        lengths = [part.stop for part in self.segments]
        return lambda layer: (pool[:, :, layer, 0], pool[:, :, layer, 1]), {
            "cu_seq_k": None,
            "max_k": max(lengths),
            "seqused_k": to_device(lengths, torch.int32, device),
            "block_table": to_device(filled, torch.int32, device),
        }

    def extents(self) -> list[Extents] | None:
        """Each segment's runs of adjacent pages; None where adjacent pages are not one run of tokens."""
        if self._width is None:
            return None
        return [_table(segment.sequence).extents(self._width) for segment in self.segments]


def _table(sequence: KvSequence) -> BlockTable:
    return cast(BlockTable, sequence)
