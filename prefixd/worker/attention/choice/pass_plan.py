"""Which calls compute the attention of a pass: decodes apart from prompts, long prompts alone or with a split prefix.

One call of torch's flash attention for a whole batch keeps a thread block busy with all keys of 128 queries of a head,
so a prompt of 128 tokens behind 32,768 takes as long on 32 of 132 multiprocessors as eight of them on all. Two ways are
faster there: a call for this sequence alone, in which the kernel splits its keys, and its prefix as several sequences
(`split_prefix`). Which one is faster, and from which length on, is measured (`cost_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
    split: by segment, the pieces that the keys before it are split into; all pieces are in one call.
    """

    together: tuple[int, ...] = ()
    decodes: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    split: dict[int, int] = field(default_factory=dict)

    @property
    def one_call(self) -> bool:
        """Whether a single call computes all of it."""
        return not self.alone and not self.split and not (self.together and self.decodes)


Plan = Callable[[Sequence[int], Sequence[int]], PassPlan]
"""Plans a pass by the queries of each segment, and the keys that the last of them sees."""


def plain(queries: Sequence[int], keys: Sequence[int]) -> PassPlan:
    """One call for everything."""
    del keys
    return PassPlan(together=tuple(range(len(queries))))


def split_long(queries: Sequence[int], keys: Sequence[int]) -> PassPlan:
    """Decodes apart; every long prefix split, whether that is faster or not."""
    prompts = [segment for segment, count in enumerate(queries) if count > 1]
    long = [segment for segment in prompts if keys[segment] - queries[segment] >= _LEAST_PREFIX]
    pieces = {segment: _USUAL_PIECES for segment in long if may_split(queries[segment], keys[segment], _USUAL_PIECES)}
    return PassPlan(
        together=tuple(segment for segment in prompts if segment not in pieces),
        decodes=tuple(segment for segment, count in enumerate(queries) if count == 1),
        split=pieces,
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

    def __call__(self, queries: Sequence[int], keys: Sequence[int]) -> PassPlan:
        """Decodes are planned as one batch; prompts in batches of prompts of about one length, the longest first."""
        decodes = [segment for segment, count in enumerate(queries) if count == 1]
        prompts = [segment for segment, count in enumerate(queries) if count > 1]
        prompts.sort(key=keys.__getitem__, reverse=True)
        alone: list[int] = []
        pieces: dict[int, int] = {}
        if decodes:
            way = self._cheapest(1, len(decodes), max(keys[segment] for segment in decodes) - 1)
            if way != TOGETHER:
                _assign(way, decodes, alone, pieces)
                decodes = []
        while prompts:
            first = prompts[0]
            work = sum(queries[segment] * keys[segment] for segment in prompts)
            batch = max(1, round(work / (queries[first] * keys[first])))
            way = self._cheapest(queries[first], batch, keys[first] - queries[first])
            if way == TOGETHER:
                break
            alike = [segment for segment in prompts if 2 * keys[segment] > keys[first]]
            _assign(way, alike, alone, pieces)
            prompts = prompts[len(alike) :]
        for segment, count in list(pieces.items()):
            if not may_split(queries[segment], keys[segment], count):
                del pieces[segment]
                (prompts if queries[segment] > 1 else decodes).append(segment)
        return PassPlan(tuple(sorted(prompts)), tuple(decodes), tuple(sorted(alone)), pieces)

    def _cheapest(self, queries: int, batch: int, tokens: int) -> str:
        splits = [split(count) for count in self._splits if may_split(queries, tokens + queries, count)]
        return self._costs.cheapest(queries, batch, max(tokens, 1), (*self._alone, *splits))


def _assign(way: str, segments: Sequence[int], alone: list[int], pieces: dict[int, int]) -> None:
    if way == ALONE:
        alone += segments
    else:
        pieces.update(dict.fromkeys(segments, pieces_of(way)))
