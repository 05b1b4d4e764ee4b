"""Damage to blocks on disk: where each one lies, and the ways in which its bytes go wrong."""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.storage.damage import changed
from prefixd_swap import SlabStore
from prefixd_swap.sealing.rest_keys import RestKeys
from prefixd_swap.slab.files.slab_file import INDEX_BITS
from prefixd_swap.slots import PAGE_BYTES

KINDS = {
    "bit": 0.3,  # one bit
    "bytes": 0.15,  # four bytes next to each other
    "sector": 0.15,  # 512 bytes, as a disk loses them
    "zeros": 0.15,  # a range that reads as zeros
    "stale": 0.1,  # what another block has: a write that went to the wrong place, or never arrived
    "swap": 0.1,  # two blocks, each in the other's place: two flips
    "tail": 0.05,  # the file ends inside the block
}


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a block: a slot's first `nbytes` bytes."""

    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A block on disk."""

    key: str
    parent: str
    """Empty for the first block of a prompt."""
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes that a file gets, or None for a file that ends there."""

    file: Path
    offset: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Flip:
    """One way of going wrong and the blocks that it hits, each of which counts."""

    kind: str
    blocks: tuple[Stored, ...]
    writes: tuple[Write, ...]

    def apply(self) -> None:
        """Changes the files, for every reader from now on."""
        for write in self.writes:
            fd = os.open(write.file, os.O_RDWR)
            try:
                if write.data is None:
                    os.ftruncate(fd, write.offset)
                else:
                    os.pwrite(fd, write.data, write.offset)
                os.fsync(fd)
            finally:
                os.close(fd)


class StoredBlocks:
    """All blocks of a disk tier that no daemon has open; `keys` decrypt them."""

    def __init__(self, path: Path, capacity_bytes: int, keys: RestKeys | None = None) -> None:
        store = SlabStore.open(path, capacity_bytes, keys=keys)
        files = {int(file.stem, 16): file for file in (path / "slabs").iterdir()}
        self.blocks: dict[str, Stored] = {}
        for record in store.records():
            places = [
                Place(files[part.slot >> INDEX_BITS], (part.slot & (1 << INDEX_BITS) - 1) * PAGE_BYTES, part.nbytes)
                for part in record.parts
                if part is not None
            ]
            # Keys are unique over all namespaces but for chance: each seeds them with its own number.
            self.blocks[record.key.hex()] = Stored(record.key.hex(), record.parent.hex(), tuple(places))
        store.close()
        self._children: defaultdict[str, list[str]] = defaultdict(list)
        for block in self.blocks.values():
            self._children[block.parent].append(block.key)

    def relatives(self, block: Stored) -> Iterator[str]:
        """The block, what it continues and what continues it: what may not be hit, too, if it is to be found itself."""
        above = block
        while above.parent:
            above = self.blocks[above.parent]
            yield above.key
        below = [block.key]
        for key in below:
            yield key
            below += self._children[key]

    def ends(self) -> dict[str, Place]:
        """Blocks behind which a file has no other, by key, and where they lie in it."""
        last: dict[Path, tuple[int, str, Place]] = {}
        for block in self.blocks.values():
            for place in block.places:
                if place.offset >= last.get(place.file, (-1,))[0]:
                    last[place.file] = place.offset, block.key, place
        return {key: place for _, key, place in last.values()}


def draw(stored: StoredBlocks, wanted: int, rng: random.Random) -> list[Flip]:
    """Flips that hit `wanted` blocks, or fewer when there are not enough, none of which continues another.

    Each of them changes a byte of every block that it hits.
    """
    taken: set[str] = set()
    free = list(stored.blocks.values())
    rng.shuffle(free)
    ends = stored.ends()
    last = [stored.blocks[key] for key in ends]
    rng.shuffle(last)
    flips: list[Flip] = []
    left = wanted

    def next_of(blocks: list[Stored], size: int = 0) -> Stored | None:
        """One that is no relative of those taken; with a first part of `size` bytes, if that is not 0."""
        for at in range(len(blocks) - 1, -1, -1):
            block = blocks[at]
            if block.key in taken:
                del blocks[at]
            elif not size or block.places[0].nbytes == size:
                del blocks[at]
                taken.update(stored.relatives(block))
                return block
        return None

    while left:
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        if kind == "swap" and left < 2:
            continue
        block = next_of(last if kind == "tail" else free)
        if block is None:
            if kind == "tail":
                continue
            break
        hit = [block]
        if kind == "swap":
            other = next_of(free, block.places[0].nbytes)
            if other is None:
                kind = "bit"
            else:
                hit.append(other)
        writes = _cut(ends[block.key], rng) if kind == "tail" else _writes(kind, hit, stored, rng)
        flips.append(Flip(kind, tuple(hit), tuple(writes)))
        left -= len(hit)
    return flips


def _cut(place: Place, rng: random.Random) -> Iterator[Write]:
    yield Write(place.file, place.offset + rng.randrange(place.nbytes), None)


def _writes(kind: str, hit: Sequence[Stored], stored: StoredBlocks, rng: random.Random) -> Iterator[Write]:
    if kind == "swap":
        first, second = (block.places[0] for block in hit)
        a, b = _read(first), _read(second)
        yield Write(first.file, first.offset, b)
        yield Write(second.file, second.offset, a)
        return
    place = rng.choice(hit[0].places)

    def other() -> bytes:
        same = [other for other in _places(stored.blocks.values()) if other.nbytes == place.nbytes and other != place]
        return _read(rng.choice(same))

    yield Write(place.file, place.offset, changed(kind, _read(place), rng, other))


def _places(blocks: Iterable[Stored]) -> Iterator[Place]:
    for block in blocks:
        yield from block.places


def _read(place: Place) -> bytes:
    with place.file.open("rb") as file:
        file.seek(place.offset)
        return file.read(place.nbytes)
