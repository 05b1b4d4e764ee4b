"""Attention on a GPU by FlexAttention: one call a layer over virtual tensors, for shapes that flash attention lacks.

The batch's virtual tensors are one tensor of ``requests * stride`` keys. A block mask names the blocks that the
segments need: no other block, mapped or not, is touched. Therefore a mask block must not reach beyond the last block of
KV that has memory, so its size divides `block_tokens`. For the same reason nothing is read before the mask block of a
window's first key.

The kernel counts elements in 32 bits, so the rows of one call must lie within 2^31 elements: a single call for all rows
if their reservation is that small, as in the layout "layer", else a call for a few rows or for one.

`make gpu-check` runs it on a GPU; the tests run its masks on a CPU.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from prefixd.worker.attention.attention import FULL_ATTENTION, AttentionKind, FromMemory
from prefixd.worker.memory.kv_memory import Segment, StepKv
from prefixd.worker.memory.virtual_kv import VirtualStep
from prefixd.worker.to_device import to_device
from prefixd.worker_protocol.errors import ModelError
from prefixd_swap.group_shape import KvGeometry

try:
    from torch.nn.attention.flex_attention import AuxRequest
except ImportError:  # torch 2.8
    _WITH_LSE: dict[str, Any] = {"return_lse": True}
else:
    _WITH_LSE = {"return_aux": AuxRequest(lse=True)}

_LARGEST_BLOCK = 128
_SMALLEST_BLOCK = 16  # of a matrix product in Triton
# Tiles of the kernel that fit the shared memory of small GPUs too, for 16-bit and for 32-bit numbers. Where segments
# are short, as in decoding, a wide tile would go through the keys of many of them.
_TILE_QUERIES = {2: 64, 4: 32}
_TILE_SHORT_QUERIES = 16
_TILE_KEYS = 32
_MOST_ELEMENTS = 1 << 31  # from the first to the last of a call's keys
# It is compiled for one and for several queries, blocks of queries and blocks of keys, for less and for more than 128
# queries, and each of these for each kind of layer. Beyond the limit torch silently computes over all keys, mapped or
# not, or with `fullgraph` raises an error.
_MOST_KERNELS = 128


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
        """Refuses keys and values that are not in memory."""
        return "it reads keys and values from memory alone; set worker.device to cpu" if kind.expanded else None


def check_reach(geometry: KvGeometry, tokens: int) -> None:
    """Raise ModelError when the kernel cannot reach the last of a sequence's `tokens` tokens."""
    elements = geometry.stride // geometry.element_bytes
    if tokens * elements > _MOST_ELEMENTS:
        raise ModelError(
            f"FlexAttention reaches {_MOST_ELEMENTS // elements} tokens, {elements} numbers apart, not {tokens}; set "
            "worker.max_model_tokens to no more than that"
            + (', or worker.layout to "layer"' if geometry.pieces < geometry.layers else "")
        )


class FlexStep(FromMemory):
    """One pass; see `StepAttention`.

    Attributes:
        parts: its segments, in order, as the kernel takes them.
    """

    def __init__(self, step: StepKv, block: int, kernel: Any) -> None:
        self._kernel = kernel
        if not isinstance(step, VirtualStep):
            raise ModelError('FlexAttention runs on virtual tensors alone; set worker.kv to "virtual"')
        self._step = step
        itemsize = step.flat(0)[0].dtype.itemsize
        short = all(len(segment) <= _TILE_SHORT_QUERIES for segment in step.segments)
        query_block = _TILE_SHORT_QUERIES if short else _TILE_QUERIES[itemsize]
        # By default torch chooses tiles of up to 128, which have to divide the blocks of the mask. And for few queries
        # it chooses another kernel, with one tile for all queries and their heads: a tile of 17 to 127 queries divides
        # no block of 16, and one of 128 in 32-bit numbers took more than a minute to compile.
        self._options = {
            "FORCE_USE_FLEX_ATTENTION": True,
            "BLOCK_M": query_block,
            "BLOCK_N": min(block, _TILE_KEYS),
        }
        self.parts = _parts(step, functools.partial(_block_mask, query_block=query_block, block=block))

    def attend(
        self, query: torch.Tensor, layer: int, scaling: float, kind: AttentionKind = FULL_ATTENTION
    ) -> torch.Tensor:
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim], by the keys and values in the pass's memory."""
        keys, values = self._step.flat(layer)
        output = query.new_zeros((1, query.shape[2], query.shape[1], query.shape[3]))
        for part in self.parts:
            reach = slice(part.first_key, part.first_key + part.keys)
            result = self._kernel(
                query[:, :, part.queries],
                keys[reach].transpose(0, 1)[None],
                values[reach].transpose(0, 1)[None],
                score_mod=None if kind.softcap is None else _softcap(kind.softcap, query.device),
                block_mask=part.mask(kind.window),
                scale=scaling,
                enable_gqa=True,
                kernel_options=self._options,
                **({} if kind.sinks is None else _WITH_LSE),
            )
            if kind.sinks is not None:
                result, sums = result
                lse = sums if isinstance(sums, torch.Tensor) else sums.lse
                # A sink adds exp(sink) to the sum exp(lse) that the values were divided by.
                share = torch.sigmoid(lse - kind.sinks.float()[None, :, None])
                result = (result * share[..., None]).to(query.dtype)
            output[:, part.queries] = result.transpose(1, 2)
        return output


class FlexPart:
    """Segments of a pass that the kernel takes in one call.

    segments, starts: those of the pass, and where the first key of each lies in what `VirtualStep.flat` returns.
    queries: of the pass.  first_key, keys: the first key of `flat` that the call reaches, and their number.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        starts: Sequence[int],
        queries: slice,
        first_key: int,
        keys: int,
        make_mask: Callable[..., BlockMask],
    ) -> None:
        self.queries = queries
        self.first_key = first_key
        self.keys = keys
        self._segments = segments
        self._starts = starts
        self._make_mask = make_mask
        self._masks: dict[int | None, BlockMask] = {}  # by window

    def mask(self, window: int | None) -> BlockMask:
        """The mask of the keys that each query sees."""
        if window not in self._masks:
            seen = []
            for start, segment in zip(self._starts, self._segments, strict=True):
                start -= self.first_key
                lasts = {at: end - 1 for first, end in segment.both_ways for at in range(first, end)}
                for position in range(segment.start, segment.stop):
                    first = 0 if window is None else max(0, position - window + 1)
                    seen.append(_Seen(start, start + first, start + lasts.get(position, position)))
            self._masks[window] = self._make_mask(seen, self.keys)
        return self._masks[window]


def _parts(step: VirtualStep, make_mask: Callable[..., BlockMask]) -> list[FlexPart]:
    """The segments in order, as many in a part as lie within the kernel's reach."""
    flat = step.flat(0)[0]
    rows, most = flat.shape[0] // step.row_tokens, _MOST_ELEMENTS // flat.stride(0) // step.row_tokens
    if most < 1:
        raise ModelError(f"FlexAttention does not reach all of {step.row_tokens} tokens {flat.stride(0)} numbers apart")
    parts: list[FlexPart] = []
    first = tokens = 0
    numbers = [start // step.row_tokens for start in step.starts]
    while first < len(numbers):
        low, high, end = (0, rows, len(numbers)) if rows <= most else (numbers[first], numbers[first] + 1, first + 1)
        while end < len(numbers) and max(high, numbers[end] + 1) - min(low, numbers[end]) <= most:
            low, high, end = min(low, numbers[end]), max(high, numbers[end] + 1), end + 1
        segments = step.segments[first:end]
        queries = slice(tokens, tokens + sum(map(len, segments)))
        parts.append(
            FlexPart(
                segments,
                step.starts[first:end],
                queries,
                low * step.row_tokens,
                (high - low) * step.row_tokens,
                functools.partial(make_mask, device=flat.device),
            )
        )
        first, tokens = end, queries.stop
    return parts


class _Seen(NamedTuple):
    """The keys [first, last] that a query sees, of the sequence that begins at `sequence`."""

    sequence: int
    first: int
    last: int


def _block_mask(seen: Sequence[_Seen], keys: int, query_block: int, block: int, device: torch.device) -> BlockMask:
    """The mask of queries, in blocks of `query_block` queries and `block` keys."""
    queries = len(seen)
    per_query_block: list[list[int]] = []
    for query in range(0, queries, query_block):
        reach: dict[int, tuple[int, int]] = {}  # by sequence: the first and the last key that these queries see
        for sequence, first, last in seen[query : query + query_block]:
            before = reach.get(sequence, (first, last))
            reach[sequence] = min(before[0], first), max(before[1], last)
        runs = [range(first // block, last // block + 1) for first, last in reach.values()]
        per_query_block.append([needed for run in runs for needed in run])
    width = max(2, *map(len, per_query_block))  # one is a kernel of its own
    indices = [[*needed, *[0] * (width - len(needed))] for needed in per_query_block]
    firsts = to_device([each.first for each in seen], torch.int64, device)
    lasts = to_device([each.last for each in seen], torch.int64, device)

    def mask_mod(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key >= firsts[query]) & (key <= lasts[query])

    # Not from_kv_blocks: it also makes blocks of queries by key, for gradients, as many as the whole reservation has.
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
        BLOCK_SIZE=(query_block, block),
        mask_mod=mask_mod,
    )


@functools.cache
def _softcap(cap: float, device: torch.device) -> Callable[..., torch.Tensor]:
    """The same function each time, so that it is compiled once.

    The cap is a tensor: a Python number becomes a symbol for `torch.compile` with dynamic shapes, for which torch 2.11
    cannot make a kernel.
    """
    most = torch.tensor(cap, device=device)

    def score_mod(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return most * torch.tanh(score / most)

    return score_mod


@functools.cache
def _compiled_flex() -> Any:
    config: Any = importlib.import_module("torch._dynamo.config")
    config.recompile_limit = max(config.recompile_limit, _MOST_KERNELS)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
