"""Lists the parts of a lease or of a reservation, and copies them from or to the engine's blocks."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from prefixd.client import AsyncLease, AsyncReservation
from prefixd.integrations.engine.copying.group_pages import NO_BLOCK, GroupPages
from prefixd.integrations.engine.geometry import Geometry
from prefixd_swap import CopyEngine, PackedPages, PageCopies, StreamMark
from prefixd_swap.codecs.codec import Refused

if TYPE_CHECKING:
    from prefixd_swap.codecs.on_device.object_copies import ObjectCopies

_PIECES = 4096  # copied at a time: listing more of them would hold up the link's thread

Ids = npt.NDArray[np.int64]
Arrived = Callable[[int, StreamMark | None], None]


class Direction(enum.Enum):
    """The direction of a copy."""

    LOAD = "to the engine"
    SAVE = "to the arena"


@dataclass(frozen=True, slots=True)
class PartAt:
    """One part of one prefixd block, in the arena and in the engine."""

    group: int
    """Index in `Geometry.groups`."""
    address: int
    """Of its first byte in the arena."""
    ids: Sequence[int]
    """The engine's block ids of the part, in order."""


class _Places(NamedTuple):
    """Parts of a group. ids: [parts, blocks a part]. addresses: [parts], of their first bytes in the arena."""

    ids: Ids
    addresses: Ids


class WindowMismatch(Exception):
    """The engine and the daemon disagree on the blocks that a group's window needs."""


class PartRefused(Exception):
    """A part cannot be saved as an int8 object."""

    def __init__(self, place: int, why: Refused) -> None:
        super().__init__(f"part {place}: {why.value}")
        self.place = place
        """Of the first such part, in the list of parts; those before it are copied."""
        self.why = why


class PartCopies:
    """Copies of one rank.

    Args:
        geometry: how prefixd blocks are made of the engine's.
        pages: the rank's memory, one entry per group of `geometry`.
        engine: copies page by page; `close` closes it.
        page_copies: copies in batches instead, for pages on a device; `close` closes them.
        object_copies: makes int8 objects of pages instead, where the groups of `geometry` say so; `close` closes them.
    """

    def __init__(
        self,
        geometry: Geometry,
        pages: Sequence[GroupPages],
        engine: CopyEngine,
        page_copies: PageCopies | None,
        object_copies: ObjectCopies | None = None,
    ) -> None:
        self._geometry = geometry
        self._pages = pages
        self._engine = engine
        self._page_copies = page_copies
        self._object_copies = object_copies
        self._pieces_a_block = sum(
            sum(map(len, group_pages.layers)) * (geometry.block_tokens // group.block_tokens)
            for group, group_pages in zip(geometry.groups, pages, strict=True)
        )

    def batches(self, blocks: int) -> Iterator[range]:
        """Splits blocks into ranges that are copied at a time, of about `_PIECES` pieces each."""
        step = max(1, _PIECES // max(1, self._pieces_a_block))
        return (range(first, min(first + step, blocks)) for first in range(0, blocks, step))

    def parts_at(
        self,
        hold: AsyncLease | AsyncReservation,
        base: int,
        block: int,
        groups: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        place: int,
    ) -> list[PartAt]:
        """The parts of block `block` of `hold`, which is block `place` of the job, with their places on both sides.

        Args:
            hold: the lease or reservation; a reservation has all parts asked for.
            base: the address of the arena.
            block: of `hold`.
            groups: indexes in `Geometry.groups` of the parts, in the order of `hold`.
            block_ids: the engine's blocks of the job, by group of `groups`.
            place: of the block in the job.

        Raises:
            WindowMismatch: a lease lacks bytes that the engine needs.
        """
        hold.check()
        parts: list[PartAt] = []
        for part, index in enumerate(groups):
            group = self._geometry.groups[index]
            count = self._geometry.block_tokens // group.block_tokens
            ids = block_ids[part][place * count : (place + 1) * count]
            if hold.has(block, part):
                parts.append(PartAt(index, base + hold.offset(block, part), ids))
            elif any(each != NO_BLOCK for each in ids):
                raise WindowMismatch(
                    f"the engine needs bytes of KV group {group.index} in block {hold.first_block + block}, where the "
                    f"rule that prefixd was told of, {group.rule}, needs none; the request is computed"
                )
        return parts

    async def copy(self, parts: Sequence[PartAt], layers: range | None, direction: Direction) -> int:
        """Copies `layers` (None: all; objects have no others) of `parts`; returns the copied bytes.

        Raises:
            PartRefused: some part cannot be saved as an object.
            EncodingError: an object that was to be loaded is damaged.
        """
        if self._object_copies is not None:
            return await self._copy_objects(self._object_copies, parts, direction)
        if self._page_copies is None:
            pairs = [pair for part in parts for pair in self._pages[part.group].pairs(part.address, part.ids, layers)]
            load = direction is Direction.LOAD
            await self._engine.copy(pairs if load else [(theirs, ours) for ours, theirs in pairs])
            return sum(ours.nbytes for ours, _ in pairs)
        move = self._page_copies.scatter if direction is Direction.LOAD else self._page_copies.gather
        nbytes = 0
        for group in range(len(self._pages)):
            if (packed := self._packed(parts, group, layers)) is not None:
                await move(packed)
                nbytes += packed.nbytes
        return nbytes

    async def load_in_turn(self, parts: Sequence[PartAt], arrived: Arrived, check: Callable[[], None]) -> int:
        """Loads the parts of a model with one group layer by layer; returns the copied bytes.

        Args:
            parts: in the order of the prefix.
            arrived: called with each layer in turn, once its bytes are there; with page copies in a thread, once they
                are there for what runs behind the mark.
            check: raises if the parts may not be read any more; called before each layer, with page copies before the
                first.
        """
        ranges = [range(layer, layer + 1) for layer in range(len(self._pages[0].layers))]
        nbytes = 0
        if self._page_copies is None:
            step = max(1, _PIECES * len(ranges) // max(1, self._pieces_a_block))
            for layers in ranges:
                check()
                for first in range(0, len(parts), step):
                    nbytes += await self.copy(parts[first : first + step], layers, Direction.LOAD)
                arrived(layers.start, None)
            return nbytes
        check()
        places = self._places(parts, 0)
        packed = [] if places is None else [self._of_layers(places, 0, layers) for layers in ranges]
        await self._page_copies.scatter_in_turn(packed, arrived)
        return sum(each.nbytes for each in packed)

    def close(self) -> None:
        """Waits for the copies under way."""
        self._engine.close()
        if self._object_copies is not None:
            self._object_copies.close()
        if self._page_copies is not None:
            self._page_copies.close()

    async def _copy_objects(self, copies: ObjectCopies, parts: Sequence[PartAt], direction: Direction) -> int:
        nbytes = 0
        refused: list[tuple[int, Refused]] = []
        for group, of_group in enumerate(self._geometry.groups):
            if (places := self._places(parts, group)) is None:
                continue
            if direction is Direction.LOAD:
                await copies.scatter(group, places.ids, places.addresses)
            else:
                own = [place for place, part in enumerate(parts) if part.group == group]
                answers = await copies.gather(group, places.ids, places.addresses)
                refused += [(place, why) for place, why in zip(own, answers, strict=True) if why is not None]
            nbytes += len(places.ids) * of_group.part_bytes
        if refused:
            raise PartRefused(*min(refused, key=lambda each: each[0]))
        return nbytes

    def _packed(self, parts: Sequence[PartAt], group: int, layers: range | None) -> PackedPages | None:
        """The parts of a group for `PageCopies`; None where the engine wants none of its blocks."""
        places = self._places(parts, group)
        return None if places is None else self._of_layers(places, group, layers)

    def _places(self, parts: Sequence[PartAt], group: int) -> _Places | None:
        """Where the parts of a group lie; None where the engine wants none of its blocks."""
        here = [part for part in parts if part.group == group and any(each != NO_BLOCK for each in part.ids)]
        if not here:
            return None
        return _Places(
            np.array([part.ids for part in here], np.int64), np.array([part.address for part in here], np.int64)
        )

    def _of_layers(self, places: _Places, group: int, layers: range | None) -> PackedPages:
        before, runs = self._pages[group].packed(layers)
        return PackedPages(runs, places.ids, places.addresses + before * places.ids.shape[1])
