"""Estimates what larger and smaller tiers and other policies would find, from the prompts that the daemon sees.

    a call ----> asked() notes tokens (1 us) ----> queue, bounded
    run(), in the background ----> prefix hashes ----> CPU tier's sample   } each block: LRU at ten sizes,
         at most 1% of the time                  ----> disk tier's sample  } other policies at one

Beyond its time, first the sample shrinks; if hashing alone takes too long, prompts are skipped and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.base.clocks import cpu_wait_s
from prefixd.base.long_work.pacer import give_way
from prefixd.cache.cache import TieredCache
from prefixd.cache.ghosts.ghost_tier import FACTORS, NOW, GhostTier, Prompt, Sizes
from prefixd.cache.ghosts.prefix_hashes import PrefixHashes
from prefixd.cache.ghosts.tallies import Tally
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.namespaces import Namespace
from prefixd.cache.prompt_listeners import Lookup
from prefixd_swap.tiers import AbsentTier

SHARE = 0.006
"""The most that the ghosts take of the time in which the event loop's thread runs or has nothing to do.

Time in which it waits for a CPU does not count, so of a busy event loop it is this share. What they do in calls counts.
"""
LEAST_REFERENCES = 1000
"""With fewer sampled references there is no estimate."""
_COMPARED = ("lru", "lfu", "s3-fifo", "weighing")
_NOTED_S = 2e-6  # what a call spends on a note
_MOST_CREDIT_S = 0.002  # saved up while nothing comes; the first calls after that would feel more
_CREDITED_EVERY_S = 0.05
_SLICE_S = 0.001
_QUEUED_PROMPTS = 1024
_RECENT = 256
_QUEUED_BYTES = 8 << 20
_HALVED_EVERY_S = 0.5
_LEAST_SAMPLE = 1 / 16  # of the sample's size, at the largest size of the tier
_AGED_EVERY_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class SizeEstimate:
    """A tier of another size.

    Attributes:
        factor: its size, as a multiple of the present one.
        nbytes: its size.
        hit_rate: share of the prompt tokens that it and nearer tiers would have found.
        margin: the true rate is this near in about nine of ten cases.
        filled: prompts had enough different blocks to fill it; a larger tier finds the same as long as this is False.
    """

    factor: float
    nbytes: int
    hit_rate: float
    margin: float
    filled: bool


@dataclass(frozen=True, slots=True)
class TierEstimate:
    """What the ghosts of a tier say.

    Attributes:
        level: the tier's.
        nbytes: its size now.
        policy: the daemon's eviction policy.
        rate: the share of all blocks in the sample.
        references: sampled blocks that prompts asked for.
        hit_rate: measured: the share of the prompt tokens found in this tier or a nearer one.
        sizes: by size, rising.
        policies: hit rates of other policies at the present size; empty for one tenant.
    """

    level: int
    nbytes: int
    policy: str
    rate: float
    references: int
    hit_rate: float | None
    sizes: list[SizeEstimate]
    policies: dict[str, float]

    @property
    def now(self) -> SizeEstimate:
        """The estimate for the present size."""
        return self.sizes[NOW]

    @property
    def sure(self) -> bool:
        """Whether there is enough data."""
        return self.references >= LEAST_REFERENCES

    def tokens_per_byte(self, asked_tokens: float) -> float:
        """Tokens more that each byte more would have found, up to twice the size."""
        double = next(size for size in self.sizes if size.factor == 2.0)
        more = max(0.0, double.hit_rate - self.now.hit_rate) * asked_tokens
        return more / max(1, double.nbytes - self.now.nbytes)


class Ghosts:
    """The ghosts of one daemon's cache.

    Args:
        cache: hears its prompts from the first `run` on.
        policy: name of its eviction policy.
        nbytes: about the most memory of the samples.
        seed: for policies that draw random numbers.
        hashes: of prompts; random by default.
        spent_s: the CPU time of this thread.
        waited_s: how long this thread had to wait for a CPU.
    """

    def __init__(
        self,
        cache: TieredCache,
        policy: str,
        nbytes: int,
        *,
        seed: int = 0,
        hashes: PrefixHashes | None = None,
        spent_s: Callable[[], float] = time.thread_time,
        waited_s: Callable[[], float] = cpu_wait_s,
    ) -> None:
        self._cache = cache
        self._hashes = hashes or PrefixHashes()
        self._spent_s, self._waited_s = spent_s, waited_s
        tiers = cache.tiers
        sized = [tier for tier in (tiers.shared, tiers.durable) if tier is not None and tier.capacity_bytes]
        blocks = max(1024, nbytes // max(1, len(sized)) // GhostTier.bytes_a_block(policy))
        others = [name for name in _COMPARED if name != policy]
        self.tiers = [GhostTier(tier.level, blocks, policy, others, seed) for tier in sized]
        self._queue: deque[tuple[Prompt, npt.NDArray[np.uint32], int]] = deque()
        self._queued_bytes = 0
        self._recent: dict[tuple[int, int, int], None] = {}  # the last prompts that were asked for
        self._noted = asyncio.Event()
        self._notes = 0
        self._credit_s, self._credited_s = _MOST_CREDIT_S, cache.clock()
        self._waited_before_s = waited_s()
        self._halved_s = self._aged_s = self.since_s = cache.clock()
        self._base = self._counters()
        self.skipped_prompts = 0
        """Prompts that were asked for and left out for lack of time."""
        self.busy_s = 0.0
        """CPU time spent since the start, notes included."""

    # -- hearing ------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Hears the cache's prompts from now on."""
        if self.tiers:
            self._cache.prompts.asked.append(self.asked)
            self._cache.prompts.stored.append(self.stored)

    def asked(self, namespace: Namespace, chain: BlockChain, lookup: Lookup) -> None:
        """A prompt was asked for; see `PromptListeners`."""
        rows = chain.token_rows[: lookup.blocks]
        if len(rows):
            mark = self._mark(namespace, rows)
            self._recent[mark] = None
            if len(self._recent) > _RECENT:
                del self._recent[next(iter(self._recent))]
        self._note(namespace, chain, rows, lookup)

    def stored(self, namespace: Namespace, chain: BlockChain) -> None:
        """Blocks are being stored. What was asked for a moment ago is there already, so only answers are new."""
        rows = chain.token_rows
        if not len(rows) or self._mark(namespace, rows) in self._recent:
            return
        if 2 * self._queued_bytes < _QUEUED_BYTES and 2 * len(self._queue) < _QUEUED_PROMPTS:
            self._note(namespace, chain, rows, None)

    @staticmethod
    def _mark(namespace: Namespace, token_rows: npt.NDArray[np.uint32]) -> tuple[int, int, int]:
        """Tells prompts apart, as far as their lengths or last blocks differ. A block may have 256 KiB of tokens."""
        return namespace.seed, len(token_rows), hash(token_rows[-1].tobytes())

    def _note(
        self, namespace: Namespace, chain: BlockChain, token_rows: npt.NDArray[np.uint32], lookup: Lookup | None
    ) -> None:
        self._notes += 1
        if len(self._queue) >= _QUEUED_PROMPTS or self._queued_bytes >= _QUEUED_BYTES:
            self.skipped_prompts += 1
            return
        if 2 * token_rows.size < chain.tokens:  # a small part must not keep the whole prompt in memory
            token_rows = token_rows.copy()
        self._queued_bytes += token_rows.nbytes
        trie = self._cache.trie(namespace)
        prompt = Prompt(self._cache.clock(), namespace.spec.tenant, trie.block_tokens, trie.block_bytes, lookup)
        self._queue.append((prompt, token_rows, namespace.seed))  # not the namespace, which then could not be forgotten
        self._noted.set()

    @property
    def queued(self) -> int:
        """Prompts that wait."""
        return len(self._queue)

    # -- working ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Works until it is cancelled."""
        while True:
            await self._noted.wait()
            await self._wait_for_credit()
            began_s, before_s = self._spent_s(), self.busy_s
            while self._queue and self.busy_s - before_s < _SLICE_S:
                for _ in self.work_once():
                    self._spend(began_s)
                    await give_way()
                    began_s = self._spent_s()
                self._spend(began_s)
                began_s = self._spent_s()
            if not self._queue:
                self._noted.clear()
            self._adapt()
            await give_way()

    def work_once(self) -> Iterator[None]:
        """Works on the prompt that has waited longest; others may run at each step."""
        prompt, token_rows, seed = self._queue.popleft()
        self._queued_bytes -= token_rows.nbytes
        hashes = self._hashes.of_blocks(token_rows, seed)
        for ghost in self.tiers:
            sizes = self._sizes(ghost)
            ghost.begin(sizes, prompt.block_bytes)
            yield from ghost.use(prompt, hashes, sizes)

    def _sizes(self, ghost: GhostTier) -> Sizes:
        tiers = self._cache.tiers
        gpu = 0 if isinstance(tiers.compute, AbsentTier) else tiers.compute.capacity_bytes
        if ghost.level == tiers.shared.level:
            return Sizes(tiers.shared.capacity_bytes, beside=gpu)
        assert tiers.durable is not None
        within = gpu + tiers.shared.capacity_bytes
        return Sizes(tiers.durable.capacity_bytes, within=within, compression=self._compression())

    def _compression(self) -> float:
        """Bytes of a block for each byte that the disk stores of it, as of what was written since the start."""
        writes = self._cache.mover.disk.writes
        return 1.0 + writes.saved_bytes / writes.written_bytes if writes.written_bytes else 1.0

    def _spend(self, began_s: float) -> None:
        spent_s = self._spent_s() - began_s + self._notes * _NOTED_S
        self._notes = 0
        self.busy_s += spent_s
        self._credit_s -= spent_s

    async def _wait_for_credit(self) -> None:
        """Waits until the ghosts may take time again."""
        while True:
            now_s = self._cache.clock()
            if self._credit_s <= 0 or now_s - self._credited_s >= _CREDITED_EVERY_S:
                waited_s = self._waited_s()
                passed_s = max(0.0, now_s - self._credited_s - (waited_s - self._waited_before_s))
                self._credit_s = min(_MOST_CREDIT_S, self._credit_s + SHARE * passed_s)
                self._credited_s, self._waited_before_s = now_s, waited_s
            if self._credit_s > 0:
                return
            await asyncio.sleep(min(1.0, (_SLICE_S - self._credit_s) / SHARE))  # seldom, as waking costs too

    def _adapt(self) -> None:
        """Halves the samples if prompts wait for too long; forgets slowly."""
        now_s = self._cache.clock()
        late = 2 * self._queued_bytes > _QUEUED_BYTES or 2 * len(self._queue) > _QUEUED_PROMPTS
        if late and now_s - self._halved_s >= _HALVED_EVERY_S:
            self._halved_s = now_s
            for ghost in self.tiers:
                ghost.halve(_LEAST_SAMPLE)
        if now_s - self._aged_s >= _AGED_EVERY_S:
            self._aged_s = now_s
            self._base = [(old + new) / 2 for old, new in zip(self._base, self._counters(), strict=True)]
            for ghost in self.tiers:
                ghost.age()

    # -- answering ----------------------------------------------------------------------------------------------

    @property
    def watched_s(self) -> float:
        """How long it has watched."""
        return self._cache.clock() - self.since_s

    def asked_tokens(self, tenant: str | None = None) -> float:
        """Prompt tokens that it has heard of, older days counting less; a tenant's, or of all."""
        if not self.tiers:
            return 0.0
        tally = self.tiers[0].all if tenant is None else self.tiers[0].tenants.get(tenant)
        return 0.0 if tally is None else tally.asked_tokens

    def estimates(self, tenant: str | None = None) -> list[TierEstimate]:
        """What each tier's ghosts say, of all prompts or of a tenant's."""
        asked, *by_tier = (new - old for new, old in zip(self._counters(), self._base, strict=True))
        found = []
        for ghost in self.tiers:
            tally = ghost.all if tenant is None else ghost.tenants.get(tenant, Tally(len(FACTORS)))
            sizes, rates, margins = self._sizes(ghost), tally.hit_rates().tolist(), tally.margins().tolist()
            by_size = [
                SizeEstimate(factor, round(sizes.nbytes * factor), rate, margin, ghost.filled_bytes >= total)
                for factor, total, rate, margin in zip(FACTORS, sizes.totals().tolist(), rates, margins, strict=True)
            ]
            measured = sum(by_tier[: ghost.level + 1]) / asked if asked else None
            if tenant is not None:  # which tier had it is not counted by tenant
                measured = tally.hit_rate if ghost is self.tiers[-1] and tally.asked_tokens else None
            others = ghost.other_rates() if tenant is None else {}
            found.append(
                TierEstimate(
                    *(ghost.level, sizes.nbytes, ghost.policy, ghost.rate, tally.references),
                    *(measured, by_size, others),
                )
            )
        return found

    def _counters(self) -> list[float]:
        """Prompt tokens asked for, and found by tier, since the start."""
        counters = self._cache.counters
        return [float(counters.asked_tokens), *map(float, counters.hit_tokens)]
