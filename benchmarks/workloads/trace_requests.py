"""Requests in the format of Mooncake's trace: from a file, or made up, with prefixes in common."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prefixd.workloads.mooncake import HASH_TOKENS, TraceRequest, read_trace

_FAMILIES = 8  # system prompts
_CONTINUED = 0.4  # share of the requests that continue a conversation


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
