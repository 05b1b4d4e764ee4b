"""Bytes, errors and speeds of each codec, for made-up parts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.codecs_parts.made_up_kv import made_up_part, part_shape
from benchmarks.common import harness
from prefixd_swap.codecs.codec import Refused
from prefixd_swap.codecs.coding import Coded, Coding, code, decode_object
from prefixd_swap.codecs.registry import find_codec

_DIFFERENT = 64 << 20
"""Bytes of different parts that a round encodes, so that they do not lie in the processor's caches."""


def speeds(
    codecs: Sequence[str], tokens: Sequence[int], sizes: Sequence[int], dtype: str, threads: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each codec, number of tokens of a block and size of a part.

    `encode` is all that a write does before the disk (`code`: encode, decode, measure, checksums), `decode` all that a
    read does after it (`decode_object`). GB are of exact bytes; `*_core_gbps` by the CPU time of one thread,
    `*_gbps` by the clock with all threads.

    Raises BenchmarkError if a part is refused.
    """
    cases = [(name, count, nbytes) for name in codecs for count in tokens for nbytes in sizes]
    rows = []
    with ThreadPoolExecutor(threads) as pool, harness.progress("codecs", len(cases)) as step:
        for case in cases:
            rows.append(_measure(*case, dtype, pool, threads, rounds))
            step()
    return rows


def _measure(
    name: str, tokens: int, nbytes: int, dtype: str, pool: ThreadPoolExecutor, threads: int, rounds: int
) -> dict[str, Any]:
    shape = part_shape(nbytes, tokens, dtype)
    coding = Coding(find_codec(name), shape)
    parts = [made_up_part(shape, seed) for seed in range(max(threads, _DIFFERENT // shape.nbytes // 4))]
    coded = []
    for part in parts:
        result = code(part, coding)
        if isinstance(result, Refused):
            raise harness.BenchmarkError(f"{name} refuses a part of {tokens} tokens: {result.value}")
        coded.append(result)
    targets = [np.empty(shape.nbytes, np.uint8) for _ in range(threads)]

    def encode(number: int) -> None:
        code(parts[number], coding)

    def decode_into(target: int) -> Callable[[int], None]:
        return lambda number: _decode(coded[number], targets[target])

    errors = [each.errors for each in coded if each.errors is not None]
    gigabytes = len(parts) * shape.nbytes / 1e9
    seconds = _Seconds(pool, threads, len(parts), rounds)
    return {
        "codec": name,
        "tokens": tokens,
        "part_bytes": shape.nbytes,
        "size": round(sum(each.data.size for each in coded) / (len(parts) * shape.nbytes), 4),
        "worst_error": round(max((float(each.largest.max()) for each in errors), default=0.0), 5),
        "worst_rms_error": round(max((float(each.rms.max()) for each in errors), default=0.0), 5),
        "encode_core_gbps": round(gigabytes / seconds.of_a_core(encode), 3),
        "decode_core_gbps": round(gigabytes / seconds.of_a_core(decode_into(0)), 3),
        "encode_gbps": round(gigabytes / seconds.of_all([encode] * threads), 3),
        "decode_gbps": round(gigabytes / seconds.of_all([decode_into(number) for number in range(threads)]), 3),
    }


class _Seconds:
    """Medians of the rounds in which each of `count` parts has its turn."""

    def __init__(self, pool: ThreadPoolExecutor, threads: int, count: int, rounds: int) -> None:
        self._pool, self._threads, self._count, self._rounds = pool, threads, count, rounds

    def of_a_core(self, work: Callable[[int], None]) -> float:
        """CPU time of this thread alone."""
        taken = []
        for _ in range(self._rounds):
            begin = time.thread_time()
            for number in range(self._count):
                work(number)
            taken.append(time.thread_time() - begin)
        return statistics.median(taken)

    def of_all(self, works: Sequence[Callable[[int], None]]) -> float:
        """Time of the clock with a share of the parts in each thread."""

        def share(first: int) -> None:
            for number in range(first, self._count, self._threads):
                works[first](number)

        taken = []
        for _ in range(self._rounds):
            begin = time.perf_counter()
            list(self._pool.map(share, range(self._threads)))
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)


def _decode(coded: Coded, target: Any) -> None:
    if decode_object(coded.data, target).checksum != coded.decoded_checksum:
        raise harness.BenchmarkError("a part was not decoded to the bytes that were certified")
