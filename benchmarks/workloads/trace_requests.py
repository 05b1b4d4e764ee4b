"""Requests in the format of Mooncake's trace: from a file, or made up, with prefixes in common."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefixd.workloads.mooncake import HASH_TOKENS, TraceRequest, read_trace

_FAMILIES = 8  # system prompts
_CONTINUED = 0.4  # share of the requests that continue a conversation


class RightBytes:
    """The only right bytes of each block, derived from its whole prefix: whoever reads a block can tell."""

    def __init__(self, block_bytes: int) -> None:
        self._pattern = np.random.default_rng(0).integers(0, 1 << 63, block_bytes // 8, dtype=np.uint64)

    def of(self, hash_ids: Sequence[int]) -> npt.NDArray[np.uint64]:
        """[blocks, words]. Every word differs between any two blocks, so bytes of another block are seen."""
        seeds, digest = np.empty(len(hash_ids), np.uint64), hashlib.blake2b(digest_size=16)
        for index, hash_id in enumerate(hash_ids):
            digest.update(hash_id.to_bytes(8, "little"))
            seeds[index] = int.from_bytes(digest.digest()[:8], "little")
        return self._pattern + seeds[:, None]


def wrong_words(got: npt.NDArray[np.uint64], expected: npt.NDArray[np.uint64]) -> int:
    """How many bytes differ."""
    if np.array_equal(got, expected):
        return 0
    return int(np.count_nonzero(got.view(np.uint8) != np.ascontiguousarray(expected).view(np.uint8)))


def made_up(count: int, seed: int) -> list[TraceRequest]:
    """Requests of conversations that begin with one of a few system prompts and grow turn by turn."""
    rng = np.random.default_rng(seed)
    next_id = 1

    def new(blocks: int) -> tuple[int, ...]:
        nonlocal next_id
        next_id += blocks
        return tuple(range(next_id - blocks, next_id))

    systems = [new(int(rng.integers(1, 6))) for _ in range(_FAMILIES)]
    conversations: list[tuple[int, ...]] = []
    requests = []
    for number in range(count):
        if conversations and rng.random() < _CONTINUED:
            at = int(rng.integers(len(conversations)))
            ids = conversations[at] = conversations[at] + new(int(rng.integers(1, 8)))
        else:
            ids = systems[int(rng.integers(_FAMILIES))] + new(int(rng.integers(1, 16)))
            conversations.append(ids)
        rest = int(rng.integers(HASH_TOKENS))  # of the last block, which is not full
        requests.append(TraceRequest(100 * number, len(ids) * HASH_TOKENS + rest, 1, ids))
    return requests


def requests_of(trace: Path | None, count: int, most_blocks: int) -> list[TraceRequest]:
    """The first requests of a trace, or made-up ones: at most `count`, with at most `most_blocks` different blocks."""
    found = list(read_trace(trace, count)) if trace is not None else made_up(count, seed=1)
    chosen: list[TraceRequest] = []
    prefixes: set[tuple[int, ...]] = set()
    for request in found:
        ids = request.hash_ids
        new = {ids[: end + 1] for end in range(len(ids))} - prefixes
        if len(prefixes) + len(new) > most_blocks:
            continue
        prefixes |= new
        chosen.append(request)
    return chosen
