"""Computes the miss-ratio curve: the hits of a cache of one tier by its capacity and policy, beside the optimum.

No time passes here: requests come one after the other, and a block hits if all blocks before it in its prompt do. A
policy sees the same as in the daemon, blocks with their times of use; leaves are evicted before their parents.

The optimum is Belady's: it evicts the block with the latest next use, or none. A block is used whenever one behind it
is, so its next use is never later: the blocks that stay are always whole prefixes.

Of a long trace a random share of its blocks stands for all, in a cache of the same share of the capacity: SHARDS, with
the correction for blocks that are asked for more often than others (Waldspurger et al., "Efficient MRC Construction
with SHARDS", FAST'15, sections 3.1 and 3.4). A block continues the nearest one before it that is in the sample.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.planner.tier_replay import replay
from prefixd.workloads.mooncake import TraceRequest
from prefixd_swap import EvictionPolicy, create_eviction_policy

Nodes = npt.NDArray[np.int32]
Progress = Callable[[], None]
OPTIMUM = "optimum"
SAMPLED_REFERENCES = 300_000
"""A trace with more block references is sampled down to about this number."""
_CHUNK = 4096  # slots counted together
_HASHES = 1 << 32


@dataclass(frozen=True)
class References:
    """A trace as the prefix trie sees it.

    Attributes:
        nodes: the sampled blocks of all requests, one request after the other.
        starts: [requests + 1] index of each request's first block, and the end; requests without blocks are left out.
        parent: [blocks] for each different block the one before it, -1 for a first one. Parents come before children.
        at_s: [requests] arrivals in rising order; simultaneous ones differ by the smallest float step, since policies
            know the order of uses by their times alone.
        asked: block references of all requests, in the sample or not.
        share: of all blocks, the part in the sample.
    """

    nodes: Nodes
    starts: npt.NDArray[np.int64]
    parent: Nodes
    at_s: npt.NDArray[np.float64]
    asked: int
    share: float = 1.0

    @property
    def blocks(self) -> int:
        """Different blocks in the sample."""
        return len(self.parent)

    @property
    def all_blocks(self) -> int:
        """Different blocks of the trace; an estimate from a sample."""
        return round(self.blocks / self.share)

    def sampled(self, capacity: int) -> int:
        """The capacity for the sample that stands for `capacity` blocks of the trace."""
        return max(1, round(capacity * self.share))

    def hit_rate(self, hits: int) -> float:
        """The hit rate for `hits` in the sample. Missing or surplus references of the sample count as hits: they are of
        blocks that every request has, of which a sample has one more or one less."""
        if not self.asked:
            return 0.0
        expected = self.asked * self.share
        return min(1.0, max(0.0, (hits + expected - len(self.nodes)) / expected))

    def paths(self) -> list[Nodes]:
        """The blocks of each request, from the first on; views."""
        bounds = self.starts.tolist()
        return [self.nodes[start:stop] for start, stop in pairwise(bounds)]


def references(found: Iterable[TraceRequest], share: float = 1.0) -> References:
    """The blocks of a trace's requests, or a share of them, each identified by a hash of its whole prefix."""
    known: dict[int, int] = {}
    parent: list[int] = []
    nodes: list[int] = []
    starts, at_s, asked, last_s = [0], list[float](), 0, -math.inf
    below = round(share * _HASHES)
    for request in found:
        node, key = -1, 0
        asked += len(request.hash_ids)
        for hash_id in request.hash_ids:
            key = hash((key, hash_id))  # 64 bits, of integers the same in every process
            if (key >> 32) % _HASHES >= below:
                continue
            at = known.get(key)
            if at is None:
                at = known[key] = len(parent)
                parent.append(node)
            node = at
            nodes.append(at)
        if len(nodes) > starts[-1]:
            starts.append(len(nodes))
            last_s = max(request.timestamp_ms / 1e3, math.nextafter(last_s, math.inf))
            at_s.append(last_s)
    return References(
        nodes=np.array(nodes, np.int32),
        starts=np.array(starts, np.int64),
        parent=np.array(parent, np.int32),
        at_s=np.array(at_s),
        asked=asked,
        share=share,
    )


def lru_hits(trace: References, progress: Progress = lambda: None) -> npt.NDArray[np.int64]:
    """The hits of LRU at every capacity: `[c]` counts the hits of a cache of `c` blocks, for c from 0 to `blocks`.

    By Mattson's stack distances: a block hits in every cache that is larger than the number of blocks used since. A
    request uses its blocks together, the first one last, so that of one prompt the last block is the least recent.
    """
    nodes = trace.nodes
    slots = len(nodes)
    used = np.zeros(slots + 1, np.bool_)  # by time slot: a block was used last then
    counts = np.zeros(slots // _CHUNK + 1, np.int64)
    last = np.full(trace.blocks, -1, np.int64)
    distances = np.zeros(trace.blocks + 2, np.int64)
    bounds = trace.starts.tolist()
    for start, stop in pairwise(bounds):
        path = nodes[start:stop]
        before = last[path]
        known = int(np.count_nonzero(before >= 0))  # always the first ones
        # Slots of one use lie side by side, in falling order along the prompt: a run is counted once.
        slot = before[:known]
        edges = [0, *(np.flatnonzero(np.diff(slot) != -1) + 1).tolist(), known] if known else []
        for first, end in pairwise(edges):
            newest = int(slot[first])
            chunk = newest // _CHUNK
            later = int(counts[chunk + 1 :].sum()) + int(np.count_nonzero(used[newest + 1 : (chunk + 1) * _CHUNK]))
            distances[later + 1 : later + 1 + end - first] += 1
        if known:
            used[slot] = False
            np.subtract.at(counts, slot // _CHUNK, 1)
        new = np.arange(stop - 1, start - 1, -1)
        last[path] = new
        used[start:stop] = True
        np.add.at(counts, new // _CHUNK, 1)
        progress()
    return np.cumsum(distances)[: trace.blocks + 1]


def optimal_hits(trace: References, capacity: int, progress: Progress = lambda: None) -> int:
    """Counts the blocks that the optimal cache of `capacity` blocks finds, which knows all future requests."""
    following = _following(trace)
    resident = np.zeros(trace.blocks, np.bool_)
    next_use = np.zeros(trace.blocks, np.int64)
    heap: list[tuple[int, int]] = []  # (-next use, -block): a child has a higher number than its parent
    hits = held = 0
    bounds = trace.starts.tolist()
    for start, stop in pairwise(bounds):
        path = trace.nodes[start:stop]
        there = resident[path]
        hits += int(there.sum())
        uses = following[start:stop]
        again = uses < len(bounds)
        held += int(np.count_nonzero(again)) - int(np.count_nonzero(there))
        resident[path] = again
        next_use[path] = uses
        for block, use in zip(path[again].tolist(), uses[again].tolist(), strict=True):
            heapq.heappush(heap, (-use, -block))
        while held > capacity:
            use, block = heapq.heappop(heap)
            if resident[-block] and next_use[-block] == -use:
                resident[-block] = False
                held -= 1
        progress()
    return hits


def _following(trace: References) -> npt.NDArray[np.int64]:
    """For every reference the number of the next request that has the block; requests + 1 for none."""
    requests = len(trace.starts) - 1
    which = np.repeat(np.arange(requests), np.diff(trace.starts))
    order = np.argsort(trace.nodes, kind="stable")
    following = np.full(len(order), requests + 1, np.int64)
    same = trace.nodes[order[1:]] == trace.nodes[order[:-1]]
    following[order[:-1][same]] = which[order[1:][same]]
    return following


def policy_hits(trace: References, policy: EvictionPolicy, capacity: int, progress: Progress = lambda: None) -> int:
    """Counts the blocks that a cache of `capacity` blocks finds under a policy without history."""
    return replay(trace.paths(), trace.at_s.tolist(), trace.blocks, capacity, policy, progress)


@dataclass(frozen=True)
class Curve:
    """Hit rates in blocks, by capacity.

    Attributes:
        capacities: blocks.
        block_tokens: tokens of a block.
        hit_rates: of each policy at each capacity; `OPTIMUM` is one of them.
        most: the hit rate of a cache without limits.
        share: of the blocks, the sampled part from which the figures are estimated; 1: all.
    """

    capacities: list[int]
    block_tokens: int
    hit_rates: dict[str, list[float]]
    most: float
    share: float = 1.0

    def to_plain(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "capacity_blocks": self.capacities,
            "block_tokens": self.block_tokens,
            "hit_rates": self.hit_rates,
            "without_limits": self.most,
            "sampled_share": self.share,
        }


@dataclass(frozen=True)
class CurvePart:
    """The part of a curve that one process computes: one policy at one capacity, or LRU at all of them."""

    policy: str
    capacities: tuple[int, ...]
    seed: int = 0

    def run(self, trace: References) -> list[int]:
        """Hits in the sample at each capacity."""
        sizes = [trace.sampled(capacity) for capacity in self.capacities]
        if self.policy == "lru":
            hits = lru_hits(trace)
            return [int(hits[min(size, trace.blocks)]) for size in sizes]
        if self.policy == OPTIMUM:
            return [optimal_hits(trace, size) for size in sizes]
        return [policy_hits(trace, create_eviction_policy(self.policy, self.seed), size) for size in sizes]


def capacities(blocks: int, count: int = 8) -> list[int]:
    """Capacities from a hundredth of a trace's different blocks to all of them, in equal ratios."""
    return sorted({max(1, round(blocks * 0.01 ** (1 - at / (count - 1)))) for at in range(count)})


def parts(policies: Sequence[str], sizes: Sequence[int]) -> list[CurvePart]:
    """The parts of a curve, the longest computations first."""
    some = [CurvePart(name, (size,)) for name in (OPTIMUM, *policies) if name != "lru" for size in sorted(sizes)]
    return [*some, CurvePart("lru", tuple(sizes))]


def put_together(
    trace: References, sizes: Sequence[int], block_tokens: int, results: Sequence[tuple[CurvePart, Sequence[int]]]
) -> Curve:
    """The curve from the results of `CurvePart.run`."""
    rates: dict[str, dict[int, float]] = {}
    for part, hits in results:
        for size, count in zip(part.capacities, hits, strict=True):
            rates.setdefault(part.policy, {})[size] = trace.hit_rate(count)
    known = {name: [of_size[size] for size in sizes] for name, of_size in rates.items()}
    return Curve(list(sizes), block_tokens, known, trace.hit_rate(len(trace.nodes) - trace.blocks), trace.share)
