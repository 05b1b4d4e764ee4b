"""Damage to objects in a store: the ways in which their bytes go wrong."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.checks.damaged_store.stored_objects import BlockId, StoredObject
from benchmarks.storage.damage import changed
from prefixd_swap.stores.sealed import HEAD_BYTES

_VERSION_AT = 8

KINDS = {
    "bit": 0.3,  # one bit anywhere
    "head": 0.1,  # one bit of the head
    "bytes": 0.1,  # four bytes next to each other
    "zeros": 0.1,  # a range that reads as zeros
    "truncated": 0.1,
    "longer": 0.05,
    "version": 0.05,  # as another version of prefixd would have written it
    "stale": 0.1,  # what another block has
    "swap": 0.1,  # two blocks, each in the other's place: two flips
}


@dataclass(frozen=True, slots=True)
class Flip:
    """One way of going wrong, the blocks that it hits, each of which counts, and the objects to write for it."""

    kind: str
    blocks: tuple[BlockId, ...]
    writes: tuple[tuple[bytes, bytes], ...]


class StoredPaths:
    """All blocks of a store, and which of them continue which."""

    def __init__(self, objects: Mapping[BlockId, Sequence[StoredObject]]) -> None:
        self.objects = objects
        self._children: defaultdict[BlockId, set[BlockId]] = defaultdict(set)
        self._above: dict[BlockId, list[BlockId]] = {}
        for namespace_id, tokens in objects:
            above = [block for block in objects if block[0] == namespace_id and tokens.startswith(block[1])]
            self._above[namespace_id, tokens] = above
            for block in above:
                self._children[block].add((namespace_id, tokens))

    def relatives(self, block: BlockId) -> set[BlockId]:
        """The block, what it continues and what continues it: of them no other one can be seen to be hit."""
        return {*self._above[block], *self._children[block]}


def draw(stored: StoredPaths, wanted: int, rng: random.Random) -> list[Flip]:
    """Flips that hit `wanted` blocks, or fewer when there are not enough, none of which continues another."""
    flips: list[Flip] = []
    free = sorted(stored.objects)
    rng.shuffle(free)
    barred: set[BlockId] = set()
    hit = 0

    def next_block(like: StoredObject | None = None) -> StoredObject | None:
        for at, block in enumerate(free):
            if block in barred:
                continue
            found = rng.choice(stored.objects[block])
            if like is not None and (block[0] != like.block[0] or len(found.data) != len(like.data)):
                continue
            del free[at]
            barred.update(stored.relatives(block))
            return found
        return None

    while hit < wanted and (target := next_block()) is not None:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "swap":
            other = next_block(target) if hit + 2 <= wanted else None
            if other is not None:
                flips.append(
                    Flip(kind, (target.block, other.block), ((target.name, other.data), (other.name, target.data)))
                )
                hit += 2
                continue
            kind = "bit"
        flips.append(Flip(kind, (target.block,), ((target.name, _damaged(kind, target, stored, rng)),)))
        hit += 1
    return flips


def _damaged(kind: str, target: StoredObject, stored: StoredPaths, rng: random.Random) -> bytes:
    if kind == "version":
        return target.data[:_VERSION_AT] + bytes([target.data[_VERSION_AT] ^ 3]) + target.data[_VERSION_AT + 1 :]

    def other() -> bytes:
        others = [each.data for block, parts in stored.objects.items() if block != target.block for each in parts]
        alike = [data for data in others if len(data) == len(target.data)]
        return rng.choice(alike or others)  # coded objects have lengths of their own

    return changed(kind, target.data, rng, other, HEAD_BYTES)
