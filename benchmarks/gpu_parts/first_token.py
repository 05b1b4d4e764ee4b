"""Time to the first token of a prompt whose prefix is on the GPU, mapped or not, in CPU memory, on disk, or nowhere."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.plots import lines
from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.model import EngineRig, Graphs, engine_rig, random_model, random_tokens, shape
from benchmarks.gpu_parts.rig.part import Budget, Part
from benchmarks.gpu_parts.rig.prediction import Prediction
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd_swap.arena import CpuArena
from prefixd_swap.copies.copy_engine import CopyEngine, create_copy_engine
from prefixd_swap.copies.pinning import HostPin
from prefixd_swap.slab.index.block_record import NAMESPACE_BYTES, DiskPart, NewBlock
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.vmem import FrameId

_TOKENS = (2048, 8192, 32768)
_SMALL_TOKENS = (256,)
_NEW_TOKENS = 64
_STEP_TOKENS = 8192
_READERS = 6
_PIECE_BLOCKS = 8  # that are read from disk at once, and copied on while the next are read
_SOURCES = ("gpu", "gpu_eager", "gpu_unmapped", "gpu_dirty", "cpu", "disk", "recomputed")


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Milliseconds from a request's arrival to its first token, by where its prefix is.

    In this process: the worker's engine, the GPU tier's frames, the CPU tier's arena and the disk tier's store, put
    together as the daemon does but without its index, queue and gRPC; a whole daemon would first have to write 16 GB of
    weights. Every prompt ends with 64 new tokens. On the GPU the prefix is mapped still, or nowhere (gpu_unmapped), or
    every row maps other frames (gpu_dirty). The cached ways must give the same token; they run the same kernels on the
    same bytes. Projections are merged (compiling takes time that the part has not), and the prompt's pass is a CUDA
    graph up to 16,384 tokens, but in gpu_eager.
    """
    tokens = _TOKENS if device.measures else _SMALL_TOKENS
    model = random_model(device)
    model.rewrite("merged")
    graphs: Graphs = "graphs" if isinstance(model.attention, FlashAttention) else "none"
    geometry = model.spec.geometry
    per_prompt = -(-(max(tokens) + _NEW_TOKENS + 1) // geometry.block_tokens)
    with ExitStack() as stack:
        rig = stack.enter_context(engine_rig(device, 2 * per_prompt, 4, _STEP_TOKENS, graphs))
        tiers = stack.enter_context(_Tiers(device, rig, per_prompt * geometry.block_bytes))
        _prompt(rig, tiers, min(tokens) // 2, budget)
        points = []
        for length in tokens:
            if budget.allows(name := f"{length} tokens"):
                with budget.attempt(name):
                    points.append(_prompt(rig, tiers, length, budget))
        return {
            "model": shape(model),
            "step_tokens": _STEP_TOKENS,
            "operators": model.operators.reason or model.operators.operators,
            "disk_io": tiers.store.io,
            "arena_bytes": tiers.arena.capacity_bytes,
            "pinned_bytes": tiers.pinned_bytes,
            "points": points,
        }


def _prompt(rig: EngineRig, tiers: _Tiers, length: int, budget: Budget) -> dict[str, Any]:
    geometry = rig.geometry
    blocks = length // geometry.block_tokens
    tokens = random_tokens(length, blocks * geometry.block_tokens + _NEW_TOKENS)
    needed = -(-(len(tokens) + 1) // geometry.block_tokens)
    computed, loaded = rig.frames(needed), rig.frames(needed)
    try:
        return _sources(rig, tiers, tokens, blocks, computed, loaded, budget)
    finally:
        rig.settle()
        rig.pool.free(computed)
        rig.pool.free(loaded)


def _sources(
    rig: EngineRig,
    tiers: _Tiers,
    tokens: Sequence[int],
    blocks: int,
    computed: Sequence[FrameId],
    loaded: Sequence[FrameId],
    budget: Budget,
) -> dict[str, Any]:
    """The prompt's prefix, its first `blocks` blocks, is computed into some frames and loaded into others."""
    sampled: dict[str, int] = {}
    point: dict[str, Any] = {"tokens": len(tokens)}

    def run(source: str, frames: Sequence[FrameId], before: Callable[[], object] = lambda: None) -> None:
        begin = time.perf_counter()
        before()
        sampled[source] = rig.first_token(tokens, frames, 0 if source == "recomputed" else blocks)
        point[f"{source}_ms"] = round((time.perf_counter() - begin) * 1e3, 2)
        rig.settle()

    run("recomputed", computed)
    with rig.without_graphs():
        run("gpu_eager", computed)
    run("gpu", computed)  # captures
    run("gpu", computed)
    rig.kv.manager.unused.reclaim()
    run("gpu_unmapped", computed)
    rig.map_everywhere(loaded)
    run("gpu_dirty", computed)
    tiers.save(computed[:blocks])
    rig.zero(loaded)
    run("cpu", loaded, lambda: tiers.load(loaded[:blocks]))
    if tiers.write(blocks, budget):
        rig.zero(loaded)
        tiers.forget()
        run("disk", loaded, lambda: tiers.read(loaded[:blocks]))
    else:
        budget.skipped.append(f"{len(tokens)} tokens from disk: writing them took too long")
    cached = {source: token for source, token in sampled.items() if source not in ("recomputed", "gpu_eager")}
    if len(set(cached.values())) != 1:
        raise RuntimeError(f"the first token depends on where the prefix of {len(tokens)} tokens was: {cached}")
    for source in ("recomputed", "gpu_eager"):
        point[f"{source}_the_same"] = sampled[source] == sampled["gpu"]
    return point


class _Tiers:
    """The arena, pinned as the daemon pins it, and a slab store; block i of the prompt lies in slot i of either."""

    def __init__(self, device: Device, rig: EngineRig, nbytes: int) -> None:
        self._rig = rig
        self._block_bytes = rig.geometry.block_bytes
        self._stack = ExitStack()
        self._parts: list[DiskPart] = []
        self._written = 0
        self._troubles: list[str] = []
        with ExitStack() as undo:
            self.arena = CpuArena(nbytes, populate=True)
            undo.callback(self.arena.close)
            self.arena.wait_populated()
            self._pin: HostPin | None = None
            if device.kind != "cpu":
                base = self.arena.span(0, nbytes).address
                self._pin = HostPin(base, self.arena.capacity_bytes, device.ordinal, self._troubles.append)
                undo.callback(self._pin.close)
                _wait(lambda: self.pinned_bytes == self.arena.capacity_bytes or bool(self._troubles))
            self.copies: CopyEngine = create_copy_engine(device.memory_name)
            undo.callback(self.copies.close)
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="prefixd-disk-"))
            self.store = SlabStore.open(Path(folder), 2 * nbytes + (64 << 20))
            undo.callback(self.store.close)
            self._readers = undo.enter_context(ThreadPoolExecutor(_READERS))
            self._stack = undo.pop_all()

    def __enter__(self) -> _Tiers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pinned_bytes(self) -> int:
        return self._pin.pinned_bytes if self._pin else 0

    def save(self, frames: Sequence[FrameId]) -> None:
        asyncio.run(self.copies.copy([(self._slot(index), self._rig.pool.span(f)) for index, f in enumerate(frames)]))

    def load(self, frames: Sequence[FrameId]) -> None:
        asyncio.run(self._load(range(len(frames)), frames))

    def write(self, blocks: int, budget: Budget) -> bool:
        """Arena to disk, durably; False, and not all written, when the time is up."""
        self._written += 1
        self._parts = []
        for first in range(0, blocks, 4 * _PIECE_BLOCKS):
            if budget.over:
                return False
            numbers = range(first, min(first + 4 * _PIECE_BLOCKS, blocks))
            for record in self.store.write([self._new_block(number) for number in numbers]):
                if record is None or not isinstance(record.parts[0], DiskPart):
                    return False
                self._parts.append(record.parts[0])
        return True

    def forget(self) -> None:
        """Zero the arena, so that what it holds next has come from disk."""
        self.arena.array(0, self.arena.capacity_bytes)[:] = 0

    def read(self, frames: Sequence[FrameId]) -> None:
        """Disk to GPU by way of the arena, in pieces: copied on while the next are read. Raises StorageError."""
        asyncio.run(self._read(frames))

    async def _read(self, frames: Sequence[FrameId]) -> None:
        loop = asyncio.get_running_loop()

        async def piece(numbers: range) -> None:
            await loop.run_in_executor(self._readers, self._read_piece, numbers)
            await self._load(numbers, [frames[number] for number in numbers])

        starts = range(0, len(frames), _PIECE_BLOCKS)
        await asyncio.gather(*(piece(range(start, min(start + _PIECE_BLOCKS, len(frames)))) for start in starts))

    def _read_piece(self, numbers: range) -> None:
        """In a thread."""
        parts = [self._parts[number] for number in numbers]
        errors = self.store.read_all(
            np.array([part.slot for part in parts]),
            [part.checksum for part in parts],
            [self._slot(number).address for number in numbers],
            self._block_bytes,
        )
        for error in errors:
            if error is not None:
                raise error

    async def _load(self, numbers: range, frames: Sequence[FrameId]) -> None:
        pairs = [(self._rig.pool.span(f), self._slot(n)) for n, f in zip(numbers, frames, strict=True)]
        await self.copies.copy(pairs)

    def _slot(self, block: int) -> Any:
        return self.arena.span(block * self._block_bytes, self._block_bytes)

    def _new_block(self, number: int) -> NewBlock:
        key = (self._written << 32 | number + 1).to_bytes(16, "big")
        parent = (self._written << 32 | number).to_bytes(16, "big") if number else b""
        tokens = bytes(4 * self._rig.geometry.block_tokens)
        return NewBlock(bytes(NAMESPACE_BYTES), key, parent, tokens, number, [self._slot(number)])


def _wait(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def _draw(axes: Any, result: Mapping[str, Any]) -> None:
    series = {}
    for source in _SOURCES:
        points = [point for point in result["points"] if f"{source}_ms" in point]
        series[source] = [point["tokens"] for point in points], [point[f"{source}_ms"] for point in points]
    lines(axes, series, "tokens of the prompt", "ms to the first token", "prefix")


def _at(tokens: int, key: str, less: str | None = None) -> Callable[[Mapping[str, Any]], float | None]:
    """Of the prompt behind `tokens` tokens, `key` or what it is longer than `less`."""

    def find(answer: Mapping[str, Any]) -> float | None:
        for point in answer.get("points", ()):
            if point["tokens"] == tokens + _NEW_TOKENS and key in point:
                return float(point[key] - (0 if less is None else point[less]))
        return None

    return find


PREDICTIONS = (
    Prediction("first token behind 8,192 tokens on the GPU", "9 to 11 ms", _at(8192, "gpu_ms"), at_most=14.0),
    Prediction("first token behind 32,768 tokens on the GPU", "22 to 28 ms", _at(32768, "gpu_ms"), at_most=35.0),
    Prediction(
        "32,768 tokens that are not mapped against mapped ones",
        "5 ms more at most",
        _at(32768, "gpu_unmapped_ms", "gpu_ms"),
        at_most=10.0,
    ),
)

PART = Part("first_token", 60, measure, _draw, PREDICTIONS)
