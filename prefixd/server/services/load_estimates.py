"""What loading a prefix for an engine takes, learned from what engines have loaded: `LoadEstimate` in `cache.proto`."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import InvalidArgumentError
from prefixd.cache import TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.cache.moving.beginnings import Reader
from prefixd.serving.loading.load_choice import LoadClaims, LoadMeter
from prefixd.v1 import cache_pb2 as pb
from prefixd_scheduler import LOADED_FROM, CostModel, Distance, InvalidValueError, PrefillCost, Stretch, plan_load


class LoadEstimates:
    """Estimates loads to the CPU tier, where engines read, and learns from them.

    Args:
        cache: where the blocks are.
    """

    def __init__(self, cache: TieredCache) -> None:
        self.cache = cache
        self.cost = CostModel()
        self.meter = LoadMeter(cache.clock)
        self.claims = LoadClaims()
        self.queued_bytes = dict.fromkeys(LOADED_FROM, 0)

    def estimate(
        self, trie: Trie, path: Rows, first_block: int, tokens: int, prefill: pb.Prefill | None
    ) -> pb.LoadEstimate:
        """Of a usable prefix of a prompt of so many tokens, of which the engine has what is before `first_block`.

        Raises:
            InvalidArgumentError: `prefill` has a negative number.
        """
        return self.estimate_stretches(
            self.stretches(trie, path, first_block), trie.block_tokens, first_block, tokens, prefill
        )

    def watch(self, trie: Trie, first_block: int, tokens: int, prefill: pb.Prefill | None) -> LoadWatch:
        """Estimates a load and learns from it; `LoadWatch` is a context manager around it.

        Raises:
            InvalidArgumentError: `prefill` has a negative number.
        """
        return LoadWatch(self, trie, first_block, tokens, prefill)

    def stretches(
        self, trie: Trie, path: Rows, first_block: int, counted: npt.NDArray[np.bool_] | None = None
    ) -> list[Stretch]:
        """The prefix by where it has to be brought from; what the engine has, and what is in the CPU tier, is at hand.

        Each stretch is farther away than the one before; what is nearer amid it counts no bytes, nor does what is not
        `counted`, [len(path) - first_block] if given.
        """
        first = min(first_block, len(path))
        rows, block_tokens = path[first:], trie.block_tokens
        wanted = trie.needed(len(path), first) if trie.has_rules else None
        lacking = trie.lacking(rows, self.cache.tiers.shared.level, wanted)
        found = [Stretch(Distance.GPU, first * block_tokens, 0)] if first else []
        missing = np.flatnonzero(lacking)
        nearest = trie.nearest[rows[missing]]
        farther = (missing, missing[nearest >= Distance.DISK], missing[nearest >= Distance.REMOTE])
        ends = (*(int(places[0]) if len(places) else len(rows) for places in farther), len(rows))
        begin = 0
        for distance, end in zip((Distance.GPU, Distance.CPU, Distance.DISK, Distance.REMOTE), ends, strict=True):
            if end > begin:
                here = lacking[begin:end] if counted is None else lacking[begin:end][counted[begin:end]]
                nbytes = int(np.bincount(here, minlength=len(trie.group_bytes)) @ trie.group_bytes)
                found.append(Stretch(distance, (end - begin) * block_tokens, nbytes))
                begin = end
        return found

    def estimate_stretches(
        self, stretches: list[Stretch], block_tokens: int, first_block: int, tokens: int, prefill: pb.Prefill | None
    ) -> pb.LoadEstimate:
        """As `estimate`, of a prefix by where it has to be brought from."""
        loads = [
            self.cost.load_s(stretch.nbytes, stretch.distance, self.queued_bytes.get(stretch.distance, 0))
            for stretch in stretches
            if stretch.nbytes
        ]
        load_s = None if None in loads else math.fsum(load for load in loads if load is not None)
        if prefill is None:
            return pb.LoadEstimate(load_s=load_s)
        try:
            cost = self.cost.computing_as(PrefillCost(prefill.pass_s, prefill.token_s, prefill.pair_s))
        except InvalidValueError as error:
            raise InvalidArgumentError(f"prefill: {error}") from None
        plan = plan_load(
            cost,
            stretches,
            tokens,
            block_tokens,
            both_at_once=False,
            queued_bytes=self.queued_bytes,
            to_carry_out=False,
        )
        known = min(first_block * block_tokens, tokens)
        return pb.LoadEstimate(
            load_s=load_s,
            compute_s=cost.compute_s(tokens - known, known),
            best_blocks=(plan.ready_tokens + plan.front_tokens) // block_tokens,
            best_s=plan.first_token_s,
        )


class LoadWatch:
    """One load, from when its blocks are known until it has ended.

    Attributes:
        estimate: as of the beginning.
        blocks: to be leased.
        cached_blocks: of the prompt, as far as was asked for.
        complete: everything has come, set by who watches; only then something is learned.
    """

    def __init__(
        self, estimates: LoadEstimates, trie: Trie, first_block: int, tokens: int, prefill: pb.Prefill | None
    ) -> None:
        self.blocks = self.cached_blocks = 0
        self.complete = False
        self._estimates = estimates
        self._trie = trie
        self._first_block = first_block
        self._of = (trie.block_tokens, first_block, tokens, prefill)
        # Before anything is loaded: a wrong `prefill` is refused.
        self.estimate = pb.LoadEstimate() if prefill is None else estimates.estimate_stretches([], *self._of)
        self._mark: float | None = None
        self._claimed: Rows = np.empty(0, np.int64)
        self._nbytes: dict[Distance, int] = {}

    def begin(self, reader: Reader) -> None:
        """The prefix was matched, and nothing was brought up yet."""
        self.cached_blocks = len(reader.path)
        path = reader.path[: reader.end]
        stretches = self._estimates.stretches(self._trie, path, self._first_block)
        rows = path[self._first_block :]
        self.blocks = len(rows)
        self.estimate = self._estimates.estimate_stretches(stretches, *self._of)
        if any(stretch.nbytes for stretch in stretches):
            fresh = self._estimates.claims.claim(self._trie, rows)
            self._claimed = rows[fresh]
            if not fresh.all():
                stretches = self._estimates.stretches(self._trie, path, self._first_block, fresh)
        self._nbytes = {stretch.distance: stretch.nbytes for stretch in stretches if stretch.nbytes}
        if self._nbytes:
            self._mark = self._estimates.meter.begin()
            self._queue(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if len(self._claimed):
            self._estimates.claims.release(self._trie, self._claimed)
        if self._mark is None:
            return
        elapsed_s = self._estimates.meter.end(self._mark)
        self._queue(-1)
        if self.complete:
            self._estimates.cost.observe_load(max(self._nbytes), sum(self._nbytes.values()), elapsed_s)

    def _queue(self, sign: int) -> None:
        for distance, nbytes in self._nbytes.items():
            self._estimates.queued_bytes[distance] += sign * nbytes
