"""Attention over contiguous virtual memory by several calls, against block tables and against a kernel a request.

vTensor's figures 7 (decoding) and 8 (a prompt behind a cached prefix), vAttention's table 6. The times of the ways that
the worker may choose are also written as the table that it plans by (`choice_table`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.engines.varlen_reference import varlen_reference
from benchmarks.gpu_parts.rig import choice_table
from benchmarks.gpu_parts.rig.attention_ways import PAGED_WAYS, Attend, Ways, splits_of
from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.kv import (
    GQA,
    LAYOUTS,
    MHA,
    MQA,
    QWEN,
    QWEN_PADDED,
    SMALL,
    SMALL_PADDED,
    Heads,
    Tensors,
    virtual_tensors,
)
from benchmarks.gpu_parts.rig.part import Budget, Part, Unavailable
from benchmarks.gpu_parts.rig.prediction import Prediction, point_figure
from prefixd.worker.attention.choice.pass_plan import may_split
from prefixd.worker.attention.flex_attention import check_reach
from prefixd.worker.memory.frame_window import FrameWindow
from prefixd.worker.memory.kv_memory import KvMemory, Segment, StepKv
from prefixd.worker.memory.paged_kv import PagedKv
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker_protocol.errors import ModelError
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import VirtualMemory

BATCHES, TOKENS, NEW_TOKENS = (1, 8, 64), (1024, 8192, 32768), 128
_FEW_BATCHES, _FEW_TOKENS = (8,), (1024, 8192)
_SMALL_BATCHES, _SMALL_TOKENS, _SMALL_NEW_TOKENS = (1, 2), (128,), 8
_MOST_BYTES = 48 << 30
_SMALL_BYTES = 64 << 20
_PREFILL_LAYERS = 4
_TOLERANCE = 0.02
PHASES = ("decode", "prefill")

CHOICES = ("contiguous", "alone", "split4", "split8", "split16")
WAYS = {
    ("gqa", "token"): (*CHOICES, "stride", "request", "triton", "paged", "extents", "gathered"),
    ("gqa", "layer"): CHOICES,
    ("mha", "token"): (*CHOICES, "paged", "extents"),
    ("mqa", "token"): ("contiguous", "alone", "split8", "gathered"),
}
"""By shape and layout: the worker's choices, and what they are compared with; see `attention_ways`. Each shape has
kernels in Triton of its own, which take a second or two to compile."""
_SMALL_WAYS = {("gqa", "token"): WAYS["gqa", "token"], ("mha", "layer"): ("contiguous", "alone", "split8", "paged")}
_ONE_A_REQUEST, _MOST_AT_A_TIME = ("alone", "request"), 8  # sequences: more take long, and are known to be slow


def measure_kernels(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Microseconds a layer of every way but FlexAttention's."""
    return _measure(device, budget, WAYS if device.measures else _SMALL_WAYS, _shapes(device))


def measure_flex(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Microseconds a layer of FlexAttention, beside the kernel in Triton; apart, because compiling it takes long."""
    if not device.measures:
        raise Unavailable("FlexAttention without its compiled kernel reads memory that is not mapped")
    return _measure(device, budget, {("gqa", "token"): ("flex", "triton")}, [GQA], _FEW_BATCHES, _FEW_TOKENS)


def measure_padded(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Microseconds a layer of one model, with padded tokens (`worker.block_padding`) and without."""
    shapes = (QWEN, QWEN_PADDED) if device.measures else SMALL_PADDED
    ways = {(shape.name, "token"): ("contiguous",) for shape in shapes}
    return _measure(device, budget, ways, shapes, _FEW_BATCHES, _FEW_TOKENS)


def write_costs(device: Device, answer: Mapping[str, Any]) -> Mapping[str, str]:
    """The table for `worker.attention_costs`, as a file beside the result."""
    points, new = answer["points"], answer["new_tokens_of_prefill"]
    table = choice_table.costs_of(points, _shapes(device), new, device.name, "benchmarks.gpu")
    return {} if table is None else {"attention_costs": choice_table.text_of(table)}


def _shapes(device: Device) -> list[Heads]:
    return [GQA, MHA, MQA] if device.measures else list(SMALL)


def _measure(
    device: Device,
    budget: Budget,
    by_layout: Mapping[tuple[str, str], Sequence[str]],
    shapes: Sequence[Heads],
    batches: Sequence[int] = BATCHES,
    lengths: Sequence[int] = TOKENS,
) -> Mapping[str, Any]:
    """For every shape, layout, batch and length: each way's time, in decoding and in a prompt behind a prefix.

    A way that has been measured in a point has been compared with the definition of attention on a small batch before.
    """
    new = NEW_TOKENS
    if not device.measures:
        batches, lengths, new = _SMALL_BATCHES, _SMALL_TOKENS, _SMALL_NEW_TOKENS
    points: list[dict[str, Any]] = []
    errors: dict[str, float] = {}
    with device.memory() as memory:
        most = min(_MOST_BYTES if device.measures else _SMALL_BYTES, device.free_bytes() // 2)
        chunks = memory.create(most // memory.chunk_bytes)
        _fill(device, memory, chunks)
        for heads, layout in itertools.product(shapes, LAYOUTS):
            name, ways = f"{heads.name} {layout}", by_layout.get((heads.name, layout), ())
            if not ways or not budget.allows(name):
                continue
            geometry = heads.geometry(layout, memory.chunk_bytes)
            reached = [length for length in lengths if "flex" not in ways or _flex_reaches(geometry, length + new)]
            budget.skipped += [f"{name} {tokens}: over 32 bits" for tokens in lengths if tokens not in reached]
            block = geometry.block_tokens
            longest = max(-(-(max(reached) + new) // block), 2) * block  # two for `_Bench.check`
            with virtual_tensors(device, memory, chunks, geometry, max(3, *batches), longest) as tensors:
                bench = _Bench(device, heads, tensors, longest)
                right = []
                missing = bench.ways.missing(ways)
                budget.skipped += [f"{name} {way}: {reason}" for way, reason in missing.items()]
                for way in [way for way in ways if way not in missing]:
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
        self.ways = Ways(device, heads, self._geometry)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self._geometry.block_tokens)

    def check(self, way: str) -> float:
        """The relative error on three sequences that end inside a block. Raises RuntimeError when it is too large."""
        block = self._geometry.block_tokens
        lengths, new = [block + block // 2, 2 * block, 5], [3, min(block, 40), 5]
        with _Sequences(self, way, lengths, new) as step:
            query = self._query(sum(new))
            found = self.ways.attend(way, step)(query, 1).float().cpu()
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
                if self._leaves_out(way, batch, tokens, count):
                    continue
                # All layers in turn, so that a layer's keys have left the device's cache when it comes again.
                with _Sequences(self, way, [tokens + count] * batch, [count] * batch) as step:
                    work = partial(_all_layers, self.ways.attend(way, step), query, layers)
                    rounds = 3 if self._device.measures else 1
                    point[f"{way}_us"] = round(self._device.stream_us(work, rounds) / layers, 2)
            points.append(point)
        return points

    def _leaves_out(self, way: str, batch: int, tokens: int, new: int) -> bool:
        """Whether the way is not for such a point: too many kernels, or pieces that the worker would not make."""
        pieces = splits_of(way) if self._device.measures else None
        too_small = pieces is not None and not may_split(new, tokens + new, pieces)
        return too_small or (way in _ONE_A_REQUEST and batch > _MOST_AT_A_TIME)

    def close(self) -> None:
        self._device.synchronize()
        self._paged.end()

    def open(self, way: str, lengths: Sequence[int], new: Sequence[int]) -> tuple[KvMemory, list[Segment]]:
        """Sequences of these lengths, of which the last `new` tokens are to be computed."""
        memory: KvMemory = self._paged if way in PAGED_WAYS else self._virtual
        segments = []
        first = 0
        for length, count in zip(lengths, new, strict=True):
            frames = self._frames[first : first + self.blocks(length)]
            first += len(frames)
            segments.append(Segment(memory.open(frames), length - count, length))
        return memory, segments

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
    """Sequences that are open inside a `with` block, as a pass."""

    def __init__(self, bench: _Bench, way: str, lengths: Sequence[int], new: Sequence[int]) -> None:
        self._bench = bench
        self._memory, self._segments = bench.open(way, lengths, new)

    def __enter__(self) -> StepKv:
        for segment in self._segments:
            self._memory.wait(segment.sequence, segment.stop)
        return self._memory.step(self._segments)

    def __exit__(self, *_: object) -> None:
        self._bench._device.synchronize()
        for segment in self._segments:
            self._memory.close(segment.sequence, lambda: None)
        self._memory.poll(wait=True)


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


def _fill(device: Device, memory: VirtualMemory, chunks: range) -> None:
    """Random numbers in all chunks: what they held might be no numbers at all."""
    window = memory.reserve(len(chunks) * memory.chunk_bytes)
    window.map(0, chunks)
    window.tensor((window.nbytes // 2,), torch.bfloat16).normal_()
    device.synchronize()
    window.discard()


def _decode(key: str, batch: int, tokens: int, shape: str = "gqa") -> Callable[[Mapping[str, Any]], float | None]:
    return point_figure(key, shape=shape, layout="token", phase="decode", batch=batch, tokens=tokens)


def _fastest_split(phase: str, shape: str) -> Callable[[Mapping[str, Any]], float | None]:
    """The fastest way to split 32,768 tokens of one sequence."""

    def find(answer: Mapping[str, Any]) -> float | None:
        place = {"shape": shape, "layout": "token", "phase": phase, "batch": 1, "tokens": TOKENS[-1]}
        times = [point_figure(f"split{count}_us", **place)(answer) for count in (4, 8, 16)]
        return min((time for time in times if time is not None), default=None)

    return find


def _ratio(of: str, to: str, batch: int, tokens: int) -> Callable[[Mapping[str, Any]], float | None]:
    """Of two ways' times in decoding."""

    def find(answer: Mapping[str, Any]) -> float | None:
        times = [_decode(f"{way}_us", batch, tokens)(answer) for way in (of, to)]
        return None if times[0] is None or not times[1] else round(times[0] / times[1], 3)

    return find


def _padding_ratio(batch: int, tokens: int) -> Callable[[Mapping[str, Any]], float | None]:
    """Of decoding's time at a padded stride to that without."""

    def find(answer: Mapping[str, Any]) -> float | None:
        padded, plain = (_decode("contiguous_us", batch, tokens, shape.name)(answer) for shape in (QWEN_PADDED, QWEN))
        return None if padded is None or not plain else round(padded / plain, 3)

    return find


PART = Part(
    "attention",
    60,
    measure_kernels,
    predictions=(
        Prediction(
            "decode, 8 requests of 8,192 tokens, max_k of the batch",
            "95 to 120 us a layer",
            _decode("contiguous_us", 8, 8192),
            at_most=150,
        ),
        Prediction(
            "128 tokens behind 32,768, the prefix split",
            "110 to 250 us a layer",
            _fastest_split("prefill", "gqa"),
            at_most=300,
        ),
        Prediction(
            "decode behind 32,768 tokens without shared KV heads, the keys split",
            "150 to 250 us a layer",
            _fastest_split("decode", "mha"),
            at_most=300,
        ),
        Prediction(
            "decode, 8 requests of 32,768 tokens, extents to contiguous",
            "1.0 to 1.1 times",
            _ratio("extents", "contiguous", 8, 32768),
            at_most=1.2,
        ),
        Prediction(
            "decode, 8 requests of 32,768 tokens, extents to rows by the same kernel",
            "1.0 to 1.1 times",
            _ratio("extents", "triton", 8, 32768),
            at_most=1.2,
        ),
    ),
    files=write_costs,
)
FLEX_PART = Part(
    "flex_attention",
    20,
    measure_flex,
    predictions=(
        Prediction(
            "decode, 8 requests of 8,192 tokens, FlexAttention to the kernel in Triton",
            "15 times",
            _ratio("flex", "triton", 8, 8192),
            at_least=8,
        ),
    ),
)
PADDED_PART = Part(
    "padded_tokens",
    10,
    measure_padded,
    predictions=(
        Prediction(
            "decode, 8 requests of 8,192 tokens, 56 KiB a token at a stride of 64 KiB to 56 KiB",
            "1.0 to 1.05 times",
            _padding_ratio(8, 8192),
            at_most=1.15,
        ),
    ),
)
