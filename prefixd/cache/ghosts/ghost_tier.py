"""The ghosts of one tier: the sample of its blocks, and what tiers of several sizes and policies find of them.

A block is in the sample if the hash of its whole prefix is below a threshold (SHARDS, Waldspurger et al., FAST '15): so
every reference to it is seen, by any prompt. A policy evicts leaves first, hence a tier has a block only with all
blocks before it; a prompt's hits are its blocks that are there, sampled or not, and each block can be judged alone. A
tier of the sample's share of the size stands for the tier (miniature simulation, Waldspurger et al., ATC '17).

The sample has a fixed size: when it is full, the threshold falls, and the blocks above it leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.cache.ghosts.lru_stack import LruStack
from prefixd.cache.ghosts.miniature import Miniature
from prefixd.cache.ghosts.prefix_hashes import Hashes
from prefixd.cache.ghosts.tallies import GROUPS, Tally
from prefixd_swap import create_eviction_policy

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Sizes of a tier whose hit rates are estimated, as multiples of its size."""
NOW = FACTORS.index(1.0)
_LRU = "lru"
_MOST_TENANTS = 64
_ALL = 1 << 64
_KEPT = 0.75  # of a full sample
_SLACK = 1.25  # a block this far behind the largest size may come back into reach when the threshold falls


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the sizes of a tier are measured from.

    Attributes:
        nbytes: the tier's size now.
        beside: bytes of nearer tiers whose blocks the tier does not have too.
        within: bytes of nearer tiers whose blocks the tier has too, if it is large enough.
    """

    nbytes: int
    beside: int = 0
    within: int = 0

    def totals(self) -> npt.NDArray[np.float64]:
        """[FACTORS]: bytes of this tier at each size and of the nearer ones."""
        return np.maximum(self.nbytes * np.array(FACTORS) + self.beside, self.within)


class GhostTier:
    """The ghosts of one tier.

    Args:
        level: the tier's level.
        blocks: the most blocks in the sample.
        policy: the name of the daemon's eviction policy.
        others: names of policies that are compared with it at the present size.
        seed: for policies that draw random numbers.
        rate: the share of the blocks in the sample at first; None: as large as the sample has room for.
    """

    def __init__(
        self,
        level: int,
        blocks: int,
        policy: str,
        others: Sequence[str] = (),
        seed: int = 0,
        rate: float | None = None,
    ) -> None:
        self.level = level
        self.policy, self.others = policy, tuple(others)
        self._blocks = blocks
        self._rate_given = rate
        self._seed = seed
        self.restart()

    def restart(self) -> None:
        """Forgets everything."""
        blocks = self._blocks
        self._threshold = _ALL if self._rate_given is None else round(self._rate_given * _ALL)
        self._number_of: dict[int, int] = {}
        self._hash_of = np.zeros(blocks, np.uint64)
        self._free = list(range(blocks))[::-1]
        self._stack = LruStack(blocks)
        sizes = range(len(FACTORS)) if self.policy != _LRU else ()
        self._by_size = [self._miniature(self.policy) for _ in sizes]
        self._other = {name: self._miniature(name) for name in self.others}
        self._other_tally = Tally(len(self.others))
        self.all = Tally(len(FACTORS))
        self.tenants: dict[str, Tally] = {}
        self._fresh = True
        self.block_bytes = 1.0
        """Mean size of a block that prompts ask for."""
        self.most_filled = 0.0
        """The most bytes that a tier without limits would have had."""
        self._stored_bytes = 0.0

    @property
    def rate(self) -> float:
        """The share of all blocks that is in the sample."""
        return self._threshold / _ALL

    def sample(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """The places of a prompt's blocks that are in the sample."""
        if self._threshold == _ALL:
            return np.arange(len(hashes))
        return np.flatnonzero(hashes < np.uint64(self._threshold))

    def begin(self, sizes: Sizes, block_bytes: int) -> None:
        """Before the first prompt: chooses the share of the blocks from the size of the tier and of a block."""
        if self._fresh and self._rate_given is None:
            room = _KEPT * self._blocks / max(1.0, float(sizes.totals()[-1]) / block_bytes)
            self._threshold = min(_ALL, round(room * _ALL))
        self._fresh = False

    def use(
        self,
        hashes: list[int],
        *,
        sizes: Sizes,
        now_s: float,
        block_tokens: int,
        block_bytes: int,
        asked_tokens: int | None,
        tenant: str,
    ) -> None:
        """A prompt asks for its blocks; they are there afterwards.

        Args:
            hashes: of the prompt's sampled blocks, in order.
            sizes: of the tier.
            now_s: time of the prompt.
            block_tokens, block_bytes: sizes of a block.
            asked_tokens: tokens of all its blocks; None: the blocks are stored, and nothing was asked for.
            tenant: who asks.
        """
        totals, rate = sizes.totals(), self.rate
        self.block_bytes += 0.01 * (block_bytes - self.block_bytes) if self.block_bytes > 1 else block_bytes - 1.0
        path = self._numbers(hashes, totals)
        rate = min(rate, self.rate) if len(path) == len(hashes) else self.rate
        hashes = hashes[: len(path)]
        if len(path):
            distances = self._stack.distances(path)
            self._stored_bytes += (len(path) - len(distances)) * block_bytes / rate
            self._stack.use(path, block_bytes)
            self.most_filled = max(self.most_filled, self._stack.total_bytes / rate)
        found = np.zeros((len(path), len(FACTORS)), np.bool_)
        other = np.zeros((len(path), len(self._other)), np.bool_)
        if len(path):
            if self._by_size:
                for at, (miniature, total) in enumerate(zip(self._by_size, totals.tolist(), strict=True)):
                    found[: self._found(miniature, path, total, now_s), at] = True
            else:
                found[: len(distances)] = distances[:, None] <= totals * rate
            for at, miniature in enumerate(self._other.values()):
                other[: self._found(miniature, path, float(totals[NOW]), now_s), at] = True
        if asked_tokens is not None:
            groups = np.array(hashes, np.uint64).astype(np.int64) & (GROUPS - 1)
            weight = block_tokens / rate
            for tally in (self.all, self._tally(tenant)):
                tally.add(groups, found, asked_tokens, weight)
            self._other_tally.add(groups, other, asked_tokens, weight)

    def halve(self) -> None:
        """Halves the share of the blocks in the sample."""
        self._lower(max(1, self._threshold // 2))

    def age(self) -> None:
        """Makes what comes next count more than what was."""
        for tally in (self.all, self._other_tally, *self.tenants.values()):
            tally.age()

    def other_rates(self) -> dict[str, float]:
        """The hit rates of the other policies at the present size."""
        return dict(zip(self.others, self._other_tally.hit_rates().tolist(), strict=True))

    # -- inside -------------------------------------------------------------------------------------------------

    def _tally(self, tenant: str) -> Tally:
        found = self.tenants.get(tenant)
        if found is None:
            if len(self.tenants) >= _MOST_TENANTS:
                return self.tenants.setdefault("", Tally(len(FACTORS)))
            found = self.tenants[tenant] = Tally(len(FACTORS))
        return found

    def _miniature(self, name: str) -> Miniature:
        policy = create_eviction_policy(name, self._seed)
        return Miniature(self._blocks, self._blocks, policy, remembered=1 << 14)

    def _found(self, miniature: Miniature, path: npt.NDArray[np.int64], total: float, now_s: float) -> int:
        miniature.capacity = min(self._blocks, max(1, round(total * self.rate / self.block_bytes)))
        return miniature.use(path, now_s)

    def _numbers(self, hashes: list[int], totals: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The numbers of blocks, new ones for those that are new; of the first blocks, if there is no room for all."""
        new = sum(each not in self._number_of for each in hashes)
        if new > len(self._free):
            self._make_room(new, totals)
            hashes[:] = [each for each in hashes if each < self._threshold]
        numbers = []
        for each in hashes:
            number = self._number_of.get(each)
            if number is None:
                if not self._free:
                    break
                number = self._number_of[each] = self._free.pop()
                self._hash_of[number] = each
            numbers.append(number)
        return np.array(numbers, np.int64)

    def _make_room(self, blocks: int, totals: npt.NDArray[np.float64]) -> None:
        """Removes the blocks that no size has, or else lowers the threshold."""
        self._remove(self._stack.behind(_SLACK * float(totals[-1]) * self.rate))
        kept = int(_KEPT * self._blocks)
        if len(self._free) < max(blocks, self._blocks - kept):
            present = np.fromiter(self._number_of.values(), np.int64, len(self._number_of))
            kept = max(1, min(kept, self._blocks - blocks))
            if len(present) > kept:
                self._lower(int(np.partition(self._hash_of[present], kept)[kept]))
            else:
                self._lower(max(1, self._threshold // 2))

    def _lower(self, threshold: int) -> None:
        self._threshold = threshold
        present = np.fromiter(self._number_of.values(), np.int64, len(self._number_of))
        self._remove(present[self._hash_of[present] >= np.uint64(threshold)])

    def _remove(self, numbers: npt.NDArray[np.int64]) -> None:
        if not len(numbers):
            return
        self._stack.remove(numbers)
        for miniature in (*self._by_size, *self._other.values()):
            miniature.remove(numbers)
        for each in self._hash_of[numbers].tolist():
            del self._number_of[each]
        self._free.extend(numbers.tolist())
