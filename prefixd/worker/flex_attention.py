"""Attention on a GPU by FlexAttention: one call a layer over virtual tensors, for shapes that flash attention lacks.

The batch's virtual tensors are one tensor of ``requests * stride`` keys, of which a block mask names the blocks that
the segments need: all others, mapped or not, are never touched. A mask block must therefore not reach beyond the last
block of KV that has memory, so its size divides `block_tokens`. For the same reason nothing is read before the mask
block of a window's first key.

Unverified on a GPU; the tests run its masks on a CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from prefixd.worker.attention import FULL_ATTENTION, AttentionKind
from prefixd.worker.errors import ModelError
from prefixd.worker.kv_memory import StepKv
from prefixd.worker.to_device import to_device
from prefixd.worker.virtual_kv import VirtualStep

try:
    from torch.nn.attention.flex_attention import AuxRequest
except ImportError:  # torch 2.8
    _WITH_LSE: dict[str, Any] = {"return_lse": True}
else:
    _WITH_LSE = {"return_aux": AuxRequest(lse=True)}

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
        """Zero the rest of the last mask blocks. Masks are made by the first layer of each kind."""
        for index, segment in enumerate(step.segments):
            step.scrub(index, -(-segment.stop // self.block) * self.block)
        return FlexStep(step, self.block, _compiled_flex() if self._compiled else flex_attention)

    def refuses(self, kind: AttentionKind) -> str | None:
        """What is not in memory."""
        return "it reads keys and values from memory alone; set worker.device to cpu" if kind.expanded else None


class FlexStep:
    """One pass; see `StepAttention`."""

    def __init__(self, step: StepKv, block: int, kernel: Any) -> None:
        self._kernel = kernel
        if not isinstance(step, VirtualStep):
            raise ModelError('FlexAttention runs on virtual tensors alone; set worker.kv to "virtual"')
        self._step = step
        self._block = block
        self._masks: dict[int | None, BlockMask] = {}  # by window
        self._tokens = sum(len(segment) for segment in step.segments)

    def attend(
        self, query: torch.Tensor, layer: int, scaling: float, kind: AttentionKind = FULL_ATTENTION
    ) -> torch.Tensor:
        """See `StepAttention.attend`."""
        keys, values = self._step.flat(layer)
        result = self._kernel(
            query[:, :, : self._tokens],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            score_mod=None if kind.softcap is None else _softcap(kind.softcap),
            block_mask=self.mask(kind.window),
            scale=scaling,
            enable_gqa=True,
            **({} if kind.sinks is None else _WITH_LSE),
        )
        if kind.sinks is not None:
            result, sums = result
            lse = sums if isinstance(sums, torch.Tensor) else sums.lse
            # A sink adds exp(sink) to the sum exp(lse) that the values were divided by.
            share = torch.sigmoid(lse - kind.sinks.float()[None, :, None])
            result = (result * share[..., None]).to(query.dtype)
        output = query.new_zeros((1, query.shape[2], query.shape[1], query.shape[3]))
        output[:, : self._tokens] = result.transpose(1, 2)
        return output

    def expands(self, layer: int) -> bool:
        """Never."""
        del layer
        return False

    def attend_given(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, kind: AttentionKind
    ) -> torch.Tensor:
        """Refused when the model is loaded."""
        raise ModelError("FlexAttention reads keys and values from memory alone")

    def mask(self, window: int | None) -> BlockMask:
        """Which keys each query of the pass sees."""
        if window not in self._masks:
            seen = []
            for start, segment in zip(self._step.starts, self._step.segments, strict=True):
                lasts = {at: end - 1 for first, end in segment.both_ways for at in range(first, end)}
                for position in range(segment.start, segment.stop):
                    first = 0 if window is None else max(0, position - window + 1)
                    seen.append(_Seen(start, start + first, start + lasts.get(position, position)))
            keys = self._step.flat(0)[0]
            self._masks[window] = _block_mask(seen, keys.shape[0], self._block, keys.device)
        return self._masks[window]


class _Seen(NamedTuple):
    """What a query sees of all keys: [first, last], of the sequence that begins at `sequence`."""

    sequence: int
    first: int
    last: int


def _block_mask(seen: Sequence[_Seen], keys: int, block: int, device: torch.device) -> BlockMask:
    """The mask of queries, in blocks of `block` keys."""
    queries = len(seen)
    per_query_block: list[list[int]] = []
    for query in range(0, queries, block):
        reach: dict[int, tuple[int, int]] = {}  # by sequence: the first and the last key that these queries see
        for sequence, first, last in seen[query : query + block]:
            before = reach.get(sequence, (first, last))
            reach[sequence] = min(before[0], first), max(before[1], last)
        runs = [range(first // block, last // block + 1) for first, last in reach.values()]
        per_query_block.append([needed for run in runs for needed in run])
    width = max(map(len, per_query_block))
    indices = [[*needed, *[0] * (width - len(needed))] for needed in per_query_block]
    firsts = to_device([each.first for each in seen], torch.int64, device)
    lasts = to_device([each.last for each in seen], torch.int64, device)

    def mask_mod(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key >= firsts[query]) & (key <= lasts[query])

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
def _softcap(cap: float) -> Callable[..., torch.Tensor]:
    """The same function each time, so that it is compiled once."""

    def score_mod(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)
