"""What a trie knows of copies that codecs have made: on disk in fewer bytes, in memory decoded from such a copy.

A part is *raw* on disk unless it has `coded_bytes`. The trie's `checksums` are those of a part's bytes in memory, and
of its bytes on disk if they are raw; a coded part has its own in `coded_checksums`.

A block is never made smaller twice with loss: while the bytes of a KV group in memory come from a lossy copy, the group
is `decoded`, and whoever writes it again writes exactly these bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.keys.key_index import Rows
from prefixd.cache.index.priorities import PriorityColumns
from prefixd.cache.index.trie_table import DISK, NO_SLOT
from prefixd.cache.rules import GroupMask, GroupRule
from prefixd_swap.slots import round_to_slot, round_to_slots

UInt64s = npt.NDArray[np.uint64]
UInt32s = npt.NDArray[np.uint32]
Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LossyCopies:
    """What is known of lossy copies that were read, until their bytes are entered: of each block the KV groups, [m]
    masks, and the errors, [m, 2]."""

    decoded: GroupMask
    errors: Float32s

    @classmethod
    def none(cls, blocks: int) -> LossyCopies:
        """Of blocks that were not read yet."""
        return cls(np.zeros(blocks, np.uint8), np.zeros((blocks, 2), np.float32))

    def note(self, trie: CodedColumns, rows: Rows, at: Rows) -> None:
        """Notes what `trie` has just recorded of `rows[at]`."""
        if trie.has_coded:
            self.decoded[at] = trie.decoded[rows[at]]
            self.errors[at] = trie.errors[rows[at]]

    def restore(self, trie: CodedColumns, rows: Rows, which: Bools) -> None:
        """Records it again of those of `rows` that are to be entered now."""
        lossy = which & (self.decoded != 0)
        if lossy.any():
            trie.set_decoded(rows[lossy], self.decoded[lossy])
            trie.set_errors(rows[lossy], self.errors[lossy])


class CodedColumns(PriorityColumns):
    """Coded copies. Arguments as for `BlockTable`."""

    def __init__(self, block_tokens: int, part_bytes: Sequence[int], rules: Sequence[GroupRule] | None = None) -> None:
        super().__init__(block_tokens, part_bytes, rules)
        self.has_coded = False
        """Whether any block may have, or have had, a coded copy. If not, the columns were never written."""

    def set_coded(self, rows: Rows, nbytes: UInt32s, checksums: UInt64s) -> None:
        """Records stored bytes, [m, parts], and checksums of coded parts of m blocks on disk; 0 bytes for others."""
        if self.has_coded or nbytes.any():
            self.has_coded = True
            coded = nbytes > 0
            self.coded_bytes[rows] = np.where(coded, nbytes, self.coded_bytes[rows])
            self.coded_checksums[rows] = np.where(coded, checksums, self.coded_checksums[rows])

    def set_errors(self, rows: Rows, errors: Float32s) -> None:
        """Records the largest and the RMS error, [m, 2], of m blocks, where they are larger than what is known."""
        self.has_coded = True
        self.errors[rows] = np.maximum(self.errors[rows], errors)

    def set_decoded(self, rows: Rows, groups: GroupMask) -> None:
        """Records the KV groups, [m] masks, of which memory has bytes from a lossy copy."""
        if groups.any():
            self.has_coded = True
            self.decoded[rows] |= groups

    def count_decoded(self, rows: Rows, wanted: GroupMask | None = None) -> int:
        """How many of `rows` have, of their `wanted` groups (all by default), bytes in memory from a lossy copy."""
        if not self.has_coded:
            return 0
        decoded = self.decoded[rows] if wanted is None else self.decoded[rows] & wanted
        return int(np.count_nonzero(decoded))

    def stored_checksums(self, rows: Rows) -> UInt64s:
        """[m, parts]: checksums of what is stored on disk, raw or coded."""
        if not self.has_coded:
            raw: UInt64s = self.checksums[rows]
            return raw
        return np.where(self.coded_bytes[rows] > 0, self.coded_checksums[rows], self.checksums[rows])

    def stored_bytes(self, rows: Rows) -> npt.NDArray[np.int64]:
        """[m, parts]: bytes of what is stored on disk of parts that are there."""
        raw = np.broadcast_to(np.array(self.part_bytes, np.int64), (len(rows), len(self.part_bytes)))
        if not self.has_coded:
            return raw
        coded = self.coded_bytes[rows].astype(np.int64)
        return np.where(coded > 0, coded, raw)

    def compression(self, rows: Rows, tier: int) -> npt.NDArray[np.float64] | float:
        """As in `prefixd_swap.eviction.BlockTable`."""
        if not self.has_coded or tier != DISK:
            return 1.0
        times: npt.NDArray[np.float64] = self.block_bytes / self.stored_bytes(rows).sum(axis=1)
        return times

    def stored_slots_bytes(self, rows: Rows) -> npt.NDArray[np.int64]:
        """[m, parts]: bytes of the slots on disk of parts that are there."""
        raw = np.array([round_to_slot(nbytes) for nbytes in self.part_bytes], np.int64)
        if not self.has_coded:
            return np.broadcast_to(raw, (len(rows), len(raw)))
        coded = self.coded_bytes[rows]
        return np.where(coded > 0, round_to_slots(coded), raw)

    def _forget_coded(self, rows: Rows, gone: Bools) -> None:
        """Forgets parts, [m, parts], that have left the disk."""
        if self.has_coded:
            self.coded_bytes[rows] = np.where(gone, 0, self.coded_bytes[rows])
            self._settle_errors(rows)

    def _forget_decoded(self, rows: Rows, memory: Sequence[int]) -> None:
        """Forgets where the bytes in memory came from once no tier of `memory` has any of a block's parts."""
        if self.has_coded:
            nowhere = (self.slots[rows][:, list(memory)] == NO_SLOT).all(axis=(1, 2))
            self.decoded[rows[nowhere]] = 0
            self._settle_errors(rows)

    def _settle_errors(self, rows: Rows) -> None:
        """Forgets the errors of blocks of which neither the disk nor memory has bytes of a lossy copy."""
        here = (self.decoded[rows] != 0) | (self.slots[rows, DISK] != NO_SLOT).any(axis=1)
        self.errors[rows[~here]] = 0.0
