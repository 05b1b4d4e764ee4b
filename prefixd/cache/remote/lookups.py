"""Looks up prompts in a shared store, one call a prompt, and remembers "no" as well as "yes" for a while.

A "yes" is a copy in the trie like any other tier's, so prompts match, hold and load it alike. A "no" is remembered by
the digest of the first missing block.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from prefixd.base.long_work.pacer import give_way
from prefixd.cache.coding.namespace_codings import NamespaceCodings
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.namespaces import Namespace
from prefixd.cache.placement.paths import find_own, find_path
from prefixd.cache.placement.placement import Placement
from prefixd.cache.remote.copies import RemoteCopies
from prefixd.cache.remote.digests import Digests
from prefixd.cache.remote.health import RemoteHealth
from prefixd.cache.remote.known_blocks import KnownBlocks
from prefixd.cache.rules import GroupMask
from prefixd_swap import StorageError
from prefixd_swap.stores import object_name
from prefixd_swap.tiers import RemoteTier, coding_label

log = logging.getLogger(__name__)

ASKED_AT_ONCE = 4096  # blocks of a prompt in one call
_ENTERED_AT_ONCE = 512  # blocks: a millisecond or two
_REMEMBERED = 1 << 16
_PENDING = 64
_LEARNED = 0.5  # weight of the last answer in the expected answer time
_FORGOTTEN_S = 1.0  # half-life of the expected answer time, so that prompts wait again and it is measured anew


@dataclass(slots=True)
class LookupCounters:
    """Lookups since the start."""

    asked: int = 0
    """Prompts that the store was asked about."""
    asked_objects: int = 0
    found_blocks: int = 0
    remembered: int = 0
    """Prompts that it was not asked about, because of a remembered "no"."""
    unanswered: int = 0
    """Prompts that continued without an answer."""


class RemoteLookups:
    """Looks up prompts in the store.

    Args:
        tier: the store's tier.
        placement: records where blocks are.
        digests: computes digests of prompts.
        codings: how the parts of each namespace are coded in the store.
        copies: enters blocks that the store has.
        known: limits blocks that only the store has.
        health: handles failures.
        clock: seconds, monotonic.
        lookup_s: the most that a prompt waits for an answer.
        absent_s: how long a "no" is remembered.
    """

    def __init__(
        self,
        tier: RemoteTier,
        placement: Placement,
        digests: Digests,
        codings: NamespaceCodings,
        copies: RemoteCopies,
        known: KnownBlocks,
        health: RemoteHealth,
        clock: Callable[[], float],
        lookup_s: float,
        absent_s: float,
    ) -> None:
        self.counters = LookupCounters()
        self.lookup_s = lookup_s
        self.answer_s = 0.0
        """The expected answer time, from the last answers."""
        self._answered_s = clock()
        self._tier = tier
        self._placement = placement
        self._digests = digests
        self._codings = codings
        self._copies = copies
        self._known = known
        self._health = health
        self._clock = clock
        self._absent_s = absent_s
        self._absent: OrderedDict[bytes, float] = OrderedDict()  # digest -> when it may be asked for again
        self._pending: set[asyncio.Task[bool]] = set()

    async def look_up(
        self, trie: Trie, namespace: Namespace, chain: BlockChain, limit: int | None = None, wait_s: float | None = None
    ) -> None:
        """Enters the blocks of a prompt's first `limit` (all by default) that the store has and this host lacks.

        Returns when that is done, or after `wait_s` (`lookup_s` by default); a late answer serves later calls. Does not
        wait if no answer is expected in time.
        """
        wait_s = self.lookup_s if wait_s is None else wait_s
        end = len(chain) if limit is None else min(limit, len(chain))
        if not self._tier.readable or not end or len(self._pending) >= _PENDING:
            return
        task = asyncio.create_task(self._ask_about(trie, namespace, chain, end))
        self._pending.add(task)
        task.add_done_callback(self._ended)
        if self.answer_s * 0.5 ** ((self._clock() - self._answered_s) / _FORGOTTEN_S) <= wait_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(task), wait_s)
        self.counters.unanswered += not (task.done() and task.exception() is None and task.result())

    async def close(self) -> None:
        """Waits for lookups under way."""
        if self._pending:
            await asyncio.wait(self._pending)

    def _ended(self, task: asyncio.Task[bool]) -> None:
        self._pending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a lookup in the shared store failed", exc_info=error)

    async def _ask_about(self, trie: Trie, namespace: Namespace, chain: BlockChain, end: int) -> bool:
        """Returns whether the store has answered."""
        try:
            for each in (namespace,) if namespace.common is None else (namespace.common, namespace):
                while await self._ask_about_next(trie, each, chain, end):
                    pass  # the prompt is longer than one call, and all blocks of this one were there
        except StorageError as error:
            self._health.failed(error)
            return False
        return True

    async def _ask_about_next(self, trie: Trie, namespace: Namespace, chain: BlockChain, end: int) -> bool:
        """Asks about the first blocks that this host lacks; returns whether to ask about the next ones.

        Raises:
            StorageError: the store has not answered.
        """
        own = await find_own(trie, namespace, chain, end)
        with self._placement.holds.hold("remote lookup", trie, own):
            path = own if namespace.common is None else await find_path(trie, namespace, chain, end)
            first = _first_lacking(trie, path)
            stop = min(end, first + ASKED_AT_ONCE)
            lacking = _lacking(trie, path, first, stop)
            if not lacking.any():
                return False
            digests = await self._digests.of_prompt(trie, namespace, chain, own, first, stop)
            labels = [coding_label(coding) for coding in self._codings.codings(namespace.ordinal)]
            ask = self._to_ask(trie, first, lacking, digests, labels)
            if not ask.names:
                self.counters.remembered += 1
                return False
            found = await self._ask(ask.names)
            groups = self._groups(trie, ask, found)
            if groups.any():
                await self._enter(trie, namespace, chain, ask, groups)
            return stop < end and bool((groups == lacking).all()) and self._known.room() > 0

    async def _ask(self, names: list[bytes]) -> list[bool]:
        self.counters.asked += 1
        self.counters.asked_objects += len(names)
        began_s = self._clock()
        found = await self._tier.exist(names)
        self._answered_s = self._clock()
        self.answer_s += _LEARNED * (self._answered_s - began_s - self.answer_s)
        return found

    def _to_ask(
        self, trie: Trie, first: int, lacking: GroupMask, digests: list[bytes], labels: list[bytes]
    ) -> _Question:
        """The objects, with the `labels` of their parts' codings, of `lacking` groups of the blocks from `first` on,
        except blocks with a remembered "no"."""
        ask, now_s = _Question(first, digests, np.zeros(len(lacking), np.uint8), []), self._clock()
        parts_of = _parts_of(trie)
        for at, (digest, mask) in enumerate(zip(digests, lacking.tolist(), strict=True)):
            if not mask:
                continue
            if self._absent.get(digest, now_s) > now_s or self._copies.is_unusable(digest):
                if not trie.has_rules:
                    break  # its descendants are unusable
                continue
            ask.groups[at] = mask
            ask.names.extend(object_name(digest, part, labels[part]) for part in parts_of[mask])
        return ask

    def _groups(self, trie: Trie, ask: _Question, found: list[bool]) -> GroupMask:
        """[blocks]: the groups that the store has whole; remembers the blocks without any."""
        groups, parts_of = ask.groups.copy(), _parts_of(trie)
        asked_parts = [(at, part) for at, mask in enumerate(groups.tolist()) if mask for part in parts_of[mask]]
        for (at, part), there in zip(asked_parts, found, strict=True):
            if not there:
                groups[at] &= ~trie.part_mask[part]
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
        """Enters the blocks, and their ancestors without bytes, while the path before them is held."""
        there = np.flatnonzero(groups)
        end = ask.first + int(there[-1]) + 1
        rows = await find_own(trie, namespace, chain, end)
        end = min(end, len(rows) + self._known.room())
        with self._placement.holds.hold("remote lookup", trie, rows) as hold:
            while len(rows) < end:
                stop = min(len(rows) + _ENTERED_AT_ONCE, end)
                keys, tokens = chain.key_rows(len(rows), stop), chain.token_rows[len(rows) : stop]
                parent = int(rows[-1]) if len(rows) else namespace.root
                new, _ = trie.insert_path(parent, namespace.ordinal, keys, tokens, self._clock())
                hold.extend(new)
                self._known.blocks += len(new)
                rows = np.concatenate([rows, new])
                if len(new) < len(keys):
                    break  # the next key belongs to another block
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
    """A question to the store about a prompt.

    Attributes:
        first: index in the prompt of the first block asked about.
        digests: [n], from that block on.
        groups: [n] masks of the KV groups asked about.
        names: the objects, block by block.
    """

    first: int
    digests: list[bytes]
    groups: GroupMask
    names: list[bytes]


def _parts_of(trie: Trie) -> list[list[int]]:
    """[masks]: the parts of the KV groups in each mask."""
    return [np.flatnonzero(trie.part_mask & np.uint8(mask)).tolist() for mask in range(trie.all_groups + 1)]


def _first_lacking(trie: Trie, path: Rows) -> int:
    """The first block of a prompt for which to ask the store; `path`: the rows of the prompt's first blocks.

    Groups of which a prefix needs only the end (windows, states) are asked for from where the longest usable local
    prefix needs them.
    """
    usable = len(trie.usable(path))
    if not (trie.has_rules and usable):
        return usable
    partly = np.flatnonzero(trie.needed(usable) & np.uint8(trie.partial_groups))
    return int(partly[0]) if len(partly) else usable


def _lacking(trie: Trie, path: Rows, first: int, stop: int) -> GroupMask:
    """[stop - first]: the KV groups of each block that no tier has."""
    lacking = np.full(max(stop - first, 0), trie.all_groups, np.uint8)
    known = trie.available[path[first:stop]]
    lacking[: len(known)] &= ~known
    return lacking
