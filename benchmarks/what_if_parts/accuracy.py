"""Compares what the ghosts say of a trace with full replays of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.cache.ghosts.ghost_tier import FACTORS, GhostTier, Prompt, Sizes
from prefixd.cache.ghosts.miniature import Miniature
from prefixd.cache.ghosts.prefix_hashes import PrefixHashes
from prefixd.cache.prompt_listeners import Lookup
from prefixd.workloads.mooncake import HASH_TOKENS, TraceRequest, tokens_of
from prefixd_swap import create_eviction_policy

_OTHERS = ("lfu", "s3-fifo", "weighing")


def conversations(requests: int, seed: int = 0) -> list[TraceRequest]:
    """A made-up trace: conversations with a common beginning that grow, and come back soon or never."""
    rng = np.random.default_rng(seed)
    alive: list[list[int]] = []
    found, last = [], 0
    for number in range(requests):
        if alive and rng.random() < 0.7:
            place = len(alive) - 1 - int(min(rng.exponential(len(alive) / 8 + 20), len(alive) - 1))
        else:
            alive.append([0, 1])
            place = len(alive) - 1
        blocks = int(rng.integers(2, 12))
        last += blocks
        alive[place].extend(range(1 + last - blocks, 1 + last))
        ids = tuple(alive[place])
        if len(ids) > 120:
            alive.pop(place)
        found.append(TraceRequest(1500 * number, HASH_TOKENS * len(ids), 100, ids))
    return found


class TraceReplay:
    """A trace, replayed in full against one tier of some size and policy.

    Args:
        requests: of the trace.
    """

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self.requests = [request for request in requests if request.hash_ids]
        known: dict[tuple[int, int], int] = {}
        self._paths: list[npt.NDArray[np.int64]] = []
        for request in self.requests:
            node, path = -1, []
            for hash_id in request.hash_ids:
                node = known.setdefault((node, hash_id), len(known))
                path.append(node)
            self._paths.append(np.array(path, np.int64))
        self.blocks = len(known)
        self.asked = sum(map(len, self._paths))

    def found(self, policy: str, capacity: int) -> list[int]:
        """Blocks that each request finds in a tier of `capacity` blocks."""
        tier = Miniature(self.blocks, capacity, create_eviction_policy(policy, 0), block_bytes=1)
        return [
            tier.use(path, request.timestamp_ms / 1e3) for path, request in zip(self._paths, self.requests, strict=True)
        ]

    def hit_rate(self, policy: str, capacity: int) -> float:
        """The share of all blocks that it finds."""
        return sum(self.found(policy, capacity)) / self.asked


def compare(
    replay: TraceReplay, policy: str, capacity: int, blocks: int, seeds: int, step: Callable[[], None]
) -> dict[str, Any]:
    """What the ghosts of a tier say beside what full replays find, at each size.

    Args:
        replay: the trace.
        policy: of the daemon.
        capacity: of its tier, in blocks of the trace.
        blocks: the most in the sample.
        seeds: times that it is repeated, with other hashes; the worst error counts.
        step: called after each replay and each run.
    """
    exact, ours = [], replay.found(policy, capacity)
    for factor in FACTORS:
        exact.append(replay.hit_rate(policy, round(factor * capacity)))
        step()
    others = {name: replay.hit_rate(name, capacity) for name in _OTHERS if name != policy}
    errors, margins, other_errors, runs = [], [], [], []
    for seed in range(seeds):
        ghost = GhostTier(1, blocks, policy, tuple(others))
        hashes, sizes = PrefixHashes(np.random.default_rng(seed).bytes(24)), Sizes(capacity)
        ghost.begin(sizes, 1)
        for request, found in zip(replay.requests, ours, strict=True):
            ids, at_s = request.hash_ids, request.timestamp_ms / 1e3
            prompt = Prompt(at_s, "t", HASH_TOKENS, 1, Lookup(HASH_TOKENS * len(ids), len(ids), found))
            for _ in ghost.use(prompt, hashes.of_blocks(tokens_of(ids).reshape(-1, HASH_TOKENS), 1), sizes):
                pass
        errors.append(np.abs(ghost.all.hit_rates() - exact))
        margins.append(ghost.all.margins())
        other_errors.append(max(abs(rate - others[name]) for name, rate in ghost.other_rates().items()))
        runs.append((ghost.rate, ghost.all.references))
        step()
    worst, within = np.max(errors, axis=0), np.array(errors) <= np.maximum(margins, 0.0025)
    return {
        "policy": policy,
        "worst_error_points": round(100 * float(worst.max()), 2),
        "mean_error_points": round(100 * float(np.mean(errors)), 2),
        "within_margin": round(float(within.mean()), 3),
        "worst_error_of_other_policies_points": round(100 * max(other_errors), 2),
        "sampled_share": round(runs[0][0], 4),
        "references": runs[0][1],
        "sizes": [
            {
                "factor": factor,
                "blocks": round(factor * capacity),
                "replayed": round(rate, 4),
                "worst_error_points": round(100 * float(error), 2),
                "margin_points": round(100 * float(margin), 2),
            }
            for factor, rate, error, margin in zip(FACTORS, exact, worst, np.mean(margins, axis=0), strict=True)
        ],
    }
