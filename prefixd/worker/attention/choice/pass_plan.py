"""Which calls compute the attention of a pass: decodes apart from prompts, long prompts alone or with a split prefix.

One call of torch's flash attention for a whole batch keeps a thread block busy with all keys of 128 queries of a head,
so a prompt of 128 tokens behind 32,768 takes as long on 32 of 132 multiprocessors as eight of them on all. Two ways are
faster there: a call for this sequence alone, in which the kernel splits its keys, and its prefix as several sequences
(`split_prefix`). Which one is faster, and from which length on, is measured (`cost_table`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prefixd.worker.attention.choice.cost_table import ALONE, TOGETHER, HeadCosts, pieces_of, split

SPLITS = (4, 8, 16)
_LEAST_PIECE = 256  # keys; a piece below costs more in its call and in merging than it saves
_MOST_PIECE_ROWS = 1 << 13  # queries of all pieces, which are copied: 64 MiB with 32 heads of 128 in 16 bits
_LEAST_PREFIX = 1024  # keys before a prompt that `split_long` splits
_USUAL_PIECES = 8


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The calls of a pass, by the numbers of its segments.

    together: in one causal call.  decodes: segments of one query, in a call of their own.  alone: a call for each.
    split: segments whose keys before their first query are split into `pieces` pieces; all pieces are in one call.
    """

    together: tuple[int, ...] = ()
    decodes: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    pieces: int = 0

    @property
    def one_call(self) -> bool:
        """Whether a single call computes all of it."""
        return not self.alone and not self.split and not (self.together and self.decodes)


class Plan(Protocol):
    """Plans a pass."""

    def __call__(self, queries: Sequence[int], keys: Sequence[int], captured: bool = False) -> PassPlan:
        """The calls of a pass.

        queries: of each segment.  keys: that the last query of each sees.
        captured: the pass will be replayed for other sequences, so none can be alone: its keys' place would be fixed.
        """
        ...


def plain(queries: Sequence[int], keys: Sequence[int], captured: bool = False) -> PassPlan:
    """One call for everything."""
    del keys, captured
    return PassPlan(together=tuple(range(len(queries))))


def split_long(queries: Sequence[int], keys: Sequence[int], captured: bool = False) -> PassPlan:
    """Decodes apart; every long prefix of a prompt split, whether that is faster or not."""
    del captured
    prompts = [segment for segment, count in enumerate(queries) if count > 1]
    long = [segment for segment in prompts if keys[segment] - queries[segment] >= _LEAST_PREFIX]
    pieces = _USUAL_PIECES
    chosen = [segment for segment in long if may_split(queries[segment], keys[segment], pieces)]
    return PassPlan(
        together=tuple(segment for segment in prompts if segment not in chosen),
        decodes=tuple(segment for segment, count in enumerate(queries) if count == 1),
        split=tuple(chosen),
        pieces=pieces if chosen else 0,
    )


def may_split(queries: int, keys: int, pieces: int) -> bool:
    """Whether the keys before a segment are enough for so many pieces, and its queries not too many."""
    before = keys if queries == 1 else keys - queries
    return before >= pieces * _LEAST_PIECE and queries * pieces <= _MOST_PIECE_ROWS


class CheapestPlan:
    """A `Plan`: what was measured to be cheapest.

    costs: of the model's heads on this device.
    can_split, can_alone: whether there are kernels for these ways.
    """

    def __init__(self, costs: HeadCosts, *, can_split: bool, can_alone: bool) -> None:
        self._costs = costs
        self._splits = SPLITS if can_split else ()
        self._alone = (ALONE,) if can_alone else ()

    def __call__(self, queries: Sequence[int], keys: Sequence[int], captured: bool = False) -> PassPlan:
        """Decodes are planned as one batch; prompts in batches of prompts of about one length, the longest first."""
        decodes = [segment for segment, count in enumerate(queries) if count == 1]
        prompts = [segment for segment, count in enumerate(queries) if count > 1]
        prompts.sort(key=keys.__getitem__, reverse=True)
        chosen: list[tuple[str, int]] = []  # way and segment
        if decodes:
            way = self._cheapest(1, len(decodes), max(keys[segment] for segment in decodes) - 1, captured)
            if way != TOGETHER:
                chosen += [(way, segment) for segment in decodes]
                decodes = []
        while prompts:
            first = prompts[0]
            work = sum(queries[segment] * keys[segment] for segment in prompts)
            batch = max(1, round(work / (queries[first] * keys[first])))
            way = self._cheapest(queries[first], batch, keys[first] - queries[first], captured)
            if way == TOGETHER:
                break
            alike = [segment for segment in prompts if 2 * keys[segment] > keys[first]]
            chosen += [(way, segment) for segment in alike]
            prompts = prompts[len(alike) :]
        pieces = max(pieces_of(way) for way, _ in chosen) if chosen else 0
        alone, splits = [], []
        for way, segment in chosen:
            if way == ALONE:
                alone.append(segment)
            elif may_split(queries[segment], keys[segment], pieces):
                splits.append(segment)
            else:
                (prompts if queries[segment] > 1 else decodes).append(segment)
        return PassPlan(
            together=tuple(sorted(prompts)),
            decodes=tuple(decodes),
            alone=tuple(sorted(alone)),
            split=tuple(sorted(splits)),
            pieces=pieces if splits else 0,
        )

    def _cheapest(self, queries: int, batch: int, tokens: int, captured: bool) -> str:
        splits = [split(count) for count in self._splits if may_split(queries, tokens + queries, count)]
        alone = () if captured else self._alone
        # One call is all that was measured for a captured pass on devices without a table of their own. Without shared
        # KV heads the kernel splits no keys in it, and takes five times as long as one that does.
        estimate = captured and self._costs.query_heads == self._costs.kv_heads
        return self._costs.cheapest(queries, batch, tokens, (*alone, *splits), estimate=estimate)
