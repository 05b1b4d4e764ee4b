"""Loads blocks into the GPU tier in pieces, so that it shows when a load falls behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from prefixd.cache import TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.cache.rules import GroupMask
from prefixd.serving.loading.layer_load import LayerLoad
from prefixd.serving.loading.load_bytes import BlockLoads, LoadBytes
from prefixd.serving.loading.load_choice import LoadClaims, LoadMeter
from prefixd_scheduler import LOADED_FROM, CostModel, Distance
from prefixd_swap import SwapError
from prefixd_swap.transfers import Urgency

log = logging.getLogger(__name__)

_PIECES = 16
_PIECE_S = 0.05
"""Seconds that a piece takes to load, at least. If room has to be made for it, a piece of any size costs the event loop
some 3 ms. With pieces of 10 ms a busy machine, whose loads take longer, had more pieces and became busier."""
_RECENT = 4  # pieces that move at once
_PATIENCE = 0.1
_LEAST_PATIENCE_S = 0.01
"""A load may be late by this share of the time of computing the rest, and by this many seconds in any case."""
_INEXACT = 0.5
"""It may also be late by this share of the expected time of its next piece. Estimates are a latency and a rate, but a
disk that reads six blocks at a time takes as long for one block as for six, and twice as long for seven."""

_GIVEN_UP = 2.0
"""The time of a load that was given up is unknown: it counts as twice the time until then. Counted once, it made the
next load seem faster than it is, so that this was given up even earlier."""


@dataclass(slots=True, eq=False)
class _Piece:
    rows: Rows
    distance: Distance
    nbytes: LoadBytes
    claimed: Rows  # rows that no other load had claimed
    claimed_bytes: LoadBytes
    began_s: float
    task: asyncio.Task[bool]
    arrived_s: float | None = None


class PieceLoad:
    """A load of blocks, whose frames in the GPU tier the owner holds.

    Pieces move side by side, in the order in which they are begun. A piece counts as arrived when all before it have
    arrived, too.

    Args:
        cache: where the blocks are.
        cost: learns what loading costs, and estimates when a piece is due.
        meter: shares time among the loads of all requests.
        claims: decides which load counts a block that several wait for.
        clock: seconds.
        name: of the owner, for logs.
        trie: the blocks' trie.
        urgency: how urgent the load is.
        changed: called when a piece has ended.
        queued_bytes: bytes that all loads have on their way, as their tiers keep them.

    Attributes:
        arrived: how many of the pieces, from the first on, are in the GPU tier.
        failed: a piece came in part: a block was damaged, or room was short.
        due_s: when the blocks are wanted, on the clock of the transfers; None: as soon as their turn comes.
    """

    def __init__(
        self,
        cache: TieredCache,
        cost: CostModel,
        meter: LoadMeter,
        claims: LoadClaims,
        clock: Callable[[], float],
        name: str,
        trie: Trie,
        urgency: Urgency,
        changed: Callable[[], None],
        queued_bytes: Callable[[], int],
    ) -> None:
        self.arrived = 0
        self.failed = False
        self.due_s: float | None = None
        self._cache = cache
        self._cost = cost
        self._meter = meter
        self._claims = claims
        self._clock = clock
        self._name = name
        self._trie = trie
        self._urgency = urgency
        self._changed = changed
        self.queued_bytes = queued_bytes
        self._pieces: list[_Piece] = []
        self._mark: float | None = None  # of the meter, while something moves
        self._arrived_bytes = LoadBytes()  # claimed bytes that arrived since that mark
        self._since_s = clock()  # delays count from here on

    @property
    def urgency(self) -> Urgency:
        """How urgent it is now; see `hurry`."""
        return self._urgency

    @property
    def under_way(self) -> bool:
        """Whether a piece has not arrived yet."""
        return self.arrived < len(self._pieces) and not self.failed

    @property
    def moving_bytes(self) -> int:
        """Bytes of the pieces that are on their way, as their tiers keep them."""
        return 0 if self.failed else sum(piece.nbytes.moved for piece in self._pieces[self.arrived :])

    @property
    def claimed_bytes(self) -> int:
        """Bytes of these pieces that no other load counts."""
        return 0 if self.failed else sum(piece.claimed_bytes.moved for piece in self._pieces[self.arrived :])

    def begin(self, rows: Rows, wanted: GroupMask | None = None, layers: LayerLoad | None = None) -> None:
        """Begins one more piece.

        Args:
            rows: [m] its blocks.
            wanted: [m] the KV groups of each block to bring, all by default.
            layers: brings exactly these layer by layer.
        """
        trie, compute = self._trie, self._cache.tiers.compute
        lacking = trie.lacking(rows, compute.level, wanted)
        distance = Distance(int(trie.nearest[rows[lacking != 0]].max(initial=0)))
        loads = BlockLoads(trie, rows, lacking)
        fresh = self._claims.claim(trie, rows)
        claimed_bytes = loads.total(fresh)
        if self._mark is None and claimed_bytes:
            self._mark, self._arrived_bytes = self._meter.begin(), LoadBytes()
        task = asyncio.create_task(self._bring(rows, wanted, layers))
        piece = _Piece(rows, distance, loads.total(), rows[fresh], claimed_bytes, self._clock(), task)
        self._pieces.append(piece)
        task.add_done_callback(partial(self._end_piece, piece))

    def arrived_rows(self) -> Rows:
        """The blocks of the pieces that have arrived, in the order in which they were begun."""
        return np.concatenate([np.empty(0, np.int64), *(piece.rows for piece in self._pieces[: self.arrived])])

    def hurry(self) -> None:
        """Makes the load urgent: a request waits for it now."""
        if self._urgency is not Urgency.DEMAND:
            self._urgency, self._since_s = Urgency.DEMAND, self._clock()
            for piece in self._pieces[self.arrived :]:
                self._cache.mover.hurry(self._trie, piece.rows, self._cache.tiers.compute)

    def behind_in_s(self, compute_s: float | None) -> float | None:
        """Seconds until the load should be given up, 0 or less for now. None while nothing moves, no request waits, or
        no estimate is known.

        compute_s: seconds until the blocks that have not arrived would be computed.
        """
        if not self.under_way or compute_s is None or self._urgency is not Urgency.DEMAND:
            return None
        piece, before = self._pieces[self.arrived], self._pieces[: self.arrived]
        others = max(0, self.queued_bytes() - self.claimed_bytes)
        expected_s = piece.nbytes.load_s(self._cost, piece.distance, others)
        if expected_s is None:
            return None
        patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * compute_s)
        if len(before) > _RECENT:  # at the pace of the last pieces, will the rest take longer than computing it?
            first, last = before[-_RECENT - 1].arrived_s or 0.0, before[-1].arrived_s or 0.0
            nbytes = sum(each.nbytes.moved for each in before[-_RECENT:])
            if nbytes and (last - first) / nbytes * self.moving_bytes > compute_s + patience_s:
                return 0.0
        since_s = max(self._since_s, piece.began_s, (before[-1].arrived_s or 0.0) if before else 0.0)
        return since_s + expected_s + max(patience_s, _INEXACT * expected_s) - self._clock()

    def drop(self, *, late: bool = False) -> None:
        """Gives up the pieces that have not arrived: they are `late`, or no request wants them any more.

        Their frames are free again when the reads into them have ended.
        """
        left = self._pieces[self.arrived :]
        if left and late and not self.failed:
            self._observe(left[0].distance, self._arrived_bytes + left[0].claimed_bytes, _GIVEN_UP)
        self.failed = self.failed or bool(left)
        for piece in left:
            piece.task.cancel()
        self._end_mark()

    async def _bring(self, rows: Rows, wanted: GroupMask | None, layers: LayerLoad | None) -> bool:
        mover, compute = self._cache.mover, self._cache.tiers.compute
        try:
            if layers is not None:
                await mover.bring_by_layers(self._trie, rows, compute, layers.wanted, layers)
                if layers.failed or not self._trie.lacking(rows, compute.level, wanted).any():
                    return not layers.failed
            there = await mover.bring(
                self._trie, rows, compute, wanted, urgency=lambda: self._urgency, due_s=self.due_s
            )
            return there == len(rows)
        except SwapError as error:
            log.error("blocks for %s could not be brought up: %s", self._name, error)
            return False

    def _end_piece(self, piece: _Piece, task: asyncio.Task[bool]) -> None:
        self._claims.release(self._trie, piece.claimed)
        if task.cancelled():
            return
        if task.exception() is not None:
            log.error("blocks for %s could not be brought up", self._name, exc_info=task.exception())
        while self.under_way and (next_ := self._pieces[self.arrived]).task.done():
            if next_.task.cancelled() or next_.task.exception() is not None or not next_.task.result():
                self.failed = True
                break
            next_.arrived_s = self._clock()
            self.arrived += 1
            self._arrived_bytes += next_.claimed_bytes
            if self.arrived == 1 or not self.under_way:  # a short and a long observation separate latency and rate
                self._observe(next_.distance, self._arrived_bytes)
        if not self.under_way:
            self._end_mark()
        self._changed()

    def _observe(self, distance: Distance, nbytes: LoadBytes, times: float = 1.0) -> None:
        if self._mark is not None and nbytes and distance in LOADED_FROM:
            elapsed_s = times * self._meter.so_far(self._mark)
            self._cost.observe_load(distance, nbytes.moved, elapsed_s, nbytes.decoded)

    def _end_mark(self) -> None:
        if self._mark is not None:
            self._meter.end(self._mark)
            self._mark = None


def piece_blocks(load_s: float | None, blocks: int) -> int:
    """Blocks of a piece, for a load of `blocks` blocks that is expected to take `load_s` (None: unknown)."""
    pieces = _PIECES if load_s is None else max(1, min(_PIECES, int(load_s / _PIECE_S)))
    return max(1, -(-blocks // pieces))
