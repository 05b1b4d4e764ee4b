"""How many of a trace's blocks a tier of so many blocks would find: the miss-ratio curve, by eviction policy, and what
could be found at most.

Here a tier has blocks of one size, and no time passes but the trace's own: where `VirtualDaemon` says what a machine
does with a workload, this says what its eviction policy does, at many capacities in the time of one run of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.workloads.mooncake import TraceRequest
from prefixd_swap import EvictionPolicy, UseHistory, choose_victims

_TIER = 0
_NEVER = 1 << 62
_HASHED = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class PrefixPath:
    """One request: when it comes, and the numbers of its prefix's blocks, first to last.

    A number stands for a block with all that is before it: equal numbers, equal prefixes.
    """

    at_s: float
    blocks: npt.NDArray[np.int64]


def read_paths(requests: Iterable[TraceRequest]) -> list[PrefixPath]:
    """The paths of a trace's requests; numbers count up from 0 in the order in which blocks come."""
    numbers: dict[tuple[int, int], int] = {}
    paths = []
    for request in requests:
        above, path = -1, []
        for hash_id in request.hash_ids:
            above = numbers.setdefault((above, hash_id), len(numbers))
            path.append(above)
        paths.append(PrefixPath(request.timestamp_ms / 1000, np.array(path, np.int64)))
    return paths


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What a tier found of the blocks that were asked for.

    Attributes:
        policy: the eviction policy; "optimum": what goes is what is asked for last.
        capacity_blocks: the tier's size.
        asked_blocks, hit_blocks: counted once for each request.
    """

    policy: str
    capacity_blocks: int
    asked_blocks: int
    hit_blocks: int

    @property
    def hit_rate(self) -> float:
        """Share of the blocks asked for that were found."""
        return self.hit_blocks / max(self.asked_blocks, 1)


class BlockRows:
    """The blocks of a tier, as eviction policies see a trie (`prefixd_swap.eviction.BlockTable`).

    Args:
        blocks: how many different blocks there are at all.
        capacity: how many there can be at once.
        block_tokens, block_bytes: sizes of a block.
    """

    ordinal = 0

    def __init__(self, blocks: int, capacity: int, block_tokens: int, block_bytes: int) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.last_used = np.zeros(capacity)
        self.entered = np.zeros((capacity, 1))
        self.rank = np.zeros((capacity, 1))
        self.uses = np.zeros(capacity, np.uint8)
        self.any_part = np.zeros(capacity, np.uint8)
        self.parent = np.full(capacity, -1)
        self.depth = np.zeros(capacity, np.int64)
        self.children = np.zeros(capacity, np.int64)
        self.held = np.zeros(capacity, np.bool_)
        self.block = np.zeros(capacity, np.int64)
        self.free = list(range(capacity))[::-1]
        self._row_of = np.full(blocks, -1)

    def find(self, path: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows of the longest beginning of `path` that is there."""
        rows = self._row_of[path]
        found: npt.NDArray[np.int64] = rows if (rows >= 0).all() else rows[: int((rows < 0).argmax())]
        return found

    def insert(self, path: npt.NDArray[np.int64], first: int, parent: int, now_s: float) -> npt.NDArray[np.int64]:
        """Enters blocks from place `first` of their prefix on, which continue row `parent`; there is room for them."""
        rows = np.array([self.free.pop() for _ in path], np.int64)
        parents = np.concatenate([[parent], rows[:-1]])
        self.parent[rows], self.depth[rows], self.block[rows] = parents, np.arange(first, first + len(rows)), path
        self.last_used[rows] = self.entered[rows, _TIER] = now_s
        self.uses[rows], self.any_part[rows], self.children[rows] = 0, 1 << _TIER, 0
        self.children[parents[parents >= 0]] += 1
        self._row_of[path] = rows
        return rows

    def remove(self, rows: Sequence[int]) -> None:
        """Forgets blocks, children before parents."""
        gone = np.array(rows, np.int64)
        self.any_part[gone] = 0
        self._row_of[self.block[gone]] = -1
        parents = self.parent[gone]
        np.subtract.at(self.children, parents[parents >= 0], 1)
        self.free.extend(rows)

    def victims(self, count: int, policy: EvictionPolicy) -> list[int]:
        """Up to `count` blocks that nobody holds, as the policy says, leaves before their parents."""
        leaves = np.flatnonzero((self.any_part != 0) & (self.children == 0) & ~self.held)
        gone: dict[int, int] = {}

        def reveal(row: int) -> tuple[int, float] | None:
            parent = int(self.parent[row])
            gone[parent] = gone.get(parent, 0) + 1
            if parent < 0 or gone[parent] < self.children[parent] or self.held[parent]:
                return None
            return parent, policy.score(self, parent, _TIER)

        return choose_victims(count, leaves, policy.scores(self, leaves, _TIER), reveal)

    def keys(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """[len(rows), 16]: hashes of the blocks' numbers."""
        hashes = (self.block[rows].astype(np.uint64) + np.uint64(1)) * _HASHED
        return np.stack([hashes, hashes ^ (hashes >> np.uint64(29))], axis=1).view(np.uint8)


def replay(
    paths: Sequence[PrefixPath],
    capacity: int,
    policy: EvictionPolicy,
    *,
    block_tokens: int = 512,
    block_bytes: int = 1 << 20,
) -> CurvePoint:
    """What a tier of `capacity` blocks finds, with a policy that has seen nothing yet.

    Each request holds what it finds, and then stores what it did not, as far as there is room.
    """
    table = BlockRows(_different(paths), capacity, block_tokens, block_bytes)
    uses = UseHistory(policy) if policy.remembers else UseHistory(policy, 0)
    hits = 0
    for path in paths:
        rows, now_s = table.find(path.blocks), path.at_s
        hits += len(rows)
        uses.accessed(table, rows, now_s)
        table.last_used[rows] = now_s
        table.held[rows] = True
        lacking = path.blocks[len(rows) : capacity]
        if len(lacking) > len(table.free):
            victims = table.victims(len(lacking) - len(table.free), policy)
            table.remove(victims)
            uses.removed(table, np.array(victims, np.int64), _TIER)
            lacking = lacking[: len(table.free)]
        if len(lacking):
            parent = int(rows[-1]) if len(rows) else -1
            fresh = table.insert(lacking, len(rows), parent, now_s)
            uses.admitted(table, fresh, _TIER, now_s)
        table.held[rows] = False
    return CurvePoint(policy.name, capacity, _asked(paths), hits)


def replay_optimum(paths: Sequence[PrefixPath], capacity: int) -> CurvePoint:
    """What a tier of `capacity` blocks finds at most, knowing what is to come (Belady, 1966).

    What is asked for last goes first, also if it has just come. A block is asked for whenever one that continues it is,
    so of a prefix the end goes first, and the choice is the best one for prefixes, too.
    """
    later: dict[int, int] = {}
    following: list[npt.NDArray[np.int64]] = []
    for number, path in reversed(list(enumerate(paths))):
        following.append(np.array([later.get(block, _NEVER) for block in path.blocks.tolist()], np.int64))
        later.update(dict.fromkeys(path.blocks.tolist(), number))
    there: dict[int, int] = {}  # the next request that asks for each block
    queue: list[tuple[int, int]] = []
    hits = 0
    for path, nexts in zip(paths, reversed(following), strict=True):
        found = True
        for block, next_use in zip(path.blocks.tolist(), nexts.tolist(), strict=True):
            found = found and block in there
            hits += found
            there[block] = next_use
            heappush(queue, (-next_use, -block))
        while len(there) > capacity:
            next_use, block = heappop(queue)
            if there.get(-block) == -next_use:
                del there[-block]
    return CurvePoint("optimum", capacity, _asked(paths), hits)


def miss_ratio_curve(
    paths: Sequence[PrefixPath], capacities: Sequence[int], policies: Sequence[Any]
) -> Iterator[CurvePoint]:
    """The points of each capacity: the optimum, then those of the policies that `policies` make."""
    for capacity in capacities:
        yield replay_optimum(paths, capacity)
        for make in policies:
            yield replay(paths, capacity, make())


def _asked(paths: Sequence[PrefixPath]) -> int:
    return sum(len(path.blocks) for path in paths)


def _different(paths: Sequence[PrefixPath]) -> int:
    return 1 + max((int(path.blocks.max(initial=-1)) for path in paths), default=-1)
