"""How each part of a namespace's blocks is coded in a tier."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from functools import lru_cache

from prefixd.base.codec_names import LOSSY, CodecName
from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache.coding.codec_choice import codec_of
from prefixd.cache.namespaces import Namespace, NamespaceRegistry, PartSpec
from prefixd_swap.codecs.coding import Coding
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.errors import CodecShortageError

Codings = tuple[Coding | None, ...]
"""Of each part; None: it is stored raw."""

log = logging.getLogger(__name__)

_LOSSLESS: CodecName = "lossless"
_LARGEST_BYTES = 1 << 32  # the trie counts stored bytes of a part in 32 bits


@dataclass(frozen=True, slots=True)
class TierCodec:
    """How a tier stores blocks.

    Attributes:
        name: the codec of blocks for which neither their namespace nor their tenant names one.
        most_error: the largest relative RMS error of a layer that a lossy codec may make; None: the codec's own bound.
        threads: that code what is written.
    """

    name: CodecName = "exact"
    most_error: float | None = None
    threads: int = 2


EXACT = TierCodec()


def coding_threads(io_threads: int) -> int:
    """How many threads code for a disk with `io_threads`: as many, but no more than there are CPUs."""
    return min(io_threads, len(os.sched_getaffinity(0)))


class NamespaceCodings:
    """The codings of one tier.

    Args:
        namespaces: all namespaces.
        tenants: have their codecs.
        tier: the tier's own codec.
    """

    def __init__(self, namespaces: NamespaceRegistry, tenants: Tenants, tier: TierCodec) -> None:
        self._namespaces = namespaces
        self._tenants = tenants
        self.tier = tier
        self._codings = lru_cache(maxsize=1024)(_codings)
        self._warned = False  # that a codec cannot be loaded now

    def codings(self, ordinal: int) -> Codings:
        """How the parts of the namespace with this ordinal are coded from now on; raw while the codec cannot be
        loaded."""
        spec = self._namespaces.at(ordinal).spec
        return self._loaded(spec.parts, codec_of(spec, self._tenants, self.tier.name), self.tier.most_error)

    def most_error(self, namespace: Namespace) -> float:
        """The largest RMS error that blocks of a namespace may have; 0: they are exact; infinite: as large as a codec
        makes it."""
        if codec_of(namespace.spec, self._tenants, self.tier.name) not in LOSSY:
            return 0.0
        return math.inf if self.tier.most_error is None else self.tier.most_error

    def without_loss(self, ordinal: int, part: int) -> Coding | None:
        """How a part of a namespace is coded of which memory has bytes from a lossy copy."""
        return self._loaded(self._namespaces.at(ordinal).spec.parts, _LOSSLESS, None)[part]

    def _loaded(self, parts: tuple[PartSpec, ...], name: CodecName, most_error: float | None) -> Codings:
        try:
            return self._codings(parts, name, most_error)
        except CodecShortageError as error:
            if not self._warned:
                log.warning("blocks are stored as they are for now: %s", error)
            self._warned = True
            return (None,) * len(parts)


def _codings(parts: tuple[PartSpec, ...], name: CodecName, most_error: float | None) -> Codings:
    if name == "exact":
        return (None,) * len(parts)
    return tuple(_coding(part, name, most_error) for part in parts)


def _coding(part: PartSpec, name: CodecName, most_error: float | None) -> Coding | None:
    """Where nothing is known of a part's numbers, only a lossless codec takes it."""
    if part.nbytes < _LARGEST_BYTES:
        for each in (name, _LOSSLESS):
            codec = find_codec(each)
            if codec.takes(part.nbytes, part.shape):
                return Coding(codec, part.shape, most_error)
    return None
