"""Attention over contiguous virtual memory, against block tables and against a kernel a request.

vTensor's figures 7 (decoding) and 8 (a prompt behind a cached prefix), vAttention's table 6.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.engines.varlen_reference import varlen_reference
from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.kv import GQA, LAYOUTS, MHA, MQA, SMALL, Heads, Tensors, virtual_tensors
from benchmarks.gpu_parts.rig.part import Budget, Part, Unavailable
from prefixd.worker.attention.attention import AttentionBackend, StepAttention
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.attention.flex_attention import FlexAttention, check_reach
from prefixd.worker.attention.kernels.flash_kernels import VarlenKernel, find_kernel
from prefixd.worker.memory.frame_window import FrameWindow
from prefixd.worker.memory.kv_memory import KvMemory, Segment, StepKv
from prefixd.worker.memory.paged_kv import PagedKv, PagedStep
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker_protocol.errors import ModelError
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import VirtualMemory

BATCHES, TOKENS, NEW_TOKENS = (1, 8, 64), (1024, 8192, 32768), 128
_SMALL_BATCHES, _SMALL_TOKENS, _SMALL_NEW_TOKENS = (1, 2), (128,), 8
_MOST_BYTES = 48 << 30
_SMALL_BYTES = 64 << 20
_PREFILL_LAYERS = 4
_TOLERANCE = 0.02
PHASES = ("decode", "prefill")

Attend = Callable[[torch.Tensor, int], torch.Tensor]
"""Query ``[1, heads, tokens, head_dim]`` and a layer to ``[tokens, heads, head_dim]``."""


def measure_kernels(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Microseconds a layer of every way but FlexAttention's."""
    ways = ["contiguous", "request", "paged", "gathered"]
    return _measure(device, budget, ways, [GQA, MHA, MQA] if device.measures else list(SMALL))


def measure_flex(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Microseconds a layer of FlexAttention; apart, because compiling it takes long and needs Triton."""
    if not device.measures:
        raise Unavailable("FlexAttention without its compiled kernel reads memory that is not mapped")
    return _measure(device, budget, ["flex"], [GQA])


def _measure(device: Device, budget: Budget, ways: Sequence[str], shapes: Sequence[Heads]) -> Mapping[str, Any]:
    """For every shape, layout, batch and length: each way's time, in decoding and in a prompt behind a prefix.

    A way that has been measured in a point has been compared with the definition of attention on a small batch before.
    """
    batches, lengths, new = (
        (BATCHES, TOKENS, NEW_TOKENS) if device.measures else (_SMALL_BATCHES, _SMALL_TOKENS, _SMALL_NEW_TOKENS)
    )
    points: list[dict[str, Any]] = []
    errors: dict[str, float] = {}
    with device.memory() as memory:
        most = min(_MOST_BYTES if device.measures else _SMALL_BYTES, device.free_bytes() // 2)
        chunks = memory.create(most // memory.chunk_bytes)
        _fill(device, memory, chunks)
        for heads, layout in itertools.product(shapes, LAYOUTS):
            name = f"{heads.name} {layout}"
            if not budget.allows(name):
                continue
            geometry = heads.geometry(layout, memory.chunk_bytes)
            reached = [length for length in lengths if "flex" not in ways or _flex_reaches(geometry, length + new)]
            budget.skipped += [f"{name} {tokens}: over 32 bits" for tokens in lengths if tokens not in reached]
            block = geometry.block_tokens
            longest = max(-(-(max(reached) + new) // block), 2) * block  # two for `_Bench.check`
            with virtual_tensors(device, memory, chunks, geometry, max(3, *batches), longest) as tensors:
                bench = _Bench(device, heads, tensors, longest)
                right = []
                budget.skipped += [f"{name} {way}: not in this torch" for way in ways if way not in bench.ways(ways)]
                for way in bench.ways(ways):
                    with budget.attempt(f"{name} {way}"):
                        errors[f"{name} {way}"] = bench.check(way)
                        right.append(way)
                for tokens, batch in itertools.product(reached, batches):
                    if bench.blocks(tokens + new) * batch > len(tensors.frames):
                        budget.skipped.append(f"{name} {batch} x {tokens}: not enough memory")
                    elif budget.allows(point := f"{name} {batch} x {tokens}"):
                        with budget.attempt(point):
                            points += bench.points(right, batch, tokens, new)
                bench.close()
    return {"new_tokens_of_prefill": new, "relative_errors": errors, "points": points}


class _Bench:
    """All ways over the same frames of one shape and layout."""

    def __init__(self, device: Device, heads: Heads, tensors: Tensors, longest: int) -> None:
        self._device = device
        self._heads = heads
        self._geometry = tensors.manager.geometry
        self._frames = tensors.frames
        self._virtual = VirtualKv(tensors.manager)
        window = FrameWindow(tensors.manager.memory, tensors.table, self._geometry.block_bytes, len(tensors.frames))
        self._paged = PagedKv(window, self._geometry, max_tokens=longest)
        self._kernel = (
            find_kernel(heads.head_dim, torch.bfloat16, device.torch_device) if device.measures else varlen_reference
        )

    def ways(self, wanted: Sequence[str]) -> list[str]:
        """Those of `wanted` that this torch can do: not every kernel knows block tables."""
        ways = [way for way in wanted if self._kernel is not None or way in ("flex", "request")]
        paged = self._kernel is not None and "block_table" in inspect.signature(self._kernel).parameters
        return [way for way in ways if way != "paged" or paged]

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self._geometry.block_tokens)

    def check(self, way: str) -> float:
        """The relative error on three sequences that end inside a block. Raises RuntimeError when it is too large."""
        block = self._geometry.block_tokens
        lengths, new = [block + block // 2, 2 * block, 5], [3, min(block, 40), 5]
        with _Sequences(self, way, lengths, new) as (step, attend):
            query = self._query(sum(new))
            found = attend(query, 1).float().cpu()
            expected = self._expected(query, step, 1)
        error = float((found - expected).norm() / expected.norm())
        if not error <= _TOLERANCE:
            raise RuntimeError(f"{way} attention of {self._heads.name} is wrong: relative error {error:.2g}")
        return round(error, 5)

    def points(self, ways: Sequence[str], batch: int, tokens: int, new: int) -> list[dict[str, Any]]:
        points = []
        for phase, count in zip(PHASES, (1, new), strict=True):
            layers = self._geometry.layers if phase == "decode" else min(_PREFILL_LAYERS, self._geometry.layers)
            point: dict[str, Any] = {
                "shape": self._heads.name,
                "layout": self._geometry.layout,
                "phase": phase,
                "batch": batch,
                "tokens": tokens,
            }
            query = self._query(batch * count)
            for way in ways:
                # All layers in turn, so that a layer's keys have left the device's cache when it comes again.
                with _Sequences(self, way, [tokens + count] * batch, [count] * batch) as (_, attend):
                    point[f"{way}_us"] = round(
                        self._device.stream_us(partial(_all_layers, attend, query, layers), 5) / layers, 2
                    )
            points.append(point)
        return points

    def close(self) -> None:
        self._device.synchronize()
        self._paged.end()

    def open(self, way: str, lengths: Sequence[int], new: Sequence[int]) -> tuple[KvMemory, list[Segment]]:
        """Sequences of these lengths, of which the last `new` tokens are to be computed."""
        memory: KvMemory = self._paged if way in ("paged", "gathered") else self._virtual
        segments = []
        first = 0
        for length, count in zip(lengths, new, strict=True):
            frames = self._frames[first : first + self.blocks(length)]
            first += len(frames)
            segments.append(Segment(memory.open(frames), length - count, length))
        return memory, segments

    def attend(self, way: str, step: StepKv) -> Attend:
        """How the way computes a layer of a pass."""
        scale = self._heads.head_dim**-0.5
        if way == "request":
            return _RequestByRequest(step, scale).attend
        if way == "gathered":
            assert isinstance(step, PagedStep)
            step = GatheredStep(step)
        backend: AttentionBackend = (
            FlexAttention(self._geometry.block_tokens) if way == "flex" else FlashAttention(_found(self._kernel))
        )
        begun: StepAttention = backend.begin(step)
        return lambda query, layer: begun.attend(query, layer, scale)[0]

    def _query(self, tokens: int) -> torch.Tensor:
        generator = torch.Generator(self._device.torch_device).manual_seed(tokens)
        shape = (1, self._heads.query_heads, tokens, self._heads.head_dim)
        return torch.randn(shape, generator=generator, device=self._device.torch_device).bfloat16()

    def _expected(self, query: torch.Tensor, step: StepKv, layer: int) -> torch.Tensor:
        """By the definition, in float32 on the CPU: ``[tokens, heads, head_dim]``."""
        flat = query[0].transpose(0, 1).float().cpu()
        read = step.read(layer, tuple((0, segment.stop) for segment in step.segments))
        outputs = []
        for (keys, values), segment in zip(read, step.segments, strict=True):
            part, flat = flat[: len(segment)], flat[len(segment) :]
            starts, used = (torch.tensor([0, count], dtype=torch.int32) for count in (len(segment), segment.stop))
            outputs.append(
                varlen_reference(
                    part,
                    keys.transpose(0, 1).float().cpu(),
                    values.transpose(0, 1).float().cpu(),
                    starts,
                    used,
                    len(segment),
                    segment.stop,
                    scale=self._heads.head_dim**-0.5,
                    window_size=(-1, 0),
                    enable_gqa=True,
                    seqused_k=used[1:],
                )
            )
        return torch.cat(outputs)


class _Sequences:
    """Sequences that are open inside a `with` block, and how to attend to them."""

    def __init__(self, bench: _Bench, way: str, lengths: Sequence[int], new: Sequence[int]) -> None:
        self._bench, self._way = bench, way
        self._memory, self._segments = bench.open(way, lengths, new)

    def __enter__(self) -> tuple[StepKv, Attend]:
        for segment in self._segments:
            self._memory.wait(segment.sequence, segment.stop)
        step = self._memory.step(self._segments)
        return step, self._bench.attend(self._way, step)

    def __exit__(self, *_: object) -> None:
        self._bench._device.synchronize()
        for segment in self._segments:
            self._memory.close(segment.sequence, lambda: None)
        self._memory.poll(wait=True)


class _RequestByRequest:
    """An ordinary kernel for every request, as where each has a reservation of its own."""

    def __init__(self, step: StepKv, scale: float) -> None:
        self._step = step
        self._scale = scale
        self._spans = tuple((0, segment.stop) for segment in step.segments)

    def attend(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        outputs = []
        first = 0
        for (keys, values), segment in zip(self._step.read(layer, self._spans), self._step.segments, strict=True):
            part = query[:, :, first : first + len(segment)]
            first += len(segment)
            mask: Any = causal_lower_right(len(segment), segment.stop) if len(segment) > 1 else None
            attended = F.scaled_dot_product_attention(
                part, keys[None], values[None], attn_mask=mask, scale=self._scale, enable_gqa=True
            )
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)


class GatheredStep:
    """A pass over block tables for a kernel without them: every layer's blocks are copied together.

    It reads as `StepKv`; nothing is written through it.
    """

    def __init__(self, step: PagedStep) -> None:
        self.segments = step.segments
        self._pool = step._pool
        block = self._pool.shape[1]
        tables = [segment.sequence.frames[: -(-segment.stop // block)] for segment in step.segments]  # type: ignore[attr-defined]
        device = self._pool.device
        self._blocks = torch.tensor([frame for table in tables for frame in table], device=device)
        starts = [0, *itertools.accumulate(len(table) * block for table in tables)]
        self._arguments: dict[str, object] = {
            "cu_seq_k": torch.tensor(starts, dtype=torch.int32, device=device),
            "max_k": max(len(table) * block for table in tables),
            "seqused_k": torch.tensor([part.stop for part in step.segments], dtype=torch.int32, device=device),
        }
        self.write, self.scrub, self.read = step.write, step.scrub, step.read

    def varlen_arguments(self) -> tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], dict[str, object]]:
        """Keys and values of a layer are copies."""

        def layer(number: int) -> tuple[torch.Tensor, torch.Tensor]:
            gathered = self._pool[:, :, number].index_select(0, self._blocks).flatten(0, 1)
            return gathered[:, 0], gathered[:, 1]

        return layer, self._arguments


def _flex_reaches(geometry: KvGeometry, tokens: int) -> bool:
    """Whether FlexAttention reaches the last of so many tokens in whole blocks."""
    try:
        check_reach(geometry, -(-tokens // geometry.block_tokens) * geometry.block_tokens)
    except ModelError:
        return False
    return True


def _all_layers(attend: Attend, query: torch.Tensor, layers: int) -> None:
    for layer in range(layers):
        attend(query, layer)


def _found(kernel: VarlenKernel | None) -> VarlenKernel:
    if kernel is None:
        raise Unavailable("this torch or this GPU has no flash attention for bfloat16")
    return kernel


def _fill(device: Device, memory: VirtualMemory, chunks: range) -> None:
    """Random numbers in all chunks: what they held might be no numbers at all."""
    window = memory.reserve(len(chunks) * memory.chunk_bytes)
    window.map(0, chunks)
    window.tensor((window.nbytes // 2,), torch.bfloat16).normal_()
    device.synchronize()
    window.discard()


PART = Part("attention", 70, measure_kernels)
FLEX_PART = Part("flex_attention", 50, measure_flex)
