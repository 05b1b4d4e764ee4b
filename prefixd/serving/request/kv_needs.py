"""Measures how much allocated memory of the GPU tier is not needed (Jenga, section 7.3, figure 16)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from prefixd.cache import Trie
from prefixd.cache.index.columns import ColumnMemory
from prefixd.cache.index.trie import GPU, Rows
from prefixd.cache.rules import GroupMask, KvGroup, expired_groups
from prefixd.cache.rules.in_blocks import in_blocks
from prefixd.serving.kv_shape import KvShape
from prefixd.serving.request.request import Request


@dataclass(slots=True)
class Unused:
    """Bytes of the GPU tier.

    Attributes:
        spare: of cached blocks that only shorter prefixes need and that are not held: evicted before anything else.
        unneeded: of the rest, bytes that no layer of the model needs.
    """

    spare: int = 0
    unneeded: int = 0


class KvNeeds:
    """Counts the bytes that the layers of a model need of its cached blocks and of its running requests.

    By the rule of each layer, these bytes are needed: of a running request, those that its next token reads; of a
    cached prompt, those that its ends and branches need (`Trie.expire`). Blocks for known tokens that are not computed
    yet count as needed, as does a block that is filled in part. Blocks beyond the last known token do not, nor does the
    padding of frames.

    If each group has the rule of its layers, the trie knows which bytes have expired. If one rule is for all layers
    (`worker.groups = "one"`), nothing expires in the trie, and a column here marks the filled blocks that would have.

    Counting goes over the trie's columns, a slice at a time, and over the blocks ahead of the running requests.

    Args:
        kv: the model's groups.
        frame_bytes: of a frame.
    """

    def __init__(self, kv: KvShape, frame_bytes: int) -> None:
        self._kv = kv
        self._frame_bytes = frame_bytes
        self._by_rule = all(need.rule == kv.groups[need.group].rule for need in kv.needs)
        self._layers = [KvGroup(in_blocks(need.rule, kv.block_tokens), (), bit) for bit, need in enumerate(kv.needs)]
        self._memory = ColumnMemory()
        self._expired: GroupMask = np.zeros(0, np.uint8)  # by row, a bit for each need
        self.trie: Trie | None = None
        """The trie of the model's blocks; None before the first one."""

    def recorded(self, trie: Trie, path: Rows, ends: Sequence[int]) -> None:
        """Notes that the worker has filled blocks; `path`: all cached blocks of the prompt; `ends` as for
        `Trie.expire`."""
        self.trie = trie
        if self._by_rule or not len(path):
            return
        if trie.rows > len(self._expired):
            self._expired = self._memory.grown("expired", self._expired, 2 * trie.rows)
        self._expired[path] = expired_groups(self._layers, len(path), trie.branches(path, ends))

    def of_cached(self, trie: Trie, rows: slice) -> Unused:
        """The unused bytes of some rows of `trie`, held or not."""
        unused = Unused()
        first = 0
        for number, group in enumerate(self._kv.groups):
            mask = trie.part_mask[first]
            first += len(self._kv.widths(group))
            bit = int(mask).bit_length() - 1
            there = (trie.there[rows, GPU] & mask) != 0
            expired = (trie.expired[rows] & mask) != 0
            spare = there & expired & (trie.holds[rows, GPU, bit] == 0)
            there &= ~spare
            nbytes = group.frames * self._frame_bytes
            unused.spare += nbytes * int(np.count_nonzero(spare))
            present, padding = int(np.count_nonzero(there)), self._padding(number)
            unused.unneeded += padding * present
            for layers, need in zip(self._layers, self._kv.needs, strict=True):
                if need.group == number:
                    unwanted = expired if self._by_rule else self._passed(rows, layers.mask)
                    unused.unneeded += need.nbytes * int(np.count_nonzero(there[: len(unwanted)] & unwanted))
        return unused

    def of_running(self, requests: Iterable[Request]) -> int:
        """Bytes of running requests' own frames that no layer needs: blocks ahead, and the padding of states."""
        kv, unneeded = self._kv, 0
        for request in requests:
            run, own = request.run, request.footprint.own
            known = -(-request.chain.tokens // kv.block_tokens)
            ahead = run.frame_ids(known, run.blocks) if run.slots else []
            frames = sum(run.widths[at % run.slots] for at, frame in enumerate(ahead) if frame in own)
            unneeded += frames * self._frame_bytes
            if run.states is not None:
                unneeded += (1 + run.states.extra_states) * self._padding(-1)
        return unneeded

    def _padding(self, group: int) -> int:
        """Bytes of the frames of a block, or of a state, that its layers do not use."""
        needed = sum(need.nbytes for need in self._kv.needs if need.group == group % len(self._kv.groups))
        return self._kv.groups[group].frames * self._frame_bytes - needed if needed else 0

    def _passed(self, rows: slice, mask: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        passed: np.ndarray[tuple[int], np.dtype[np.bool_]] = (self._expired[rows] & np.uint8(mask)) != 0
        return passed
