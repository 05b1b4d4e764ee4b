"""The packs of a bucket's objects, as far as this host knows them; in memory."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from prefixd_swap.stores.s3.packs import Head


@dataclass(slots=True, eq=False)
class Pack:
    """A pack that some entries point to.

    Args:
        path: its name in the bucket.
        objects: number of objects in it when it was made.
        expires_s: seconds since 1970; infinity: never.
        deleted: number of its objects that this host has deleted.
        gone: whether it is not in the bucket any more.
    """

    path: str
    objects: int
    expires_s: float
    deleted: int = 0
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object is: bytes `offset` to `offset + nbytes` of a pack."""

    pack: Pack
    offset: int
    nbytes: int


class PackIndex:
    """Places of objects by name; about 400 bytes each. Above `most`, the least recently used are forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: OrderedDict[bytes, Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, path: str, head: Head) -> None:
        """Enters a pack's objects. A name that is known already moves to this pack, unless a newer pack has it."""
        expires_s = (head.created_ms + head.ttl_ms) / 1000 if head.ttl_ms else math.inf
        pack = Pack(path, len(head.names), expires_s)
        for name, offset, nbytes in zip(head.names, head.offsets, head.lengths, strict=True):
            known = self._places.get(name)
            # Paths sort by time.
            if known is not None and not known.pack.gone and known.pack.path > path:
                pack.deleted += 1
                continue
            self._places[name] = Place(pack, offset, nbytes)
            self._places.move_to_end(name)
        while len(self._places) > self._most:
            self._places.popitem(last=False)

    def find(self, name: bytes, now_s: float) -> Place | None:
        """The place of an object, unless its pack is gone or has expired; counts as a use."""
        place = self._places.get(name)
        if place is None:
            return None
        if place.pack.gone or place.pack.expires_s <= now_s:
            del self._places[name]
            return None
        self._places.move_to_end(name)
        return place

    def delete(self, name: bytes) -> Pack | None:
        """Forgets an object. Returns its pack when all of the pack's objects have been deleted."""
        place = self._places.pop(name, None)
        if place is None:
            return None
        place.pack.deleted += 1
        return place.pack if place.pack.deleted == place.pack.objects else None
