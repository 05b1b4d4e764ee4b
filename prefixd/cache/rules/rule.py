"""The interface of a rule: the three questions of Jenga (section 5) about the blocks of one prompt.

A rule does not depend on a model. It counts in blocks; a block of `t` tokens is the unit in which bytes are stored, so
a prefix of `n` blocks continues with the token at position `n * t`, and that token decides which blocks are needed.

| Jenga, figure 9 | here | it answers |
|---|---|---|
| `get_possible_prefix(is_hit)` | `possible_prefixes(there)` | after which lengths can a prompt go on? |
| `update_last_access(r, time)` | `needed(blocks)` | which blocks does a reader read, hold and keep recent? |
| `set_prefix_length(r)` | `expires(blocks)` | which bytes of a stored prompt may be evicted before all others? |

Jenga gives each page of a prompt its prefix length and evicts the longest first. Here the trie evicts leaves first,
which is the same order; bytes that `expires` returns are evicted even before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]


class GroupRule(ABC):
    """Which blocks of a prefix the layers of one KV group need.

    Rules are values: equal rules are one KV group.
    """

    lasting: ClassVar[bool] = False
    """Whether a longer prefix needs all bytes that a shorter one needs. If not, bytes at the beginning of a prompt may
    be missing for ever: a writer without them can still store the blocks behind them."""

    @abstractmethod
    def needed_range(self, blocks: Int64s) -> tuple[Int64s, Int64s]:
        """The first needed block, and the one behind the last, for readers of prefixes of these lengths.

        Both are equal if no block is needed. Neither is beyond the prefix.
        """

    def needed(self, blocks: int) -> range:
        """The blocks that a reader of a prefix of `blocks` blocks reads."""
        first, end = self.needed_range(np.array(blocks))
        return range(int(first), int(end))

    def possible_prefixes(self, there: Bools) -> Bools:
        """[n + 1]: whether a prompt can continue after 0, 1, ..., n blocks, given which of its n blocks are there.

        By default after each length whose `needed` blocks are all there.
        """
        return all_there(there, *self.needed_range(np.arange(len(there) + 1)))

    def stored_prefixes(self, there: Bools) -> Bools:
        """[n + 1]: whether a writer of a prompt has nothing to add to its first 0, 1, ..., n blocks.

        By default if the prompt can continue there: bytes that only shorter prefixes need are not stored again.
        """
        return self.possible_prefixes(there)

    def expires(self, blocks: int) -> Bools:
        """[blocks]: which blocks of a stored prompt may be evicted before all others.

        By default those that only shorter prefixes need.
        """
        expires = np.ones(blocks, np.bool_)
        needed = self.needed(blocks)
        expires[needed.start : needed.stop] = False
        return expires


def all_there(there: Bools, first: Int64s, end: Int64s) -> Bools:
    """[m]: whether the blocks of m ranges, from `first` to before `end`, are all there."""
    missing = np.zeros(len(there) + 1, np.int64)
    np.cumsum(~there, out=missing[1:])  # missing[n]: the number of missing blocks among the first n
    found: Bools = missing[first] == missing[end]
    return found
