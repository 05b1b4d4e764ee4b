"""The KV groups of a block, and the combined answers of their rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixd.cache.rules.rule import Bools, GroupRule, Int64s

GroupMask = npt.NDArray[np.uint8]
"""A bit for each KV group of a trie."""

MAX_GROUPS = 8
"""KV groups of one trie: a byte has a bit for each."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """The parts of a block with one rule: they are needed, kept and dropped together.

    Attributes:
        rule: tells which blocks of a prefix need them.
        parts: their indices in the block: one for each tensor-parallel rank.
        bit: the group's place in a `GroupMask`.
        mask: the group alone, as a mask.
    """

    rule: GroupRule
    parts: tuple[int, ...]
    bit: int
    mask: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", 1 << self.bit)


def kv_groups(rules: Sequence[GroupRule]) -> tuple[KvGroup, ...]:
    """The groups of a block whose part `i` follows `rules[i]`: parts with equal rules are one group."""
    parts: dict[GroupRule, list[int]] = {}
    for part, rule in enumerate(rules):
        parts.setdefault(rule, []).append(part)
    return tuple(KvGroup(rule, tuple(of_rule), bit) for bit, (rule, of_rule) in enumerate(parts.items()))


def possible_lengths(groups: Sequence[KvGroup], available: GroupMask) -> Bools:
    """[n + 1]: whether every group lets a prompt continue after 0, 1, ..., n blocks.

    Args:
        groups: the groups.
        available: [n], the groups of each block whose bytes are there.
    """
    possible = np.ones(len(available) + 1, np.bool_)
    for group in groups:
        possible &= group.rule.possible_prefixes((available & np.uint8(group.mask)) != 0)
    return possible


def longest_prefix(groups: Sequence[KvGroup], available: GroupMask) -> int:
    """The most blocks after which every group lets a prompt continue; arguments as for `possible_lengths`."""
    return _last(possible_lengths(groups, available))


def longest_stored(groups: Sequence[KvGroup], available: GroupMask) -> int:
    """The longest prefix to which a writer of the prompt has nothing to add; arguments as for `longest_prefix`."""
    stored = np.ones(len(available) + 1, np.bool_)
    for group in groups:
        stored &= group.rule.stored_prefixes((available & np.uint8(group.mask)) != 0)
    return _last(stored)


def needed_groups(groups: Sequence[KvGroup], blocks: int) -> GroupMask:
    """[blocks]: the groups of each block that a reader of a prefix of `blocks` blocks needs."""
    needed = np.zeros(blocks, np.uint8)
    for group in groups:
        span = group.rule.needed(blocks)
        needed[span.start : span.stop] |= np.uint8(group.mask)
    return needed


def needed_bytes(groups: Sequence[KvGroup], first_block: int, nbytes: Int64s) -> Int64s:
    """[n + 1]: bytes that readers of prefixes of 0, 1, ..., n blocks need from `first_block` on.

    Args:
        groups: the groups.
        first_block: the readers do not need the blocks before it.
        nbytes: [groups, n], bytes of each group of each block.
    """
    lengths = np.arange(nbytes.shape[1] + 1)
    needed = np.zeros(len(lengths), np.int64)
    before = np.zeros(len(lengths), np.int64)
    for group in groups:
        np.cumsum(nbytes[group.bit], out=before[1:])
        first, end = group.rule.needed_range(lengths)
        needed += before[end] - before[np.minimum(np.maximum(first, first_block), end)]
    return needed


def expired_groups(groups: Sequence[KvGroup], blocks: int, branches: Int64s) -> GroupMask:
    """[blocks]: the groups of each block whose bytes no likely prefix needs.

    Args:
        groups: the groups.
        blocks: the length of the prompt.
        branches: the lengths of its other likely prefixes, such as those that it shares with other prompts.
    """
    expired = np.zeros(blocks, np.uint8)
    for group in groups:
        free = group.rule.expires(blocks)
        first, end = group.rule.needed_range(branches)
        # At each block: the number of needed ranges that begin there, less those that end there.
        changes = np.zeros(blocks + 1, np.int64)
        np.add.at(changes, first, 1)
        np.add.at(changes, end, -1)
        free &= np.cumsum(changes[:blocks]) == 0
        expired[free] |= np.uint8(group.mask)
    return expired


def _last(lengths: Bools) -> int:
    """The largest length that is true; length 0 always is."""
    return len(lengths) - 1 - int(lengths[::-1].argmax())
