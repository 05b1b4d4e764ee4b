"""KV groups and their rules: which part of a prefix the layers of a group need (Jenga, section 5).

A model's layers form groups that share one shape and one rule. A full-attention layer needs the KV of every token
before the next one; a sliding-window layer needs the last tokens only. A rule answers Jenga's three questions for the
blocks of one prompt, without knowing which model asks:

- `possible_prefixes` (Jenga's `get_possible_prefix`): at which lengths can a prompt continue, given the blocks that are
  there?
- `needed` (Jenga's `update_last_access`): what does a reader of a prefix of this length read, hold and keep recent?
- `expires_before` (Jenga's `set_prefix_length`): which bytes do only shorter prefixes need? They are evicted first.

A prefix of `n` blocks can be used when every group allows the length `n`. Example, full attention beside a window of 2
blocks, `x` where the bytes are there:

    block                      0 1 2 3 4 5
    full attention             x x x x x .     allows 0..5
    sliding window             . . x x . x     allows 0, 4
    longest prefix for both    4               (lengths 0 and 4 are allowed by both)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
GroupMask = npt.NDArray[np.uint8]
"""A bit for each KV group of a trie."""

MAX_GROUPS = 8
"""KV groups of one trie: a byte has a bit for each."""


class GroupRule(ABC):
    """Which blocks of a prefix the layers of one KV group need."""

    @abstractmethod
    def possible_prefixes(self, there: Bools) -> Bools:
        """[n + 1]: whether a prompt can continue after 0, 1, ..., n blocks, given which of its n blocks are there."""

    @abstractmethod
    def first_needed(self, blocks: Int64s) -> Int64s:
        """The first block that a reader of a prefix reads, for prefixes of each of these lengths; it reads all behind
        it."""

    def needed(self, blocks: int) -> range:
        """The blocks that a reader of a prefix of `blocks` blocks reads."""
        return range(int(self.first_needed(np.array(blocks))), blocks)

    def expires_before(self, blocks: int) -> range:
        """The blocks of that prefix whose bytes only shorter prefixes need."""
        return range(self.needed(blocks).start)


@dataclass(frozen=True, slots=True)
class FullAttention(GroupRule):
    """Every token attends to every token before it: all blocks are needed."""

    def possible_prefixes(self, there: Bools) -> Bools:
        """Every length up to the first block that is missing."""
        possible = np.ones(len(there) + 1, np.bool_)
        np.logical_and.accumulate(there, out=possible[1:])
        return possible

    def first_needed(self, blocks: Int64s) -> Int64s:
        """The first block of all."""
        return np.zeros_like(blocks)


@dataclass(frozen=True, slots=True)
class SlidingWindow(GroupRule):
    """A token attends to the last tokens only: the last `blocks_in_window` blocks are needed.

    Attributes:
        blocks_in_window: blocks that hold the tokens which the next token attends to, at least 1.
    """

    blocks_in_window: int

    @classmethod
    def of_tokens(cls, window_tokens: int, block_tokens: int) -> SlidingWindow:
        """The rule of a window of `window_tokens` tokens, the token that attends included (vLLM's and transformers'
        meaning).

        So the next token needs the `window_tokens - 1` tokens before it. A window of 1 token needs none; one block is
        kept all the same, so that every prefix has bytes of every group.
        """
        return cls(max(1, -(-(window_tokens - 1) // block_tokens)))

    def possible_prefixes(self, there: Bools) -> Bools:
        """Every length before which the last blocks of the window are all there."""
        missing = np.zeros(len(there) + 1, np.int64)
        np.cumsum(~there, out=missing[1:])  # missing[n]: how many of the first n blocks are not there
        starts = np.maximum(np.arange(len(missing)) - self.blocks_in_window, 0)
        possible: Bools = missing == missing[starts]
        return possible

    def first_needed(self, blocks: Int64s) -> Int64s:
        """The first block of the window."""
        return np.maximum(blocks - self.blocks_in_window, 0)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """The parts of a block that follow one rule: they are needed, kept and dropped together.

    Attributes:
        rule: what a prefix needs of them.
        parts: which parts of the block, by index: the layers of the group, once a tensor-parallel rank.
        bit: the group's place in a `GroupMask`.
    """

    rule: GroupRule
    parts: tuple[int, ...]
    bit: int

    @property
    def mask(self) -> int:
        """The group alone, as a mask."""
        return 1 << self.bit


def kv_groups(rules: Sequence[GroupRule]) -> tuple[KvGroup, ...]:
    """The groups of a block whose part `i` follows `rules[i]`: parts with equal rules are one group."""
    parts: dict[GroupRule, list[int]] = {}
    for part, rule in enumerate(rules):
        parts.setdefault(rule, []).append(part)
    return tuple(KvGroup(rule, tuple(of_rule), bit) for bit, (rule, of_rule) in enumerate(parts.items()))


def longest_prefix(groups: Sequence[KvGroup], available: GroupMask) -> int:
    """The most blocks after which every group lets a prompt continue.

    Args:
        groups: the groups.
        available: [n], the groups of each block whose bytes are there.
    """
    possible = np.ones(len(available) + 1, np.bool_)
    for group in groups:
        possible &= group.rule.possible_prefixes((available & np.uint8(group.mask)) != 0)
    return len(available) - int(possible[::-1].argmax())


def needed_groups(groups: Sequence[KvGroup], blocks: int) -> GroupMask:
    """[blocks]: the groups of each block that a reader of a prefix of `blocks` blocks needs."""
    needed = np.zeros(blocks, np.uint8)
    for group in groups:
        span = group.rule.needed(blocks)
        needed[span.start : span.stop] |= np.uint8(group.mask)
    return needed


def expired_groups(groups: Sequence[KvGroup], blocks: int, branches: Int64s) -> GroupMask:
    """[blocks]: the groups of each block whose bytes no prefix needs that is likely to be asked for.

    Args:
        groups: the groups.
        blocks: the length of the prompt.
        branches: lengths of its prefixes after which other prompts continue differently: they are likely, too.
    """
    expired = np.zeros(blocks, np.uint8)
    for group in groups:
        span = group.rule.expires_before(blocks)
        wanted = np.zeros(
            blocks + 1, np.int64
        )  # at each block: needed ranges that begin there less those that have ended
        np.add.at(wanted, group.rule.first_needed(branches), 1)
        np.add.at(wanted, branches, -1)
        free = np.cumsum(wanted[: span.stop])[span.start :] == 0
        expired[span.start : span.stop][free] |= np.uint8(group.mask)
    return expired
