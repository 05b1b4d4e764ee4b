"""Counts blocks that codecs have made smaller, and finds how far they are from the exact ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from prefixd.cache import TieredCache
from prefixd.cache.index.trie import DISK, NO_SLOT, Trie
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.observability.histogram import MOST_SERIES, OTHERS
from prefixd.v1 import admin_pb2 as pb

Who = tuple[str, str]
"""A tenant and a model."""


@dataclass(slots=True)
class Altered:
    """Blocks of which the disk or memory has a lossy codec's bytes.

    Attributes:
        blocks: how many.
        largest, rms: the worst block's errors, relative as in `LayerErrors`.
    """

    blocks: int = 0
    largest: float = 0.0
    rms: float = 0.0

    def add(self, blocks: int, largest: float, rms: float) -> None:
        """Adds more blocks."""
        self.blocks += blocks
        self.largest, self.rms = max(self.largest, largest), max(self.rms, rms)


@dataclass(slots=True)
class CodedCounts:
    """Counts of blocks, from the columns of all tries.

    Attributes:
        coded: blocks on disk with a part that is not stored as it is in memory, and is exact.
        altered: blocks on disk with bytes that a lossy codec has altered.
        by_namespace: what lossy codecs have altered, on disk or in memory, by the ordinal of its namespace.
    """

    coded: int = 0
    altered: int = 0
    by_namespace: dict[int, Altered] = field(default_factory=dict)

    def add(self, trie: Trie, rows: slice) -> None:
        """Counts some rows of a trie."""
        if not trie.has_coded:
            return
        lossy = trie.errors[rows, 0] > 0
        on_disk = (trie.slots[rows, DISK] != NO_SLOT).any(axis=1)
        self.altered += int(np.count_nonzero(on_disk & lossy))
        self.coded += int(np.count_nonzero(on_disk & ~lossy & trie.coded_bytes[rows].any(axis=1)))
        if not lossy.any():
            return
        errors, namespaces = trie.errors[rows][lossy], trie.namespace[rows][lossy]
        for ordinal in np.unique(namespaces).tolist():
            mine = errors[namespaces == ordinal]
            largest, rms = mine.max(axis=0).tolist()
            self.by_namespace.setdefault(ordinal, Altered()).add(len(mine), largest, rms)

    def by_who(self, namespaces: NamespaceRegistry, models: Mapping[str, str]) -> dict[Who, Altered]:
        """What lossy codecs have altered, by tenant and model; those with most blocks first, at most `MOST_SERIES` and
        the others together.

        Args:
            namespaces: those that there are.
            models: by the name of a worker's namespace, the model's name.
        """
        found: dict[Who, Altered] = {}
        for ordinal, each in self.by_namespace.items():
            if (namespace := namespaces.find_at(ordinal)) is None:
                continue  # it was forgotten meanwhile
            name = namespace.spec.of_prompts
            who = namespace.spec.tenant, models.get(name, name) if namespace.spec.worker else name
            found.setdefault(who, Altered()).add(each.blocks, each.largest, each.rms)
        ordered = sorted(found.items(), key=lambda each: -each[1].blocks)
        shown = dict(ordered[:MOST_SERIES])
        for _, each in ordered[MOST_SERIES:]:
            shown.setdefault((OTHERS, OTHERS), Altered()).add(each.blocks, each.largest, each.rms)
        return shown


def stored_stats(
    cache: TieredCache, disk_blocks: int, counts: CodedCounts, models: Mapping[str, str]
) -> pb.StoredStats | None:
    """How the disk tier stores blocks; None without a disk tier.

    Args:
        cache: the cache.
        disk_blocks: blocks on disk.
        counts: of the same blocks.
        models: as for `CodedCounts.by_who`.
    """
    if cache.tiers.durable is None:
        return None
    disk, coder, total = cache.mover.disk, cache.mover.coder, cache.mover.use.stored.total
    found = pb.StoredStats(
        codec=coder.tier_codec,
        stored_bytes=total.stored,
        exact_bytes=total.exact,
        blocks={
            "raw": max(disk_blocks - counts.coded - counts.altered, 0),
            "coded": counts.coded,
            "altered": counts.altered,
        },
        saved_bytes=max(disk.writes.saved_bytes, 0),
        refused_parts=dict(coder.refused),
        encoded_bytes=coder.taken_bytes,
        encode_s=coder.busy_s,
        decoded_bytes=disk.reads.decoded_bytes,
        decode_s=disk.reads.decode_s,
        dropped_altered_blocks=disk.dropped_altered,
    )
    for (tenant, model), each in counts.by_who(cache.namespaces, models).items():
        labels = {"tenant": tenant, "model": model}
        found.altered_blocks.add(labels=labels, count=each.blocks)
        found.largest_error.add(labels=labels, value=each.largest)
        found.rms_error.add(labels=labels, value=each.rms)
    return found
