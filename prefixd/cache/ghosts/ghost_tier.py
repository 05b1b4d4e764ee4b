"""The ghosts of one tier: the sample of its blocks, and what tiers of several sizes and policies find of them.

A block is in the sample if the hash of its whole prefix is below a threshold (SHARDS, Waldspurger et al., FAST '15): so
every reference to it is seen, by any prompt. A policy evicts leaves first, hence a tier has a block only with all
blocks before it; a prompt's hits are its blocks that are there, sampled or not, and each block can be judged alone. A
tier of the sample's share of the size stands for the tier (miniature simulation, Waldspurger et al., ATC '17).

The sample has a fixed size: when it is full, the threshold falls, and the blocks above it leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.cache.ghosts.lru_stack import LruStack, Numbers
from prefixd.cache.ghosts.miniature import Miniature
from prefixd.cache.ghosts.prefix_hashes import Hashes
from prefixd.cache.ghosts.tallies import GROUPS, SampleFound, Tally
from prefixd.cache.prompt_listeners import Lookup
from prefixd_swap import create_eviction_policy

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Sizes of a tier whose hit rates are estimated, as multiples of its size."""
NOW = FACTORS.index(1.0)
_LRU = "lru"
_GROUP_BITS = np.uint64(32)  # the upper ones tell what is in the sample, the lower ones are weak
_AT_ONCE = 256  # sampled blocks in a miniature, or fewer in several: half a millisecond
_MOST_TENANTS = 64
_ALL = 1 << 64
_KEPT = 0.75  # of a full sample
_REMEMBERED = 1 << 14  # blocks that a policy with a memory remembers in miniature: 147 KB
_SLACK = 1.25  # a block this far behind the largest size may come back into reach when the threshold falls


Places = npt.NDArray[np.int64]


@dataclass(slots=True)
class Prompt:
    """Blocks that were asked for or stored.

    Attributes:
        at_s: when.
        tenant: whose.
        block_tokens, block_bytes: sizes of a block.
        lookup: what was asked for, and what the daemon's cache found of it; None: the blocks were stored.
    """

    at_s: float
    tenant: str
    block_tokens: int
    block_bytes: int
    lookup: Lookup | None


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the sizes of a tier are measured from.

    Attributes:
        nbytes: the tier's size now.
        beside: bytes of nearer tiers whose blocks the tier does not have too.
        within: bytes of nearer tiers whose blocks the tier has too, if it is large enough.
        compression: bytes of blocks for each byte that the tier keeps of them: 2.0 where a codec halves them.
    """

    nbytes: int
    beside: int = 0
    within: int = 0
    compression: float = 1.0

    def totals(self) -> npt.NDArray[np.float64]:
        """[FACTORS]: bytes of the blocks that this tier at each size and the nearer ones hold together."""
        own = self.nbytes * self.compression * np.array(FACTORS)
        totals: npt.NDArray[np.float64] = np.maximum(own + self.beside, self.within)
        return totals


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
        self._first_threshold = self._threshold
        self._number_of: dict[int, int] = {}
        self._hash_of = np.zeros(blocks, np.uint64)
        self._free = list(range(blocks))[::-1]
        self._stack = LruStack(blocks)
        factors = FACTORS if self.policy != _LRU else ()
        self._by_size = [self._miniature(self.policy, factor) for factor in factors]
        self._other = {name: self._miniature(name) for name in self.others}
        self._other_tally = Tally(len(self.others))
        self.all = Tally(len(FACTORS))
        self.tenants: dict[str, Tally] = {}
        self._fresh = True
        self._block_bytes = 0.0  # mean size of the blocks of the last prompts
        self.filled_bytes = 0.0
        """Bytes of all different blocks so far; an estimate, and counted up to the largest size only."""

    @property
    def rate(self) -> float:
        """The share of all blocks that is in the sample."""
        return self._threshold / _ALL

    @staticmethod
    def bytes_a_block(policy: str) -> int:
        """Memory of the ghosts of a tier for each block of their sample: LRU needs no miniature of each size."""
        return 400 if policy == _LRU else 1100

    @property
    def blocks(self) -> int:
        """Blocks in the sample."""
        return len(self._number_of)

    def begin(self, sizes: Sizes, block_bytes: int) -> None:
        """Before the first prompt: chooses the share of the blocks from the size of the tier and of a block."""
        if self._fresh and self._rate_given is None:
            room = _KEPT * self._blocks / max(1.0, float(sizes.totals()[-1]) / block_bytes)
            self._threshold = self._first_threshold = min(_ALL, round(room * _ALL))
        self._fresh = False

    def use(self, prompt: Prompt, hashes: Hashes, sizes: Sizes) -> Iterator[None]:
        """A prompt asks for its blocks; they are there afterwards. Others may run at each step, but no other `use`.

        Args:
            prompt: the prompt.
            hashes: of its blocks.
            sizes: of the tier.
        """
        places = self._sample(hashes)
        totals = sizes.totals()
        self._block_bytes += (prompt.block_bytes - self._block_bytes) * (0.01 if self._block_bytes else 1.0)
        places, path = self._enter(hashes, places, totals)
        rate = self.rate  # entering may have lowered it
        by_size = np.zeros((len(path), len(FACTORS)), np.bool_)
        by_policy = np.zeros((len(path), len(self._other)), np.bool_)
        if len(path):
            distances = self._stack.distances(path)
            self._stack.use(path, prompt.block_bytes)
            self.filled_bytes = max(self.filled_bytes, self._stack.total_bytes / rate)
            worked = 0
            if self._by_size:
                for at, (miniature, total) in enumerate(zip(self._by_size, totals.tolist(), strict=True)):
                    if (worked := worked + len(path)) > _AT_ONCE:
                        worked = 0
                        yield
                    by_size[: self._found(miniature, path, total, prompt.at_s), at] = True
            else:
                by_size[: len(distances)] = distances[:, None] <= totals * rate
            for at, miniature in enumerate(self._other.values()):
                if (worked := worked + len(path)) > _AT_ONCE:
                    worked = 0
                    yield
                by_policy[: self._found(miniature, path, float(totals[NOW]), prompt.at_s), at] = True
        if (lookup := prompt.lookup) is None:
            return
        counted = places >= lookup.first_block
        places, by_size, by_policy = places[counted], by_size[counted], by_policy[counted]
        groups = (hashes[places] >> _GROUP_BITS).astype(np.int64) & (GROUPS - 1)
        sample = SampleFound(lookup.tokens, max(0, lookup.found - lookup.first_block), groups, places < lookup.found)
        weight = prompt.block_tokens / rate
        for tally in (self.all, self._tally(prompt.tenant)):
            tally.add(sample, by_size, prompt.block_tokens, weight)
        self._other_tally.add(sample, by_policy, prompt.block_tokens, weight)

    def halve(self, least: float) -> None:
        """Halves the share of the blocks in the sample, unless that is too small already.

        Args:
            least: the least part of the sample's room that blocks of the largest size fill.
        """
        if self._threshold > self._first_threshold * least:
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

    def _miniature(self, name: str, factor: float = 1.0) -> Miniature:
        policy, rows = create_eviction_policy(name, self._seed), int(self._blocks * min(1.0, 2 * factor / FACTORS[-1]))
        return Miniature(self._blocks, rows, policy, remembered=_REMEMBERED)

    def _found(self, miniature: Miniature, path: npt.NDArray[np.int64], total: float, now_s: float) -> int:
        miniature.resize(round(total * self.rate / self._block_bytes))
        return miniature.use(path, now_s)

    def _sample(self, hashes: Hashes) -> Places:
        """The places of a prompt's blocks that are in the sample."""
        if self._threshold == _ALL:
            return np.arange(len(hashes))
        return np.flatnonzero(hashes < np.uint64(self._threshold))

    def _enter(self, hashes: Hashes, places: Places, totals: npt.NDArray[np.float64]) -> tuple[Places, Numbers]:
        """Gives blocks their numbers; returns those that are in the sample now, at most the first that have room."""
        sampled = hashes[places].tolist()
        new = sum(each not in self._number_of for each in sampled)
        if new > len(self._free):
            self._make_room(new, totals)
            places = places[self._sample(hashes[places])]
            sampled = hashes[places].tolist()
        numbers = []
        for each in sampled:
            number = self._number_of.get(each)
            if number is None:
                if not self._free:
                    break
                number = self._number_of[each] = self._free.pop()
                self._hash_of[number] = each
            numbers.append(number)
        return places[: len(numbers)], np.array(numbers, np.int64)

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
