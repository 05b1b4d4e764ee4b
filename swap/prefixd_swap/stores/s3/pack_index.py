"""Which object is in which pack: what one host knows about a bucket, in memory."""

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
        objects: how many it was made with.
        expires_s: seconds since 1970; infinity: never.
        deleted: how many of them were deleted here.
        gone: it is not in the bucket any more.
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
    """Names and places. Of more than `most` the least recently used are forgotten; about 400 bytes each."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._places: OrderedDict[bytes, Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, path: str, head: Head) -> None:
        """Enters a pack's objects; what was known about the same names is replaced, unless a newer pack has them."""
        expires_s = (head.created_ms + head.ttl_ms) / 1000 if head.ttl_ms else math.inf
        pack = Pack(path, len(head.names), expires_s)
        for name, offset, nbytes in zip(head.names, head.offsets, head.lengths, strict=True):
            known = self._places.get(name)
            # Paths go by time.
            if known is not None and not known.pack.gone and known.pack.path > path:
                pack.deleted += 1
                continue
            self._places[name] = Place(pack, offset, nbytes)
            self._places.move_to_end(name)
        while len(self._places) > self._most:
            self._places.popitem(last=False)

    def find(self, name: bytes, now_s: float) -> Place | None:
        """Where an object is, unless its pack is gone or has expired; it counts as used."""
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
