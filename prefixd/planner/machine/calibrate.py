"""Measures a machine for plans: its disk and its copies with the daemon's own code, and passes of a daemon's model."""

from __future__ import annotations

import asyncio
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prefixd.base.codec_names import CODEC_NAMES, CODECS_EXTRA
from prefixd.base.errors import ConfigError
from prefixd.base.extras import MissingExtraError, require
from prefixd.cache.coding.namespace_codings import coding_threads
from prefixd.planner.machine.calibration import Calibration
from prefixd_swap import CpuArena, NewBlock, SlabStore, Span, SwapError, create_copy_engine
from prefixd_swap.tiers import DiskTier, Loads
from prefixd_swap.transfers import Transfers, Urgency

if TYPE_CHECKING:
    from prefixd.client import AsyncClient

_BLOCK_BYTES = 1 << 20
_BLOCKS = 128
_TIMES = 5
_FIRST_TOKEN, _LAST_TOKEN = 32, 126  # ids that any byte-level vocabulary has and that are no special token
_TOGETHER = 8
_DECODED = 32
_LOADS = ((48, 48), (24, 496), (12, 1008))
"""(requests at once, tokens of each).

The cost of attention shows in the longest prompts, which fit a model of 1,024 tokens: estimated from prompts of up to
512 tokens it was ten times too high.
"""

Progress = Callable[[str], None]


async def measure_machine(
    directory: Path, device: str, progress: Progress = lambda _: None, *, io_threads: int = 4
) -> Calibration:
    """The figures of this machine, without those of a model.

    Args:
        directory: a directory on the disk of the disk tier; 128 MiB are written below it and removed again.
        device: where the worker computes: "cpu" or "cuda:N".
        progress: called with the name of each measurement.
        io_threads: as `disk.io_threads`.

    Raises:
        ConfigError: the directory or the device cannot be used.
    """
    progress("the disk")
    try:
        read, write, latency_s = await _disk(directory, io_threads)
    except (OSError, SwapError) as error:
        raise ConfigError(f"the disk of {directory} cannot be measured: {error}; name another directory") from error
    codecs = _codec_speeds(io_threads, progress)
    progress("copies")
    try:
        copies, copy_s = await _copies(device)
    except SwapError as error:
        raise ConfigError(f"copies on {device} cannot be measured: {error}; name another gpu.device") from error
    measured = Calibration(
        machine=f"{platform.node()} ({device})",
        disk_read_bytes_per_s=read,
        disk_write_bytes_per_s=write,
        disk_latency_s=latency_s,
        copy_bytes_per_s=copies,
        copy_latency_s=copy_s,
    )
    return replace(measured, **codecs)


async def measure_passes(measured: Calibration, client: AsyncClient) -> Calibration:
    """Adds to `measured` the passes of the model of the client's daemon, which should be idle.

    The prompts are random tokens, which no cache has: alone, and several at a time. Raises as `AsyncClient.generate`.
    """
    source = np.random.default_rng(time.time_ns())

    def prompt(tokens: int) -> list[int]:
        drawn: list[int] = source.integers(_FIRST_TOKEN, _LAST_TOKEN + 1, tokens).tolist()
        return drawn

    async def many(count: int, tokens: int) -> float:
        """Seconds a request, with `count` requests at once."""
        prompts = [prompt(tokens) for _ in range(count)]
        began_s = time.perf_counter()
        await asyncio.gather(*(_asked(client, each, 1) for each in prompts))
        return (time.perf_counter() - began_s) / count

    await _asked(client, prompt(64), 4)  # loads and warms the model
    alone = min([await _decoding_s(client, [prompt(16)]) for _ in range(3)])
    together = min([await _decoding_s(client, [prompt(16) for _ in range(_TOGETHER)]) for _ in range(3)])
    decoded_s = max(1e-9, (together - alone) / (_TOGETHER - 1))
    pass_s = max(1e-9, alone - decoded_s)
    wait_s = min([(await _asked(client, prompt(1), 1))[0] for _ in range(3)])
    request_s = max(0.0, wait_s - pass_s - decoded_s)
    # Prompts are measured under load, when the daemon and its clients take time from the worker.
    times = [float(np.median([await many(count, tokens) for _ in range(3)])) for count, tokens in _LOADS]
    begun_s, token_s, attended_s = fitted_prefill([tokens for _, tokens in _LOADS], times)
    stats = await client.stats()
    return replace(
        measured,
        model=next((model.name for model in stats.models), "the daemon's model"),
        pass_s=pass_s,
        token_s=token_s,
        decoded_s=decoded_s,
        attended_s=attended_s,
        begun_s=begun_s,
        request_s=request_s,
    )


async def _disk(directory: Path, io_threads: int) -> tuple[float, float, float]:
    """Bytes/s of reads and of writes, and the latency in seconds, of a `DiskTier` with blocks of 1 MiB."""
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="calibration-", dir=directory))
        store = SlabStore.open(Path(folder), 3 * _BLOCKS * _BLOCK_BYTES)
        stack.callback(store.close)
        arena = CpuArena(_BLOCKS * _BLOCK_BYTES)
        stack.callback(arena.close)
        transfers = Transfers()
        tier = DiskTier(store, transfers, threads=io_threads)
        stack.callback(tier.close)
        try:
            data = arena.array(0, arena.capacity_bytes)
            data[:] = np.random.default_rng(0).integers(0, 256, len(data), np.uint8)
            written, began_s = [], time.perf_counter()
            for start in range(0, _BLOCKS, 32):
                blocks = [_block(at, data) for at in range(start, start + 32)]
                written += await tier.write(blocks, Urgency.DEMAND)
            write_s = time.perf_counter() - began_s
            places = [place[0] for place in written if isinstance(place, tuple) and place[0] is not None]
            if len(places) < _BLOCKS:
                failed = next((str(place) for place in written if isinstance(place, Exception)), "no room")
                raise ConfigError(f"{_BLOCKS - len(places)} of {_BLOCKS} blocks were not stored: {failed}")
            loads = Loads(
                np.array([[place.slot] for place in places], np.int64),
                np.array([[place.checksum] for place in places], np.uint64),
                np.array([[data.ctypes.data + at * _BLOCK_BYTES] for at in range(_BLOCKS)], np.int64),
                (_BLOCK_BYTES,),
            )
            read_s = min([await _timed_read(tier, loads) for _ in range(_TIMES)])
            one_s = min([await _timed_read(tier, loads[at : at + 1]) for at in range(4 * _TIMES)])
        finally:
            await transfers.close()
    read = _BLOCKS * _BLOCK_BYTES / read_s
    return read, _BLOCKS * _BLOCK_BYTES / write_s, max(1e-6, one_s - _BLOCK_BYTES / read)


def _codec_speeds(threads: int, progress: Progress) -> dict[str, Any]:
    """Fields of `Calibration`; none if the packages of codecs are not installed."""
    try:
        require(CODECS_EXTRA, "calibration of codecs")
    except MissingExtraError:
        return {}
    from prefixd.planner.machine.codec_speeds import measure_codec  # needs packages of that extra

    fields: dict[str, Any] = {}
    for name in CODEC_NAMES[1:]:
        progress(f"the codec {name}")
        speed = measure_codec(name, coding_threads(threads), threads)
        fields[f"{name}_encode_bytes_per_s"] = speed.encode_bytes_per_s
        fields[f"{name}_decode_bytes_per_s"] = speed.decode_bytes_per_s
    return fields


def _block(at: int, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> NewBlock:
    key = at.to_bytes(16, "little")
    parent = (at - 1).to_bytes(16, "little") if at else b""
    span = Span(data.ctypes.data + at * _BLOCK_BYTES, _BLOCK_BYTES)
    return NewBlock(b"measured", key, parent, bytes(8), at, [span], None)


async def _timed_read(tier: DiskTier, loads: Loads) -> float:
    began_s = time.perf_counter()
    failed = [each for each in await tier.read(loads, Urgency.DEMAND) if isinstance(each, SwapError)]
    if failed:
        raise failed[0]
    return time.perf_counter() - began_s


async def _copies(device: str) -> tuple[float, float]:
    """Bytes/s, and seconds of a copy of 4 KiB, between CPU memory and the device, or within CPU memory."""
    with ExitStack() as stack:
        engine = create_copy_engine(device)
        stack.callback(engine.close)
        source = CpuArena(64 << 20)
        stack.callback(source.close)
        source.array(0, source.capacity_bytes)[:] = 1
        if device == "cpu":
            arena = CpuArena(64 << 20)
            stack.callback(arena.close)
            arena.array(0, arena.capacity_bytes)[:] = 0
            target = arena.span(0, arena.capacity_bytes)
        else:
            from prefixd_swap import FramePool, create_memory

            memory = stack.enter_context(create_memory(device))
            pool = FramePool(memory, memory.chunk_bytes, -(-(64 << 20) // memory.chunk_bytes))
            stack.callback(pool.close)
            target = Span(pool.first_address, 64 << 20, True)
        times = []
        for nbytes in (4096, 64 << 20):
            pair = Span(target.address, nbytes, target.on_device), source.span(0, nbytes)
            each = []
            for _ in range(3 * _TIMES):
                began_s = time.perf_counter()
                await engine.copy([pair])
                each.append(time.perf_counter() - began_s)
            times.append(min(each))
    small_s, large_s = times
    return (64 << 20) / max(1e-9, large_s - small_s), max(1e-6, small_s)


async def _asked(client: AsyncClient, prompt: Sequence[int], output_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and from there to the end."""
    from prefixd.client import Sampling, Tokens

    began_s, first_s = time.perf_counter(), 0.0
    async for event in client.generate(prompt, sampling=Sampling(max_tokens=output_tokens, ignore_eos=True)):
        if isinstance(event, Tokens) and not first_s:
            first_s = time.perf_counter()
    return first_s - began_s, time.perf_counter() - first_s


async def _decoding_s(client: AsyncClient, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds of a pass in which each of the prompts' requests decodes."""
    times = await asyncio.gather(*(_asked(client, prompt, _DECODED) for prompt in prompts))
    return min(seconds for _, seconds in times) / (_DECODED - 1)


def fitted_prefill(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Seconds to begin a request, of each token of its prompt, and of each token for each one before it.

    Fits a polynomial without negative terms to the `seconds` of prompts of `tokens` tokens.
    """
    counts = np.array(tokens, float)
    columns = np.stack([np.ones(len(counts)), counts, counts**2 / 2], axis=1) / np.array(seconds)[:, None]
    best = np.zeros(columns.shape[1])
    for used in product((False, True), repeat=len(best)):  # least squares without negative terms, in relative errors
        terms = np.zeros_like(best)
        terms[list(used)] = np.linalg.lstsq(columns[:, used], np.ones(len(counts)), rcond=None)[0]
        if (terms >= 0).all() and _off(columns, terms) < _off(columns, best):
            best = terms
    begun_s, token_s, attended_s = best.tolist()
    return begun_s, max(1e-9, token_s), attended_s


def _off(columns: npt.NDArray[np.float64], terms: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(columns @ terms - 1.0))
