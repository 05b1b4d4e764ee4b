"""Looks up, loads and saves the pages of one pool in one namespace of prefixd.

The engine's threads call and wait; they also make the copies, so that the link's thread is free for the others. A call
is cut into slices of some pages, each with a lease or a reservation of its own:

    load    Acquire -> copy out -> Release     a release that succeeds proves that the bytes were the right ones
    save    Reserve -> copy in -> Commit

A call that is too slow ends between two slices, with the pages that have come.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from prefixd.client import (
    AsyncLease,
    AsyncReservation,
    ClientError,
    MatchResult,
    NamespaceSpec,
    Tier,
)
from prefixd.integrations.engine.daemon_link import Link, LinkDown
from prefixd.integrations.engine.pages_by_key.chains import KEY_BYTES, Chain, Starts
from prefixd.integrations.engine.pages_by_key.engine_pages import Bytes, Check, PagesAt, PagesUnusable
from prefixd.integrations.engine.pages_by_key.page_grants import Grant, PageGrants, Wanted, tokens_of
from prefixd.integrations.engine.pages_by_key.shared_copies import SharedCopies

T = TypeVar("T")
H = TypeVar("H", AsyncLease, AsyncReservation)
CopyPages: TypeAlias = Callable[[Bytes, Sequence[tuple[int, int]], Check], None]

LOAD_BYTES = 128 << 20  # at first; two slices are under way at a time
_LOAD_MOST_BYTES = 512 << 20
_LOAD_S = 0.25  # wanted time of a slice: a slice costs two calls, and a load can end between two slices
SAVE_BYTES = 256 << 20
SINGLES = 32  # pages that are paths of their own, in one batch of calls
_CLEAR_S = 8.0
_CLEAR_AGAIN_S = 0.02
_ROOM_S = 2.0  # longest wait of a load for memory that others hold
_ROOM_PAUSE_S = 0.02
_EXPECTED_ERRORS = (LinkDown, ClientError, PagesUnusable)


@dataclass(slots=True)
class Outcome:
    """The result of a call that loads or saves pages."""

    done: list[bool]
    """By page of the call, in order: whether it was loaded, or is kept."""
    nbytes: int = 0
    new: int = 0
    """Saved pages that prefixd did not have."""
    elapsed_s: float = 0.0
    cut: bool = False
    """Whether the call ended because its time was over."""
    error: Exception | None = None
    """The error that ended the call early; pages that were done before stay done."""

    @property
    def pages(self) -> int:
        """How many pages were loaded, or are kept."""
        return sum(self.done)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A slice of a load under way: pages `at` to `stop` of a chain, and the lease that was asked for."""

    at: int
    stop: int
    begin: int
    """Index of the page at which its path begins."""
    grant: Future[Grant[AsyncLease]]


class PageStore:
    """The pages of one pool.

    Args:
        link: the connection to the daemon.
        spec: the namespace; its one part is a page.
        slice_s: time after which a call begins no further slice.
        copies: makes the copies.
        clock: seconds, monotonic.
        load_bytes: bytes of the first slices of a load; later ones take about `_LOAD_S`.
    """

    def __init__(
        self,
        link: Link,
        spec: NamespaceSpec,
        slice_s: float,
        copies: SharedCopies,
        clock: Callable[[], float] = time.monotonic,
        load_bytes: int = LOAD_BYTES,
    ) -> None:
        self.spec = spec
        self.page_bytes = spec.block_bytes
        self._link = link
        self._slice_s = slice_s
        self._copies = copies
        self._clock = clock
        self._slice = max(1, load_bytes // self.page_bytes)
        self._save_slice_pages = max(1, SAVE_BYTES // self.page_bytes)
        self._starts = Starts()
        self._grants = PageGrants(link, spec, clock)

    # -- which pages are there ------------------------------------------------------------------------------------

    def leading(self, chain: Chain) -> Counter[Tier]:
        """Counts the cached pages of a call, from its first on, by tier. Raises LinkDown, ClientError."""
        return self._grants.wait(self._link.start(partial(self._leading, chain)))

    async def _leading(self, chain: Chain) -> Counter[Tier]:
        cache = await self._link.cache(self.spec)
        hits: Counter[Tier] = Counter()
        at = chain.before
        counted = True
        while at < len(chain):
            found = at
            for begin in self._starts.of(chain, at):
                match = await cache.match(tokens_of(chain.part(begin)), counted=counted)
                counted = False
                if not match.blocks and begin:
                    self._starts.drop(chain.page(begin))  # it was evicted
                found = begin + match.blocks
                if found > at:
                    hits += _tiers_behind(match, at - begin)
                    break
            if found <= at:
                break
            at = found
            if at < len(chain) and chain.page(at) not in self._starts:
                break
        return hits

    def each(self, digests: bytes) -> list[bool]:
        """For pages that are paths of their own, which are cached. Raises LinkDown, ClientError."""
        return self._grants.wait(self._link.start(partial(self._each, digests)))

    async def _each(self, digests: bytes) -> list[bool]:
        cache = await self._link.cache(self.spec)
        there: list[bool] = []
        pages = list(_pages(digests))
        for first in range(0, len(pages), SINGLES):
            found = await asyncio.gather(*(cache.match(tokens_of(page)) for page in pages[first : first + SINGLES]))
            there += [match.blocks > 0 for match in found]
        return there

    def clear(self) -> None:
        """Drops all pages of the namespace. Raises LinkDown, ClientError."""
        self._grants.wait(self._link.start(self._clear, _CLEAR_S))

    async def _clear(self) -> None:
        while await self._link.evict(self.spec):
            await asyncio.sleep(_CLEAR_AGAIN_S)  # the daemon is writing some to the disk

    # -- loading --------------------------------------------------------------------------------------------------

    def load(self, chain: Chain, pages: PagesAt) -> Outcome:
        """Loads the pages of a call, from its first on, until one is missing or time is over.

        While a slice is copied the daemon leases the next slice and releases the one before.
        """
        outcome = Outcome([False] * (len(chain) - chain.before))
        ending: list[tuple[range, Future[list[bool]]]] = []
        ahead: Ahead | None = None
        with _timed(outcome, self._clock):
            until_s = self._clock() + self._slice_s
            at, step = chain.before, min(self._slice, self._link.slice_blocks(self.page_bytes))
            room_until_s = self._clock() + _ROOM_S
            try:
                while at < len(chain):
                    asked, ahead = ahead or self._lease_slice(chain, at, step), None
                    begin, grant = self._find_slice(chain, asked)
                    lease = grant.holds[0]
                    if lease.blocks == asked.stop - at == step < len(chain) - at:
                        ahead = self._lease_slice(chain, asked.stop, step, begin)
                    places = [(at - chain.before + block, lease.offset(block)) for block in range(lease.blocks)]
                    self._grants.run_copy(grant, partial(self._copy, pages, pages.load, grant, places))
                    ended = self._grants.start_end(grant)
                    if lease.blocks:
                        ending.append((range(at, at + lease.blocks), ended))
                        at += lease.blocks
                        room_until_s = self._clock() + _ROOM_S
                    elif lease.cached_blocks <= at - begin:
                        break
                    # There is no room: first release the slices held here, then wait for the memory of others.
                    elif self._collect_releases(ending, outcome, chain):
                        if self._clock() >= room_until_s:
                            break
                        time.sleep(_ROOM_PAUSE_S)
                    if at < len(chain) and self._clock() >= until_s:
                        outcome.cut = True
                        break
            except _EXPECTED_ERRORS as error:
                outcome.error = error
            finally:
                if ahead is not None:
                    ahead.grant.add_done_callback(self._grants.give_back_late)
            self._collect_releases(ending, outcome, chain)
            outcome.nbytes = outcome.pages * self.page_bytes
        if outcome.nbytes >= LOAD_BYTES // 2 and outcome.elapsed_s > 0:
            nbytes = min(_LOAD_S * outcome.nbytes / outcome.elapsed_s, _LOAD_MOST_BYTES)
            self._slice = max(1, int(nbytes) // self.page_bytes)
        return outcome

    def _collect_releases(self, ending: list[tuple[range, Future[list[bool]]]], outcome: Outcome, chain: Chain) -> bool:
        """Waits for the releases of slices and notes the pages that count; returns True if there was none."""
        waited, ending[:] = list(ending), []
        for pages, ended in waited:
            try:
                came = self._grants.wait(ended)[0]
            except _EXPECTED_ERRORS as error:
                outcome.error = error
                continue
            for page in pages:
                outcome.done[page - chain.before] = came
        return not waited

    def _lease_slice(self, chain: Chain, at: int, step: int, begin: int | None = None) -> Ahead:
        """Asks for a lease of `step` pages, or the rest, from page `at` on, in the path that begins at page `begin`
        (None: the nearest start of a path)."""
        stop = min(at + step, len(chain))
        if begin is None:
            begin = self._starts.of(chain, at)[0]
        wanted = Wanted(chain.part(begin, stop), at - begin, stop - at)
        return Ahead(at, stop, begin, self._grants.start_lease(wanted))

    def _find_slice(self, chain: Chain, asked: Ahead) -> tuple[int, Grant[AsyncLease]]:
        """The start of the path that has the slice, and the slice's lease; without blocks if no path has it."""
        begin, grant = asked.begin, self._grants.wait(asked.grant)
        others = [other for other in self._starts.of(chain, asked.at) if other != begin]
        while not grant.holds[0].blocks and grant.holds[0].cached_blocks <= asked.at - begin and others:
            self._grants.give_back(grant)
            begin = others.pop(0)
            grant = self._grants.wait(self._lease_slice(chain, asked.at, asked.stop - asked.at, begin).grant)
        return begin, grant

    def load_each(self, digests: bytes, pages: PagesAt) -> Outcome:
        """As `load`, for pages that are paths of their own: loads every cached one."""

        def load(wanted: Sequence[Wanted], first: int, outcome: Outcome) -> None:
            done = self._load_singles(wanted, first, pages)
            outcome.done[first : first + len(done)] = done
            outcome.nbytes += sum(done) * self.page_bytes

        return self._move_singles(digests, load, lambda: True)

    def _move_singles(
        self, digests: bytes, move: Callable[[Sequence[Wanted], int, Outcome], None], may: Callable[[], bool]
    ) -> Outcome:
        """Calls `move` with batches of pages that are paths of their own, the number of the batch's first page, and the
        outcome; until `may` is False, `move` fails, or time is over."""
        all_pages = list(_pages(digests))
        outcome = Outcome([False] * len(all_pages))
        with _timed(outcome, self._clock):
            until_s = self._clock() + self._slice_s
            step = min(self._slice, SINGLES)
            for first in range(0, len(all_pages), step):
                if not may():
                    break
                if first and self._clock() >= until_s:
                    outcome.cut = True
                    break
                wanted = [Wanted(page, 0, 1) for page in all_pages[first : first + step]]
                try:
                    move(wanted, first, outcome)
                except _EXPECTED_ERRORS as error:
                    outcome.error = error
                    break
        return outcome

    def _load_singles(self, wanted: Sequence[Wanted], first: int, pages: PagesAt) -> list[bool]:
        grant = self._grants.lease(wanted)

        def copy() -> None:
            for place, lease in enumerate(grant.holds):
                if lease.blocks:
                    pages.load(grant.arena, [(first + place, lease.offset(0))], lease.check)

        self._grants.run_copy(grant, copy)
        released = self._grants.end(grant)
        return [ok and lease.blocks > 0 for ok, lease in zip(released, grant.holds, strict=True)]

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(self, chain: Chain, pages: PagesAt) -> Outcome:
        """Saves the pages of a call that prefixd does not have, from the first on, until room or time is over."""
        outcome = Outcome([False] * (len(chain) - chain.before))
        with _timed(outcome, self._clock):
            until_s = self._clock() + self._slice_s
            at = chain.before
            while at < len(chain) and self._grants.may_save:
                stop = min(at + self._save_slice_pages, len(chain))
                try:
                    kept, new = self._save_slice(chain, at, stop, pages)
                except _EXPECTED_ERRORS as error:
                    outcome.error = error
                    break
                outcome.new += new
                for page in range(at, kept):
                    outcome.done[page - chain.before] = True
                if kept <= at:
                    break
                at = kept
                if at < len(chain) and self._clock() >= until_s:
                    outcome.cut = True
                    break
            outcome.nbytes = outcome.new * self.page_bytes
        return outcome

    def _save_slice(self, chain: Chain, at: int, stop: int, pages: PagesAt) -> tuple[int, int]:
        """Saves pages `at` to `stop`; returns the page up to which they are kept now, and how many are new."""
        begin, grant = self._reserve_slice(chain, at, stop)
        if grant is None:
            return at, 0
        reservation = grant.holds[0]
        if not reservation.blocks:
            self._grants.give_back(grant)
            return stop, 0
        first = begin + reservation.first_block
        places = [(first - chain.before + block, reservation.offset(block)) for block in range(reservation.blocks)]
        self._grants.run_copy(grant, partial(self._copy, pages, pages.save, grant, places))
        if not self._grants.end(grant)[0]:
            return at, 0
        return first + reservation.blocks, reservation.blocks

    def _reserve_slice(self, chain: Chain, at: int, stop: int) -> tuple[int, Grant[AsyncReservation] | None]:
        """The start of the path of pages `at` to `stop`, and their slots; None if there is no room now."""
        for begin in self._starts.of(chain, at):
            grant = self._grants.reserve([Wanted(chain.part(begin, stop), at - begin, stop - at)])
            if grant is None or not grant.holds[0].blocks or grant.holds[0].first_block >= at - begin:
                return begin, grant
            self._grants.give_back(grant)  # prefixd has lost pages before these
            self._starts.drop(chain.page(begin))
        self._starts.add(chain.page(at))
        return at, self._grants.reserve([Wanted(chain.part(at, stop), 0, stop - at)])

    def save_each(self, digests: bytes, pages: PagesAt) -> Outcome:
        """As `save`, for pages that are paths of their own."""

        def save(wanted: Sequence[Wanted], first: int, outcome: Outcome) -> None:
            done, new = self._save_singles(wanted, first, pages)
            outcome.done[first : first + len(done)] = done
            outcome.new += new
            outcome.nbytes += new * self.page_bytes

        return self._move_singles(digests, save, lambda: self._grants.may_save)

    def _save_singles(self, wanted: Sequence[Wanted], first: int, pages: PagesAt) -> tuple[list[bool], int]:
        if (grant := self._grants.reserve(wanted)) is None:
            return [False] * len(wanted), 0

        def copy() -> None:
            for place, reservation in enumerate(grant.holds):
                if reservation.blocks:
                    pages.save(grant.arena, [(first + place, reservation.offset(0))], reservation.check)

        self._grants.run_copy(grant, copy)
        committed = self._grants.end(grant)
        new = sum(ok and reservation.blocks > 0 for ok, reservation in zip(committed, grant.holds, strict=True))
        return committed, new

    def _copy(self, pages: PagesAt, way: CopyPages, grant: Grant[H], places: Sequence[tuple[int, int]]) -> None:
        """Copies the pages of a grant with one hold in one direction (`pages.load` or `pages.save`)."""
        check = grant.holds[0].check
        if pages.by_threads:
            self._copies.copy(lambda some: way(grant.arena, some, check), places, len(places) * self.page_bytes)
        else:
            way(grant.arena, places, check)


@contextmanager
def _timed(outcome: Outcome, clock: Callable[[], float]) -> Iterator[None]:
    began_s = clock()
    yield
    outcome.elapsed_s = clock() - began_s


def _tiers_behind(match: MatchResult, blocks: int) -> Counter[Tier]:
    """Counts the blocks of a match behind its first `blocks` blocks, by tier."""
    tiers: Counter[Tier] = Counter()
    for run in match.runs:
        tiers[run.tier] += max(0, run.blocks - blocks)
        blocks = max(0, blocks - run.blocks)
    return +tiers


def _pages(digests: bytes) -> Iterator[bytes]:
    return (digests[at : at + KEY_BYTES] for at in range(0, len(digests), KEY_BYTES))
