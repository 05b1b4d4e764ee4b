"""What a shared store has of a prompt: asked in one call a prompt, and remembered for a while, "no" as well as "yes".

A "yes" is a copy in the trie, like any other tier's, so a prompt that it continues is matched, held, estimated, and
loaded or not, like any other. A "no" is remembered by the digest of the first block that is missing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.cache.groups import GroupMask
from prefixd.cache.index.keys import BlockChain
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.namespaces import Namespace
from prefixd.cache.paths import find_path
from prefixd.cache.placement import Placement
from prefixd.cache.remote.copies import RemoteCopies
from prefixd.cache.remote.digests import Digests
from prefixd.cache.remote.health import RemoteHealth
from prefixd.cache.remote.known_blocks import KnownBlocks
from prefixd.pacer import give_way
from prefixd_swap import StorageError
from prefixd_swap.stores import object_name
from prefixd_swap.tiers import RemoteTier

ASKED_AT_ONCE = 4096  # objects of one prompt; a longer prompt is asked about as it is found
_ENTERED_AT_ONCE = 512  # blocks: a millisecond or two
_REMEMBERED = 1 << 16
_PENDING = 64
_LEARNED = 0.5  # weight of the last answer in what an answer is expected to take
_FORGOTTEN_S = (
    1.0  # in so many seconds without an answer half of what was learned is forgotten: nobody waits, nobody learns
)


@dataclass(slots=True)
class LookupCounters:
    """Lookups since the start."""

    asked: int = 0
    """Prompts that the store was asked about."""
    asked_objects: int = 0
    found_blocks: int = 0
    remembered: int = 0
    """Prompts that it was not asked about, because it had said "no" a moment ago."""
    unanswered: int = 0
    """Prompts that went on before the answer came, or had none."""


class RemoteLookups:
    """Asks the store about prompts.

    Args:
        tier: the store's.
        placement: what is where.
        digests: of prompts.
        copies: enters what the store has.
        known: how many blocks may be known that only the store has.
        health: is told of failures.
        clock: seconds, monotonic.
        absent_s: how long a "no" is remembered.
    """

    def __init__(
        self,
        tier: RemoteTier,
        placement: Placement,
        digests: Digests,
        copies: RemoteCopies,
        known: KnownBlocks,
        health: RemoteHealth,
        clock: Callable[[], float],
        absent_s: float,
    ) -> None:
        self.counters = LookupCounters()
        self.answer_s = 0.0
        """What an answer takes, by the last ones."""
        self._answered_s = clock()
        self._tier = tier
        self._placement = placement
        self._digests = digests
        self._copies = copies
        self._known = known
        self._health = health
        self._clock = clock
        self._absent_s = absent_s
        self._absent: OrderedDict[bytes, float] = OrderedDict()  # digest -> until when it counts as missing
        self._pending: set[asyncio.Task[None]] = set()

    async def look(self, trie: Trie, namespace: Namespace, chain: BlockChain, limit: int | None, wait_s: float) -> None:
        """Enters what the store has of a prompt's first `limit` blocks (all by default) and this host lacks.

        Returns when that is done, or after `wait_s`: the answer is then for those who ask later. It is not waited for
        where it is not expected in time.
        """
        end = len(chain) if limit is None else min(limit, len(chain))
        if not self._tier.gives or not end or len(self._pending) >= _PENDING:
            return
        task = asyncio.create_task(self._look(trie, namespace, chain, end))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        if self.answer_s * 0.5 ** ((self._clock() - self._answered_s) / _FORGOTTEN_S) <= wait_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(task), wait_s)
        self.counters.unanswered += not task.done()

    async def close(self) -> None:
        """Waits for what is under way."""
        if self._pending:
            await asyncio.wait(self._pending)

    async def _look(self, trie: Trie, namespace: Namespace, chain: BlockChain, end: int) -> None:
        path = await find_path(trie, namespace.root, chain, end)
        first, lacking = _lacking(trie, path, end)
        if first >= end:
            return
        with self._placement.holds.hold("remote lookup", trie, path):
            digests = await self._digests.of_prompt(trie, namespace, chain, path, first, end)
            ask = self._to_ask(trie, first, lacking, digests)
            if not ask.names:
                self.counters.remembered += 1
                return
            try:
                found = await self._ask(ask.names)
            except StorageError as error:
                self.counters.unanswered += 1
                self._health.failed(error)
                return
            groups = self._groups(trie, ask, found)
            if groups.any():
                await self._enter(trie, namespace, chain, ask, groups)

    async def _ask(self, names: list[bytes]) -> list[bool]:
        self.counters.asked += 1
        self.counters.asked_objects += len(names)
        began_s = self._clock()
        found = await self._tier.exist(names)
        self._answered_s = self._clock()
        self.answer_s += _LEARNED * (self._answered_s - began_s - self.answer_s)
        return found

    def _to_ask(self, trie: Trie, first: int, lacking: GroupMask, digests: list[bytes]) -> _Question:
        """The objects of the blocks from `first` on that are `lacking`, but for what was missing a moment ago."""
        ask, now_s = _Question(first, digests, np.zeros(len(lacking), np.uint8), []), self._clock()
        parts_of = [np.flatnonzero(trie.part_mask & np.uint8(mask)).tolist() for mask in range(trie.all_groups + 1)]
        for at, (digest, mask) in enumerate(zip(digests, lacking.tolist(), strict=True)):
            if not mask:
                continue
            if self._absent.get(digest, now_s) > now_s or self._copies.is_unusable(digest):
                if not trie.has_rules:
                    break  # what continues it is of no use
                continue
            parts = parts_of[mask]
            if len(ask.names) + len(parts) > ASKED_AT_ONCE and ask.names:
                break
            ask.groups[at] = mask
            ask.names.extend(object_name(digest, part) for part in parts)
        return ask

    def _groups(self, trie: Trie, ask: _Question, found: list[bool]) -> GroupMask:
        """[blocks]: the groups that the store has all parts of; remembers the blocks of which it has nothing."""
        groups, at_part = ask.groups.copy(), 0
        for at, mask in zip(range(len(groups)), ask.groups.tolist(), strict=True):
            for part in np.flatnonzero(trie.part_mask & np.uint8(mask)).tolist() if mask else ():
                if not found[at_part]:
                    groups[at] &= ~trie.part_mask[part]
                at_part += 1
        asked = np.flatnonzero(ask.groups)
        missing = asked[groups[asked] == 0]
        if not trie.has_rules and len(missing):
            missing = missing[:1]
            groups[missing[0] :] = 0
        until_s = self._clock() + self._absent_s
        for at in missing.tolist():
            self._absent[ask.digests[at]] = until_s
            self._absent.move_to_end(ask.digests[at])
        while len(self._absent) > _REMEMBERED:
            self._absent.popitem(last=False)
        return groups

    async def _enter(
        self, trie: Trie, namespace: Namespace, chain: BlockChain, ask: _Question, groups: GroupMask
    ) -> None:
        """Enters the blocks, and those between them, which have no bytes. The path before them is held."""
        there = np.flatnonzero(groups)
        end = ask.first + int(there[-1]) + 1
        rows = await find_path(trie, namespace.root, chain, end)
        end = min(end, len(rows) + self._known.room())
        with self._placement.holds.hold("remote lookup", trie, rows) as hold:
            while len(rows) < end:
                stop = min(len(rows) + _ENTERED_AT_ONCE, end)
                keys, tokens = chain.key_rows(len(rows), stop), chain.token_rows(len(rows), stop)
                parent = int(rows[-1]) if len(rows) else namespace.root
                new, _ = trie.insert_path(parent, namespace.ordinal, keys, tokens, self._clock())
                hold.extend(new)
                self._known.blocks += len(new)
                rows = np.concatenate([rows, new])
                if len(new) < len(keys):
                    break  # the next key is another block's
                await give_way()
            there = there[there < len(rows) - ask.first]
            for start in range(0, len(there), _ENTERED_AT_ONCE):
                some = there[start : start + _ENTERED_AT_ONCE]
                self._copies.enter(
                    trie, rows[ask.first + some], [ask.digests[at] for at in some.tolist()], groups[some]
                )
                await give_way()
        self.counters.found_blocks += len(there)


@dataclass(frozen=True, slots=True)
class _Question:
    """What the store is asked about a prompt.

    Attributes:
        first: the prompt's block that comes first in the others.
        digests: [n] of its blocks.
        groups: [n] KV groups of each that are asked about.
        names: the objects, block by block.
    """

    first: int
    digests: list[bytes]
    groups: GroupMask
    names: list[bytes]


def _lacking(trie: Trie, path: Rows, end: int) -> tuple[int, npt.NDArray[np.uint8]]:
    """From which block of a prompt on the store may help, and of each block up to `end` the KV groups that no tier has.

    Groups of which a prefix needs only the end (windows, states) are asked for from where the longest prefix that can
    be used here needs them.
    """
    usable = len(trie.usable(path))
    first = usable
    if trie.has_rules and usable:
        partly = np.flatnonzero(trie.needed(usable) & np.uint8(trie.partial_groups))
        first = int(partly[0]) if len(partly) else usable
    lacking = np.full(max(end - first, 0), trie.all_groups, np.uint8)
    known = trie.available[path[first:end]]
    lacking[: len(known)] &= ~known
    return first, lacking
