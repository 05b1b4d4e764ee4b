"""Attention on a GPU by one Triton kernel, for what torch's flash attention lacks: block tables, soft caps, sinks.

It reads a sequence's keys through its block table, as PagedAttention does, or as extents: runs of adjacent pages in the
one mapping of all frames (`frame_window`), of which a virtual tensor is the simplest case. torch's own argument for
block tables is FlashAttention 3's; with FlashAttention 2 it wants pages of 256 tokens.

The kernel has not run on a GPU yet. The tests run it by Triton's interpreter where Triton is installed, and otherwise a
stand-in with the same arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from prefixd.worker.attention.attention import FULL_ATTENTION, AttentionKind, FromMemory
from prefixd.worker.attention.kernels.extent_call import Blocks, ExtentCall, ExtentKernel, Runs, Scores, Tiles
from prefixd.worker.graphs.captured import CapturedStep
from prefixd.worker.memory.kv_memory import Segment, StepKv
from prefixd.worker.memory.paged_blocks import Extents
from prefixd.worker.memory.paged_kv import PagedStep
from prefixd.worker.to_device import to_device
from prefixd.worker_protocol.errors import ModelError

_TILE_ROWS = 64  # of a prompt's tile: its queries times the query heads of a KV head
_FEWEST_ROWS = 16  # of a matrix product in Triton
_MOST_GROUP = 128


class ExtentAttention:
    """The backend; `calls` counts kernels, one a layer and pass.

    kernel: the one in Triton, or a function with its arguments.
    extents: read block tables as runs of adjacent pages, where the layout allows it.
    """

    def __init__(self, kernel: ExtentKernel, *, extents: bool = False) -> None:
        self.kernel = kernel
        self.extents = extents
        self.calls = 0

    def begin(self, step: StepKv) -> ExtentStep:
        """Put what every layer needs onto the device."""
        return ExtentStep(self, step)

    def refuses(self, kind: AttentionKind) -> str | None:
        """Refuses keys and values that are not in memory."""
        return "it reads keys and values from memory alone; set worker.device to cpu" if kind.expanded else None


def why_not_group(group: int) -> str | None:
    """Why the kernel does not take `group` query heads a KV head; None if it does."""
    return f"it takes up to {_MOST_GROUP} query heads a KV head, not {group}" if group > _MOST_GROUP else None


class ExtentStep(FromMemory):
    """One pass; see `StepAttention`."""

    def __init__(self, backend: ExtentAttention, step: StepKv) -> None:
        self._backend = backend
        self._step = step
        self._layer, self._arguments = step.varlen_arguments()
        self._calls: dict[int, ExtentCall] = {}  # by the query heads of a KV head

    def attend(
        self, query: torch.Tensor, layer: int, scaling: float, kind: AttentionKind = FULL_ATTENTION
    ) -> torch.Tensor:
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim], by the keys and values in the pass's memory."""
        keys, values = self._layer(layer)
        group = query.shape[1] // keys.shape[-2]
        if group not in self._calls:
            self._calls[group] = self._call(keys, group)
        output = query.new_zeros((query.shape[2], query.shape[1], query.shape[3]))
        scores = Scores(scaling, kind.window, kind.softcap, kind.sinks)
        self._backend.calls += 1
        self._backend.kernel(query[0].transpose(0, 1), keys, values, self._calls[group], scores, output)
        return output.unsqueeze(0)

    def _call(self, keys: torch.Tensor, group: int) -> ExtentCall:
        if isinstance(self._step, CapturedStep):
            return self._captured(group)
        segments = self._step.segments
        positions, lasts = _reach(segments)
        tiles, block = _tiles([len(segment) for segment in segments], group)
        places = self._places(keys)
        columns = [*tiles, positions, lasts, *places]
        sizes = [len(column) for column in columns]
        sequence, row, count, places_, lasts_, *rest = to_device(
            np.concatenate(columns), torch.int32, keys.device
        ).split(sizes)
        return ExtentCall(
            Runs(*rest) if rest else Blocks(cast(torch.Tensor, self._arguments["block_table"])),
            Tiles(sequence, row, count, block),
            places_,
            lasts_,
            keys.shape[1] if keys.dim() == 4 else _TILE_ROWS,
            max(int(lasts.max()) + 1, 1),
        )

    def _places(self, keys: torch.Tensor) -> list[npt.NDArray[np.int32]]:
        """The columns of `Runs`; none for a block table."""
        lengths = np.array([segment.stop for segment in self._step.segments], np.int32)
        if isinstance(self._step, PagedStep):
            found = self._step.extents() if self._backend.extents else None
            return [] if found is None else _runs(found, keys.shape[1])
        if "block_table" in self._arguments:
            return []
        starts = cast(Sequence[int], self._step.starts)  # type: ignore[attr-defined]
        count = len(lengths)
        return [np.arange(count + 1, dtype=np.int32), np.zeros(count, np.int32), lengths, np.array(starts, np.int32)]

    def _captured(self, group: int) -> ExtentCall:
        """Of a captured pass of single queries; what differs from pass to pass is in its tensors."""
        step = cast(CapturedStep, self._step)
        if step.longest > 1:
            raise ModelError("a captured pass of prompts runs with flash attention alone")
        starts, lengths = (cast(torch.Tensor, self._arguments[name]) for name in ("cu_seq_k", "seqused_k"))
        count = len(lengths)
        numbers = torch.arange(count + 1, dtype=torch.int32, device=lengths.device)
        lasts = lengths - 1
        return ExtentCall(
            Runs(numbers, torch.zeros_like(lengths), lengths, starts[:-1]),
            Tiles(numbers[:-1], numbers[:-1], torch.ones_like(lengths), _block(1, group)),
            lasts,
            lasts,
            _TILE_ROWS,
            cast(int, self._arguments["max_k"]),
        )


def _reach(segments: Sequence[Segment]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The position of each row, and the last key that it sees: its own, or the last of its image."""
    positions = np.concatenate([np.arange(segment.start, segment.stop, dtype=np.int32) for segment in segments])
    if not any(segment.both_ways for segment in segments):
        return positions, positions
    lasts = positions.copy()
    row = 0
    for segment in segments:
        for first, end in segment.both_ways:
            lasts[row + first - segment.start : row + end - segment.start] = end - 1
        row += len(segment)
    return positions, lasts


def _tiles(lengths: Sequence[int], group: int) -> tuple[list[npt.NDArray[np.int32]], int]:
    """The columns of `Tiles` for segments of so many queries, and the rows of a tile's matrix."""
    counts = np.array(lengths, np.int32)
    block = _block(int(counts.max()), group)
    queries = block // group
    tiles = -(-counts // queries)
    sequence = np.repeat(np.arange(len(counts), dtype=np.int32), tiles)
    within = (np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * queries
    first = (np.cumsum(counts) - counts)[sequence] + within
    count = np.minimum(counts[sequence] - within, queries)
    return [sequence, first.astype(np.int32), count.astype(np.int32)], block


def _block(longest: int, group: int) -> int:
    """Rows of a tile's matrix: enough for the longest segment, but no more than `_TILE_ROWS` unless a query has."""
    wanted = max(_FEWEST_ROWS, min(longest * group, _TILE_ROWS), group)
    return 1 << math.ceil(math.log2(wanted))


def _runs(extents: Sequence[Extents], block_tokens: int) -> list[npt.NDArray[np.int32]]:
    """The columns of `Runs`."""
    first = np.cumsum([0, *(len(part.pages) for part in extents)], dtype=np.int32)
    blocks, counts, pages = (np.concatenate(column) for column in zip(*extents, strict=True))
    return [first, blocks * block_tokens, (blocks + counts) * block_tokens, pages]
