"""The worker's attention on a CPU over three kinds of memory: virtual tensors, block tables, and plain tensors.

All three have the same keys and values, and the same code computes the attention (`TileAttention`). What differs is how
it gets at a sequence's keys: virtual tensors and plain tensors are read where they lie; the blocks of a block table are
copied together first, in every layer of every pass, as a CPU has no kernel that follows a block table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random

import torch

from benchmarks.common.harness import BenchmarkError
from prefixd.worker.attention.tile_attention import TileAttention
from prefixd.worker.memory.frame_window import FrameWindow
from prefixd.worker.memory.kv_memory import KvMemory, Segment, Spans, StepKv
from prefixd.worker.memory.paged_kv import PagedKv
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import FramePool, create_memory
from prefixd_swap.vtensor import VirtualTensorManager

VIRTUAL, PAGED, NATIVE = "virtual", "paged", "native"
_LAYERS = 2  # so that a layer's keys lie apart from each other, as in a model
_BLOCK_TOKENS = 16
_CHUNK_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class Shape:
    """One pass: `batch` sequences of `tokens` tokens, whole blocks of 16, of which the last `new` are computed.

    kv_heads: of `query_heads`, whose number is that of vTensor's models (Yi-6B: 32 and 4).
    """

    batch: int
    tokens: int
    new: int
    kv_heads: int = 4
    query_heads: int = 32
    head_dim: int = 128


def speed_ratios(shape: Shape, rounds: int) -> dict[str, float]:
    """How many times as fast virtual tensors are: {"paged": 2.1, "native": 0.99}, the medians of `rounds`.

    Raises BenchmarkError when the three do not compute the same.
    """
    times = kernel_times(shape, rounds)
    return {
        way: statistics.median(other / own for other, own in zip(times[way], times[VIRTUAL], strict=True))
        for way in (PAGED, NATIVE)
    }


def kernel_times(shape: Shape, rounds: int) -> dict[str, list[float]]:
    """Seconds of a pass through all layers, of each way in each round; they take turns."""
    with torch.inference_mode():
        return _times(shape, rounds)


def _times(shape: Shape, rounds: int) -> dict[str, list[float]]:
    source = torch.Generator().manual_seed(shape.tokens)
    geometry = KvGeometry(_LAYERS, shape.kv_heads, shape.head_dim, "float32", _BLOCK_TOKENS)
    blocks = -(-shape.tokens // _BLOCK_TOKENS)
    pairs = [
        torch.randn(_LAYERS, shape.tokens, 2, shape.kv_heads, shape.head_dim, generator=source)
        for _ in range(shape.batch)
    ]
    query = torch.randn(1, shape.query_heads, shape.batch * shape.new, shape.head_dim, generator=source)
    with ExitStack() as stack:
        memory = create_memory("cpu", _CHUNK_BYTES)
        pool = FramePool(memory, geometry.block_bytes, shape.batch * blocks)
        stack.callback(memory.close)
        stack.callback(pool.close)
        taken = pool.allocate(shape.batch * blocks)
        assert taken is not None, "as many were created"
        frames = list(taken)
        Random(0).shuffle(frames)  # blocks of a cache that has been in use lie anywhere
        rows = [frames[first : first + blocks] for first in range(0, len(frames), blocks)]
        manager = VirtualTensorManager(memory, pool.table, geometry, requests=shape.batch, max_tokens=shape.tokens)
        window = FrameWindow(memory, pool.table, pool.frame_bytes, pool.most)
        designs: dict[str, KvMemory] = {
            VIRTUAL: VirtualKv(manager),
            PAGED: PagedKv(window, geometry, max_tokens=shape.tokens),
        }
        passes: dict[str, Callable[[], list[torch.Tensor]]] = {}
        for way, kv in designs.items():
            stack.callback(kv.end)
            passes[way] = _pass(_filled(kv, rows, pairs, shape, stack), query, shape)
        passes[NATIVE] = _pass(_PlainStep(pairs, shape), query, shape)
        _check(passes)
        seconds: dict[str, list[float]] = {way: [] for way in passes}
        order = list(passes)
        for _ in range(rounds):
            order = order[1:] + order[:1]  # each follows each of the others, whose keys fill the processor's caches
            for way in order:
                began = time.perf_counter()
                passes[way]()
                seconds[way].append(time.perf_counter() - began)
    return seconds


class _PlainStep:
    """A pass over tensors as torch allocates them, ``[layers, tokens, 2, kv_heads, head_dim]`` each."""

    def __init__(self, pairs: Sequence[torch.Tensor], shape: Shape) -> None:
        self._pairs = pairs
        self.segments = tuple(Segment(_NoSequence(), shape.tokens - shape.new, shape.tokens) for _ in pairs)

    def read(self, layer: int, spans: Spans) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views."""
        parts = [pair[layer, start:end] for pair, (start, end) in zip(self._pairs, spans, strict=True)]
        return [(part[:, 0].transpose(0, 1), part[:, 1].transpose(0, 1)) for part in parts]

    def scrub(self, segment: int, end: int) -> None:
        """Nothing lies behind the last token."""


class _NoSequence:
    blocks = 0


def _filled(
    kv: KvMemory, rows: Sequence[Sequence[int]], pairs: Sequence[torch.Tensor], shape: Shape, stack: ExitStack
) -> StepKv:
    """A pass over sequences whose memory has these keys and values."""
    sequences = [kv.open(row) for row in rows]
    for sequence in sequences:
        stack.callback(kv.close, sequence, lambda: None)
        kv.wait(sequence, shape.tokens)
    step = kv.step([Segment(sequence, 0, shape.tokens) for sequence in sequences])
    for layer in range(_LAYERS):
        step.write(layer, torch.cat([pair[layer] for pair in pairs]))
    return kv.step([Segment(sequence, shape.tokens - shape.new, shape.tokens) for sequence in sequences])


def _pass(step: StepKv | _PlainStep, query: torch.Tensor, shape: Shape) -> Callable[[], list[torch.Tensor]]:
    attention = TileAttention(_BLOCK_TOKENS, torch.float32)

    def run() -> list[torch.Tensor]:
        begun = attention.begin(step)  # type: ignore[arg-type]  # a plain step is only read
        return [begun.attend(query, layer, shape.head_dim**-0.5) for layer in range(_LAYERS)]

    return run


def _check(passes: dict[str, Callable[[], list[torch.Tensor]]]) -> None:
    first, *others = (run() for run in passes.values())
    for way, found in zip(list(passes)[1:], others, strict=True):
        if not all(torch.equal(one, other) for one, other in zip(first, found, strict=True)):
            raise BenchmarkError(f"attention over {way} memory differs from that over virtual tensors")
