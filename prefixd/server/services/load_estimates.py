"""Estimates the time to load a prefix for an engine, learned from earlier loads: `LoadEstimate` in `cache.proto`."""

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
from prefixd.serving.loading.load_bytes import bytes_to_load
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
        """Returns the estimate for a usable prefix of a prompt of `tokens` tokens. The engine has the blocks before
        `first_block`.

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
        """Returns the prefix as stretches, each farther away than the one before.

        The engine's own blocks and blocks in the CPU tier need no loading. Blocks inside a stretch that are nearer
        count no bytes. If `counted`, [len(path) - first_block], is given, only its blocks count bytes.
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
                here = np.s_[begin:end] if counted is None else begin + np.flatnonzero(counted[begin:end])
                nbytes = bytes_to_load(trie, rows[here], lacking[here])
                found.append(Stretch(distance, (end - begin) * block_tokens, nbytes.moved, nbytes.decoded))
                begin = end
        return found

    def estimate_stretches(
        self, stretches: list[Stretch], block_tokens: int, first_block: int, tokens: int, prefill: pb.Prefill | None
    ) -> pb.LoadEstimate:
        """Returns the estimate for a prefix as `stretches` returns it."""
        loads = [
            self.cost.load_s(
                stretch.nbytes, stretch.distance, self.queued_bytes.get(stretch.distance, 0), stretch.decoded_bytes
            )
            for stretch in stretches
            if stretch.nbytes
        ]
        load_s = None if None in loads else math.fsum(load for load in loads if load is not None)
        if prefill is None:
            return pb.LoadEstimate(load_s=load_s)
        try:
            cost = self.cost.computing_as(PrefillCost(prefill.pass_s, prefill.token_s, prefill.pair_s))
            self.cache.prompts.token_s = prefill.token_s or self.cache.prompts.token_s
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
    """One load, from the moment when its blocks are known until it has ended.

    Attributes:
        estimate: the estimate at the beginning.
        blocks: number of blocks to lease.
        cached_blocks: number of cached blocks among those that the call asks for.
        loads: whether bytes must be brought up.
        complete: True if all blocks were loaded; the caller sets it. Estimates learn only from complete loads.
    """

    def __init__(
        self, estimates: LoadEstimates, trie: Trie, first_block: int, tokens: int, prefill: pb.Prefill | None
    ) -> None:
        self.blocks = self.cached_blocks = 0
        self.loads = self.complete = False
        self._estimates = estimates
        self._trie = trie
        self._first_block = first_block
        self._of = (trie.block_tokens, first_block, tokens, prefill)
        # An invalid `prefill` is refused before anything is loaded.
        self.estimate = pb.LoadEstimate() if prefill is None else estimates.estimate_stretches([], *self._of)
        self._mark: float | None = None
        self._claimed: Rows = np.empty(0, np.int64)
        self._nbytes: dict[Distance, int] = {}
        self._decoded_bytes = 0

    def begin(self, reader: Reader) -> None:
        """Begins the load of a prefix that was matched, before any block of it is brought up."""
        self.cached_blocks = len(reader.path)
        path = reader.path[: reader.end]
        stretches = self._estimates.stretches(self._trie, path, self._first_block)
        rows = path[self._first_block :]
        self.blocks = len(rows)
        self.estimate = self._estimates.estimate_stretches(stretches, *self._of)
        self.loads = any(stretch.nbytes for stretch in stretches)
        if self.loads:
            fresh = self._estimates.claims.claim(self._trie, rows)
            self._claimed = rows[fresh]
            if not fresh.all():
                stretches = self._estimates.stretches(self._trie, path, self._first_block, fresh)
        self._nbytes = {stretch.distance: stretch.nbytes for stretch in stretches if stretch.nbytes}
        self._decoded_bytes = sum(stretch.decoded_bytes for stretch in stretches)
        if self._nbytes:
            self._mark = self._estimates.meter.begin()
            self._count_queued(1)

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
        self._count_queued(-1)
        if self.complete:
            nbytes = sum(self._nbytes.values())
            self._estimates.cost.observe_load(max(self._nbytes), nbytes, elapsed_s, self._decoded_bytes)

    def _count_queued(self, sign: int) -> None:
        for distance, nbytes in self._nbytes.items():
            self._estimates.queued_bytes[distance] += sign * nbytes
