"""Attention on a GPU by FlexAttention: one call a layer over virtual tensors, for shapes that flash attention lacks.

The batch's virtual tensors are one tensor of ``requests * stride`` keys, of which a block mask names the blocks that
the segments need: all others, mapped or not, are never touched. A mask block must therefore not reach beyond the last
block of KV that has memory, so its size divides `block_tokens`.

Unverified on a GPU; the tests run its masks on a CPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from prefixd.worker.errors import ModelError
from prefixd.worker.kv_memory import StepKv
from prefixd.worker.to_device import to_device
from prefixd.worker.virtual_kv import VirtualStep

_LARGEST_BLOCK = 128
_SMALLEST_BLOCK = 16  # of a matrix product in Triton


class FlexAttention:
    """The backend.

    block_tokens: of the KV memory; a multiple of 16.  compiled: False computes without a kernel, slowly, for tests.
    """

    def __init__(self, block_tokens: int, *, compiled: bool = True) -> None:
        self.block = math.gcd(block_tokens, _LARGEST_BLOCK)
        if self.block < _SMALLEST_BLOCK:
            raise ModelError(
                f"FlexAttention needs blocks that are a multiple of {_SMALLEST_BLOCK} tokens, not of "
                f"{block_tokens}; set worker.block_tokens to such a multiple, or worker.dtype to bfloat16"
            )
        self._compiled = compiled

    def begin(self, step: StepKv) -> FlexStep:
        """Make the pass's block mask, and zero the rest of the last mask blocks."""
        for index, segment in enumerate(step.segments):
            step.scrub(index, -(-segment.stop // self.block) * self.block)
        return FlexStep(step, self.block, _compiled_flex() if self._compiled else flex_attention)


class FlexStep:
    """One pass; see `StepAttention`."""

    def __init__(self, step: StepKv, block: int, kernel: Any) -> None:
        self._kernel = kernel
        if not isinstance(step, VirtualStep):
            raise ModelError('FlexAttention runs on virtual tensors alone; set worker.kv to "virtual"')
        self._step = step
        self._tokens = sum(len(segment) for segment in step.segments)
        first_key: list[int] = []
        position: list[int] = []
        for start, segment in zip(step.starts, step.segments, strict=True):
            first_key += [start] * len(segment)
            position += range(segment.start, segment.stop)
        keys = step.flat(0)[0]
        self._mask = _block_mask(first_key, position, keys.shape[0], block, keys.device)

    def attend(self, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
        """See `StepAttention.attend`."""
        keys, values = self._step.flat(layer)
        result = self._kernel(
            query[:, :, : self._tokens],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            block_mask=self._mask,
            scale=scaling,
            enable_gqa=True,
        )
        output = query.new_zeros((1, query.shape[2], query.shape[1], query.shape[3]))
        output[:, : self._tokens] = result.transpose(1, 2)
        return output


def _block_mask(first_key: list[int], position: list[int], keys: int, block: int, device: torch.device) -> BlockMask:
    """The mask of queries that begin at `first_key` and see `position` + 1 keys each, in blocks of `block` keys."""
    queries = len(position)
    per_query_block: list[list[int]] = []
    for query in range(0, queries, block):
        last: dict[int, int] = {}  # by sequence: the farthest key that a query of this block sees
        for index in range(query, min(query + block, queries)):
            last[first_key[index]] = max(last.get(first_key[index], 0), position[index])
        ranges = [range(first // block, (first + far) // block + 1) for first, far in last.items()]
        per_query_block.append([needed for run in ranges for needed in run])
    width = max(map(len, per_query_block))
    indices = [[*needed, *[0] * (width - len(needed))] for needed in per_query_block]
    starts = to_device(first_key, torch.int64, device)
    ends = starts + to_device(position, torch.int64, device)

    def mask_mod(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key >= starts[query]) & (key <= ends[query])

    # Not from_kv_blocks: its blocks of queries by key are for gradients, and as many as the whole reservation has.
    return BlockMask(
        seq_lengths=(queries, keys),
        kv_num_blocks=to_device([[[len(needed) for needed in per_query_block]]], torch.int32, device),
        kv_indices=to_device([[indices]], torch.int32, device),
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(block, block),
        mask_mod=mask_mod,
    )


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)
