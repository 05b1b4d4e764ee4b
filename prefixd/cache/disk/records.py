"""Converts between trie rows and the records of blocks in the disk index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from prefixd.cache.disk.part_coder import NOTHING_CODED, CodedBlocks, larger_errors
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.index.trie_table import NOWHERE
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.rules import GroupMask
from prefixd.cache.tiers import Tiers
from prefixd_swap import BlockRecord, DiskPart, NewBlock, Span
from prefixd_swap.codecs.coded_part import CodedPart
from prefixd_swap.sealing.rest_keys import RestKey
from prefixd_swap.slab.index.block_record import Errors
from prefixd_swap.tiers import MemoryTier

Identity = tuple[bytes, bytes]
"""Namespace id and block key: a block's name on disk."""

_KEY_BYTES = 16


class DiskRecords:
    """Converts trie rows. All but names require a durable tier."""

    def __init__(self, tiers: Tiers, namespaces: NamespaceRegistry) -> None:
        self._tiers = tiers
        self._namespaces = namespaces

    def identity(self, trie: Trie, row: int) -> Identity:
        return self._namespaces.at(int(trie.namespace[row])).id, trie.key(row)

    def key(self, trie: Trie, row: int) -> RestKey | None:
        """The key that encrypts what is written of a block; None: it is written in clear."""
        return self._tiers.require_durable().keys.key_for(self._namespaces.at(int(trie.namespace[row])).spec.tenant)

    def identities(self, trie: Trie, rows: Rows) -> list[Identity]:
        keys = trie.keys(rows).tobytes()
        namespaces = trie.namespace[rows].tolist()
        ids = {ordinal: self._namespaces.at(ordinal).id for ordinal in set(namespaces)}
        return [(ids[ordinal], keys[at * _KEY_BYTES : (at + 1) * _KEY_BYTES]) for at, ordinal in enumerate(namespaces)]

    def rows(self, trie: Trie, identities: Sequence[Identity]) -> Rows:
        """The rows of blocks, -1 for each that the trie does not have."""
        known = {name: self._namespaces.get(name) for name, _ in identities if name in self._namespaces}
        ordinals = np.array([known[name].ordinal if name in known else NOWHERE for name, _ in identities], np.int64)
        rows = trie.find_all(np.maximum(ordinals, 0), b"".join(key for _, key in identities))
        rows[ordinals == NOWHERE] = -1
        return rows

    def stored(self, trie: Trie, rows: Rows) -> Rows:
        """Those of `rows` that have a record in the durable tier."""
        if self._tiers.durable is None:
            return rows[:0]
        recorded: Rows = rows[(trie.any_part[rows] & np.uint8(1 << self._tiers.durable.level)) != 0]
        return recorded

    def expected(self, trie: Trie, rows: Rows) -> list[BlockRecord]:
        """The records that the index must have of blocks on disk."""
        records = []
        on_disk, errors = self._on_disk(trie, rows), self._errors(trie, rows)
        for at, (name, parent, tokens, depth) in enumerate(self._heads(trie, rows)):
            of_parts = errors[at] if any(on_disk[at]) else None
            records.append(BlockRecord(*name, parent, tokens, tuple(on_disk[at]), depth, of_parts))
        return records

    def new_blocks(
        self, trie: Trie, rows: Rows, source: MemoryTier, groups: GroupMask, coded: CodedBlocks = NOTHING_CODED
    ) -> list[NewBlock]:
        """The blocks to store: the bytes of the KV groups in each mask from `source`, or what `coded` has of them;
        other parts as they are on disk."""
        blocks = []
        addresses = source.addresses(trie.slots[rows, source.level]).tolist()
        on_disk, checksums = self._on_disk(trie, rows), trie.checksums[rows].tolist()
        errors = self._errors(trie, rows)
        written = ((groups[:, None] & trie.part_mask) != 0).tolist()
        known = trie.checksummed[rows].tolist()
        of_shared = source is self._tiers.shared  # checksums are of its bytes
        for at, (name, parent, tokens, depth) in enumerate(self._heads(trie, rows)):
            parts: list[Span | CodedPart | DiskPart | None] = [
                Span(address, size, source.on_device) if write else there
                for address, size, there, write in zip(
                    addresses[at], trie.part_bytes, on_disk[at], written[at], strict=True
                )
            ]
            taken = [
                checksum if certain and of_shared else None
                for checksum, certain in zip(checksums[at], known[at], strict=True)
            ]
            most = errors[at]
            for part in range(len(parts)) if coded else ():
                made = coded.get((int(rows[at]), part))
                if made is not None and written[at][part]:
                    parts[part], taken[part] = made.stored, made.checksum
                    most = larger_errors(most, made.errors)
            key = self.key(trie, int(rows[at]))
            blocks.append(
                NewBlock(
                    *(*name, parent, tokens, depth, parts, taken),
                    errors=most,
                    encryption=key,
                    mixed=bool(coded),
                )
            )
        return blocks

    def _on_disk(self, trie: Trie, rows: Rows) -> list[list[DiskPart | None]]:
        """[n, parts]: the parts that are on disk."""
        slots = trie.slots[rows, self._tiers.require_durable().level].tolist()
        checksums, nbytes = trie.stored_checksums(rows).tolist(), trie.stored_bytes(rows).tolist()
        coded = (
            (trie.coded_bytes[rows] > 0).tolist() if trie.has_coded else [[False] * len(trie.part_bytes)] * len(rows)
        )
        return [
            [
                DiskPart(*column) if column[0] != NO_SLOT else None
                for column in zip(slots[at], nbytes[at], checksums[at], coded[at], strict=True)
            ]
            for at in range(len(rows))
        ]

    def _errors(self, trie: Trie, rows: Rows) -> list[Errors | None]:
        """[n]: the errors of what lossy codecs have made of blocks."""
        if not trie.has_coded:
            return [None] * len(rows)
        return [(largest, rms) if largest else None for largest, rms in trie.errors[rows].tolist()]

    def _heads(self, trie: Trie, rows: Rows) -> Iterator[tuple[Identity, bytes, bytes, int]]:
        """Each block's name, its parent's key (b"" where it has none), its tokens, and its depth."""
        parents = trie.parent[rows].astype(np.int64)
        keys = trie.keys(np.maximum(parents, 0)).tobytes()
        tokens, width = trie.tokens[rows].tobytes(), trie.tokens.itemsize * trie.tokens.shape[1]
        columns = zip(self.identities(trie, rows), parents.tolist(), trie.depth[rows].tolist(), strict=True)
        for at, (name, parent, depth) in enumerate(columns):
            key = keys[at * _KEY_BYTES : (at + 1) * _KEY_BYTES] if parent >= 0 else b""
            yield name, key, tokens[at * width : (at + 1) * width], depth
