"""What virtual memory costs in host memory, by the size of a chunk: single calls, and before a prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import TypeVar

import torch

from benchmarks.common.harness import BenchmarkError
from prefixd_swap import VAttention
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import create_memory

T = TypeVar("T")


def call_times(chunk_bytes: int, chunks: int, rounds: int) -> dict[str, float]:
    """Microseconds a chunk of each operation, medians of `rounds`; of reserve and free, of the whole range.

    The chunks are mapped one by one in an order by chance, so that each costs a call of the kernel, as on CUDA.
    """
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], T], count: int = 1) -> T:
        began = time.perf_counter()
        result = work()
        times.setdefault(name, []).append((time.perf_counter() - began) / count * 1e6)
        return result

    with create_memory("cpu", chunk_bytes) as memory:
        for number in range(rounds):
            made = timed("create", partial(memory.create, chunks), chunks)
            reserved = timed("reserve", partial(memory.reserve, chunks * chunk_bytes))
            for slot, chunk in enumerate(Random(number).sample(made, chunks)):
                timed("map", partial(reserved.map, slot * chunk_bytes, [chunk]))
            for slot in range(chunks):
                timed("unmap", partial(reserved.unmap, slot * chunk_bytes, chunk_bytes))
            timed("free", reserved.discard)
            timed("release", partial(memory.destroy, made), chunks)
    return {name: statistics.median(taken) for name, taken in times.items()}


def mapping_times(geometry: KvGeometry, tokens: int, chunk_bytes: int, rounds: int) -> tuple[float, float]:
    """Seconds until the memory of a prompt is there: mapped when it is wanted, and where a request of the same length
    has ended before, whose memory stays mapped (deferred reclamation, vAttention 6.2.2). Medians of `rounds`.

    Raises BenchmarkError when there is no memory for the prompt.
    """
    cold, warm = list[float](), list[float]()
    for _ in range(rounds):
        with VAttention() as kv:
            kv.init_kvcache(
                layers=geometry.layers,
                kv_heads=geometry.kv_heads,
                head_dim=geometry.head_dim,
                dtype=getattr(torch, geometry.dtype),
                max_batch=1,
                max_context=tokens,
                memory_limit=2 * (tokens * geometry.token_bytes + chunk_bytes),
                device="cpu",
                chunk_bytes=chunk_bytes,
                ahead=False,
            )
            for times in (cold, warm):
                reqid = kv.alloc_reqid()
                began = time.perf_counter()
                answer = kv.step([tokens])
                times.append(time.perf_counter() - began)
                if answer < 0:
                    raise BenchmarkError(f"no memory for a prompt of {tokens} tokens in chunks of {chunk_bytes} bytes")
                kv.free_reqid(reqid)
    return statistics.median(cold), statistics.median(warm)
