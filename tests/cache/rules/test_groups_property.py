"""The whole cache with groups of several rules, over all tiers, against a model of prompts, parts and rules alone.

Four namespaces share tiers of a few slots: `model` has one part of full attention and is computed in GPU frames, too;
`hybrid` has two ranks, and of each a part of full attention and one of a sliding window; `mixed` has full attention,
chunks and a state, which most blocks lack; `mamba` has states alone, so that most of its blocks have no bytes. After
every step: nothing matches that was never committed, a match is the longest length for which the tiers have what
every rule needs, what is held is where it was and has its bytes, the trie is node-closed, and the books balance.

No draw and no choice of a rule depends on the state of the cache, which threads share: an example can be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from prefixd.base.errors import ExhaustedError, PreconditionError
from prefixd.base.rules.rules import ChunkedWindow, RecurrentState, SlidingWindow
from prefixd.cache import (
    BlockChain,
    Lease,
    Namespace,
    NamespaceSpec,
    PartSpec,
    Reservation,
    Trie,
)
from prefixd.cache.index.trie import CPU, DISK, GPU, NO_SLOT, TIERS
from prefixd.cache.sessions.leasing import NO_OFFSET
from prefixd.cache.sessions.reservations import ToFill
from tests.cache.machine import RigMachine
from tests.rig import BLOCK_TOKENS, PART_BYTES, Rig
from tests.tries import forget_blocks, match_rows, subtree_rows, used_rows

Prompt = tuple[int, ...]

WINDOW, CHUNK, CHECKPOINT = 2, 3, 2  # blocks
KINDS = {  # of the parts
    "model": ("full",),
    "hybrid": ("full", "window", "full", "window"),
    "mixed": ("full", "chunk", "state"),
    "mamba": ("state",),
}
RANKS = {  # parts that a writer gives together; the last are all
    "model": ((0,),),
    "hybrid": ((0, 1), (2, 3), (0, 1, 2, 3)),
    "mixed": ((0,), (1,), (2,), (0, 1), (0, 1, 2)),
    "mamba": ((0,),),
}

homes = st.sampled_from(["model", "hybrid", "hybrid", "mixed", "mixed", "mamba"])
with_states = st.sampled_from(["mixed", "mixed", "mamba"])
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
numbers = st.integers(0, 100)  # one of what there is, modulo how much there is


def needed(home: str, blocks: int) -> set[tuple[int, int]]:
    """The (block, part) that a reader of a prefix of so many blocks needs."""
    first = {
        "full": 0,
        "window": max(blocks - WINDOW, 0),
        "chunk": blocks // CHUNK * CHUNK,
        "state": max(blocks - 1, 0),
    }
    return {(block, part) for part, kind in enumerate(KINDS[home]) for block in range(first[kind], blocks)}


@dataclass(eq=False)
class Leased:
    """A lease, and where its bytes were when it was granted."""

    lease: Lease
    home: str
    prompt: Prompt
    first: int
    slots: dict[tuple[int, int], int]  # of (block, part)


@dataclass(eq=False)
class Request:
    """A prompt of `model` whose blocks a worker has computed, in frames that it holds."""

    prompt: Prompt
    rows: list[int]
    frames: list[int]


class GroupsMachine(RigMachine):
    """The model is `committed`: of each home and prefix the parts that were ever committed.

    `wanted` are prompts that are to be found for ever where the disk has room for all (`roomy`): those that were stored
    whole, until a longer one is stored.
    """

    policy = "lru"
    cpu, disk = 18, 28  # slots of 4096 bytes
    window_bytes = PART_BYTES
    roomy = False

    def __init__(self) -> None:
        self.committed: dict[tuple[str, Prompt], set[int]] = {}
        self.wanted: set[tuple[str, Prompt]] = set()
        self.leases: list[Leased] = []
        self.reserved: list[Reservation] = []
        self.requests: list[Request] = []
        self.step = 0
        super().__init__()

    async def make(self, path: Path) -> Rig:
        rig = Rig(path, gpu=3, cpu=self.cpu, disk=self.disk, policy=self.policy)
        self.adopt(rig)
        return rig

    def adopt(self, rig: Rig) -> None:
        window = SlidingWindow(WINDOW * BLOCK_TOKENS + 1)
        ranks = [
            (PartSpec("full", rank, PART_BYTES), PartSpec("window", rank, self.window_bytes, window)) for rank in (0, 1)
        ]
        chunk, state = ChunkedWindow(CHUNK * BLOCK_TOKENS), RecurrentState(CHECKPOINT * BLOCK_TOKENS)
        mixed = (
            PartSpec("full", 0, PART_BYTES),
            PartSpec("chunk", 0, PART_BYTES, chunk),
            PartSpec("state", 0, self.window_bytes, state),
        )
        parts = {
            "hybrid": (*ranks[0], *ranks[1]),
            "mixed": mixed,
            "mamba": (PartSpec("state", 0, PART_BYTES, RecurrentState()),),
        }
        self.homes: dict[str, Namespace] = {"model": rig.namespace}
        for name, of_home in parts.items():
            self.homes[name] = rig.cache.register(NamespaceSpec(name, BLOCK_TOKENS, of_home))

    def let_go(self) -> None:
        """Ends the worker's requests, too."""
        while self.requests:
            self.request_ends(0)
        self.leases, self.reserved = [], []

    # -- what the model says ------------------------------------------------------------------------------------

    def trie(self, home: str) -> Trie:
        return self.rig.cache.trie(self.homes[home])

    def chain(self, home: str, prompt: Prompt) -> BlockChain:
        return self.rig.chain(prompt, self.homes[home])

    def was_committed(self, home: str, prompt: Prompt, blocks: int) -> bool:
        """Whether what a reader of the first `blocks` blocks needs was ever committed."""
        return all(part in self.committed.get((home, prompt[: block + 1]), ()) for block, part in needed(home, blocks))

    def note(self, home: str, prompt: Prompt, first: int, blocks: int, parts: Sequence[int]) -> None:
        for end in range(first + 1, first + blocks + 1):
            self.committed.setdefault((home, prompt[:end]), set()).update(parts)

    def longest(self, home: str, prompt: Prompt) -> int:
        """The longest prefix of which the tiers have what the rules need, from the slots alone."""
        trie, path = self.trie(home), self.nodes(home, prompt)
        groups = [[part for part, its in enumerate(KINDS[home]) if its == kind] for kind in set(KINDS[home])]
        there = {
            (block, part)
            for block, row in enumerate(path)
            for parts in groups
            for part in parts
            if any((trie.slots[row, tier, parts] != NO_SLOT).all() for tier in range(TIERS))
        }
        return max(blocks for blocks in range(len(path) + 1) if needed(home, blocks) <= there)

    def nodes(self, home: str, prompt: Prompt) -> list[int]:
        rows: list[int] = self.trie(home).nodes(self.homes[home].root, self.chain(home, prompt)).tolist()
        return rows

    def busy(self) -> bool:
        """Whether somebody may hold what has to go for others' room."""
        return bool(self.leases or self.reserved or self.requests)

    # -- engines ------------------------------------------------------------------------------------------------

    async def reserve_and_fill(self, home: str, prompt: Prompt, parts: Sequence[int], first: int) -> Reservation | None:
        self.rig.clock.now += 1
        cache, chain = self.rig.cache, self.chain(home, prompt)
        given = await cache.reserve(self.rig.session, self.homes[home], chain, ToFill(parts, first))
        if isinstance(given, int):
            assert given == len(prompt)
            return None
        self.rig.fill(given)
        return given

    async def commit_some(self, given: Reservation, home: str, prompt: Prompt, blocks: int, durable: bool) -> None:
        self.note(home, prompt, given.first_block, blocks, given.parts)
        stored = prompt[: given.first_block + blocks]
        self.wanted -= {(home, stored[:shorter]) for shorter in range(len(stored))}
        committed, duplicates = await self.rig.cache.commit(given, blocks, durable=durable)
        assert committed + duplicates == blocks
        await self.rig.cache.mover.checksums.wait_for_all()
        if stored and self.longest(home, stored) == len(stored):
            self.wanted.add((home, stored))
        if durable:
            trie, end = self.trie(home), given.first_block + blocks
            rows = self.nodes(home, prompt)[:end]
            on_disk = {(block, part) for block, part in needed(home, end) if trie.slots[rows[block], DISK, part] >= 0}
            assert on_disk == needed(home, end), "it was said to be on disk"

    @rule(home=homes, prompt=prompts, rank=st.integers(0, 4), first=st.integers(0, 6))
    def reserve(self, home: str, prompt: Prompt, rank: int, first: int) -> None:
        parts = RANKS[home][rank % len(RANKS[home])]
        try:
            given = self.run(self.reserve_and_fill(home, prompt, parts, min(first, len(prompt))))
        except ExhaustedError:
            assert self.busy(), "all is free, yet there was no room"
            return
        if given is not None:
            self.reserved.append(given)

    @rule(which=numbers, blocks=st.integers(0, 6), durable=st.booleans())
    def commit(self, which: int, blocks: int, durable: bool) -> None:
        if not self.reserved:
            return
        given = self.reserved.pop(which % len(self.reserved))
        home = next(name for name, namespace in self.homes.items() if namespace is given.namespace)
        prompt = tuple(given.chain.token_rows[:, 0].tolist())
        with suppress(ExhaustedError, PreconditionError):  # no room on disk, or other ranks have yet to commit
            self.run(self.commit_some(given, home, prompt, min(blocks, len(given.slots)), durable))

    async def store_all(self, home: str, prompt: Prompt, rank: int, durable: bool) -> None:
        parts = RANKS[home][rank % len(RANKS[home])]
        with suppress(ExhaustedError, PreconditionError):
            given = await self.reserve_and_fill(home, prompt, parts, 0)
            if given is not None:
                await self.commit_some(given, home, prompt, len(given.slots), durable)

    @rule(home=homes, prompt=prompts, durable=st.booleans())
    def store(self, home: str, prompt: Prompt, durable: bool) -> None:
        self.run(self.store_all(home, prompt, -1, durable))

    async def store_state(self, home: str, prompt: Prompt, durable: bool) -> None:
        """The state after the last block alone, as an engine does; it is of no use without the blocks before."""
        state = KINDS[home].index("state")
        with suppress(ExhaustedError, PreconditionError):
            given = await self.reserve_and_fill(home, prompt, (state,), len(prompt) - 1)
            if given is None:
                return
            if given.first_block == len(prompt) - 1:
                assert len(given.slots) == 1, "one state, one slot"
                await self.commit_some(given, home, prompt, 1, durable)
            else:
                assert home == "mixed" and len(self.nodes(home, prompt)) < len(prompt) - 1
                self.rig.cache.release(self.rig.session, given.id)

    @rule(home=with_states, prompt=prompts, durable=st.booleans(), all_else=st.booleans())
    def keep_state(self, home: str, prompt: Prompt, durable: bool, all_else: bool) -> None:
        if all_else and home == "mixed":
            self.run(self.store_all(home, prompt, RANKS[home].index((0, 1)), False))
        self.run(self.store_state(home, prompt, durable))

    async def take_lease(self, home: str, prompt: Prompt, first: int, ttl_s: float) -> Leased | None:
        trie = self.trie(home)
        lease = await self.rig.lease(prompt, namespace=self.homes[home], first_block=first, ttl_s=ttl_s)
        if lease is None:
            return None
        end = first + len(lease.rows)
        assert self.was_committed(home, prompt, end)
        wanted = {(block, part) for block, part in needed(home, end) if block >= first}
        slots = {(block, part): int(trie.slots[lease.rows[block - first], CPU, part]) for block, part in wanted}
        assert NO_SLOT not in slots.values()
        offsets = self.rig.cache.offsets(lease, RANKS[home][-1])
        assert {(first + int(b), int(p)) for b, p in zip(*np.nonzero(offsets != NO_OFFSET), strict=True)} == wanted
        return Leased(lease, home, prompt, first, slots)

    @rule(home=homes, prompt=prompts, first=st.integers(0, 2), ttl_s=st.sampled_from([5.0, 50.0]))
    def acquire(self, home: str, prompt: Prompt, first: int, ttl_s: float) -> None:
        free, longest = not self.busy(), self.longest(home, prompt)
        leased = self.run(self.take_lease(home, prompt, first, ttl_s))
        if leased is not None:
            self.leases.append(leased)
        if (
            free
            and sum(self.homes[home].spec.parts[part].nbytes for _, part in needed(home, longest)) <= self.cpu * 2048
        ):
            assert (0 if leased is None else len(leased.lease.rows)) == max(longest - first, 0)

    @rule(which=numbers)
    def release(self, which: int) -> None:
        if self.leases:
            leased = self.leases.pop(which % len(self.leases))
            self.rig.cache.release(self.rig.session, leased.lease.id)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        self.rig.cache.leases.expire(self.rig.clock())
        alive = self.rig.session.grants
        self.leases = [leased for leased in self.leases if leased.lease.id in alive]
        self.reserved = [given for given in self.reserved if given.id in alive]

    @rule()
    def session_ends(self) -> None:
        self.rig.cache.leases.close(self.rig.session)
        self.rig.session = self.rig.open_session()
        self.leases, self.reserved = [], []

    @rule(home=homes, prompt=prompts, limit=st.none() | st.integers(1, 6))
    def match(self, home: str, prompt: Prompt, limit: int | None) -> None:
        found = len(self.run(self.rig.cache.match(self.homes[home], self.chain(home, prompt), limit)))
        assert found == self.longest(home, prompt[:limit])
        assert self.was_committed(home, prompt, found)

    @rule(calls=st.lists(st.tuples(st.integers(0, 4), homes, prompts), min_size=2, max_size=4))
    def at_once(self, calls: list[tuple[int, str, Prompt]]) -> None:
        """Calls that run into each other."""

        async def lease(home: str, prompt: Prompt) -> None:
            leased = await self.take_lease(home, prompt, 0, 50.0)
            if leased is not None:
                self.leases.append(leased)

        async def all_of_them() -> None:
            works: list[Coroutine[Any, Any, None]] = []
            for what, home, prompt in calls:
                if what == 0:
                    works.append(self.store_all(home, prompt, -1, False))
                elif what == 1:
                    works.append(self.store_all(home, prompt, len(prompt), True))
                elif what == 2:
                    works.append(self.make_room(len(prompt)))
                else:
                    works.append(lease(home, prompt))
            await asyncio.gather(*works)

        self.run(all_of_them())

    # -- the worker ---------------------------------------------------------------------------------------------

    @rule(prompt=prompts.map(lambda prompt: prompt[:3]))
    def compute(self, prompt: Prompt) -> None:
        self.run(self._compute(prompt))

    async def _compute(self, prompt: Prompt) -> None:
        """A request of `model`: its prefix is brought up and checked, the rest is computed."""
        rig, namespace, cache, chain = self.rig, self.homes["model"], self.rig.cache, self.chain("model", prompt)
        rig.clock.now += 1
        rows = await cache.match(namespace, chain)
        assert self.was_committed("model", prompt, len(rows))
        rig.trie.hold(rows, GPU)
        rig.computed.update(rows.tolist())
        there = await cache.mover.bring(rig.trie, rows, cache.tiers.compute)
        rig.unhold(rows[there:].tolist(), rig.cache.tiers.compute)
        found: list[int] = rows[:there].tolist()
        frames = await cache.mover.slots.take_frames(len(prompt) - there) or []
        for block, frame in zip(range(there, len(prompt)), frames, strict=False):
            rig.write(rig.frame(frame), rig.content(namespace, chain, block))
        entered, taken = cache.record(namespace, found[-1] if found else namespace.root, chain, there, frames)
        rig.trie.hold(entered, GPU)
        rig.computed.update(entered.tolist())
        self.note("model", prompt, there, len(frames), (0,))
        own = [frame for frame, gone in zip(frames, taken.tolist(), strict=True) if not gone]
        rig.own += own
        self.requests.append(Request(prompt, found + entered.tolist(), own))

    @rule(which=numbers)
    def request_ends(self, which: int) -> None:
        if self.requests:
            request = self.requests.pop(which % len(self.requests))
            self.rig.unhold(request.rows, self.rig.cache.tiers.compute)
            self.rig.cache.tiers.compute.free(request.frames)
            for frame in request.frames:
                self.rig.own.remove(frame)

    # -- room, the disk, operators ------------------------------------------------------------------------------

    async def make_room(self, slots: int) -> None:
        """Presses blocks out of the GPU and the CPU tier."""
        mover, tiers = self.rig.cache.mover, self.rig.cache.tiers
        frames = await mover.slots.take_frames(min(slots, 3))
        if frames is not None:
            tiers.compute.free(frames)
        tiers.shared.free(await mover.slots.allocate(tiers.shared, (PART_BYTES,), slots))

    @rule(slots=st.integers(1, 18))
    def press(self, slots: int) -> None:
        self.run(self.make_room(slots))

    @rule(ahead=st.booleans())
    def flush(self, ahead: bool) -> None:
        """As an operator asks, or as write-back does it in the background."""
        write_back = self.rig.cache.write_back
        self.run(write_back._batch() if ahead else write_back.flush())

    @rule(home=homes, prompt=prompts)
    def persist(self, home: str, prompt: Prompt) -> None:
        with suppress(ExhaustedError):
            blocks = self.run(self.rig.cache.persist(self.homes[home], self.chain(home, prompt)))
            trie, rows = self.trie(home), self.nodes(home, prompt)
            assert all(trie.slots[rows[block], DISK, part] != NO_SLOT for block, part in needed(home, blocks))

    @rule(home=homes, prompt=prompts)
    def prefetch(self, home: str, prompt: Prompt) -> None:
        self.run(self.rig.cache.prefetch(self.rig.session, self.homes[home], self.chain(home, prompt)))

    @rule(home=homes, prompt=prompts, pinned=st.booleans())
    def pin(self, home: str, prompt: Prompt, pinned: bool) -> None:
        self.trie(home).pinned[self.nodes(home, prompt)[: len(prompt) if not pinned else 2]] = pinned

    @rule(home=homes, prompt=prompts)
    def forget(self, home: str, prompt: Prompt) -> None:
        rows, trie = self.nodes(home, prompt), self.trie(home)
        if not rows:
            return
        subtree = subtree_rows(trie, np.array(rows[-1:]))
        if self.run(forget_blocks(self.rig.cache.mover, trie, subtree[::-1])) == len(subtree):
            gone = prompt[: len(rows)]
            for key in [key for key in self.committed if key[0] == home and key[1][: len(gone)] == gone]:
                del self.committed[key]
        self.wanted -= {each for each in self.wanted if each[0] == home and each[1][: len(rows)] == prompt[: len(rows)]}

    @rule(chance=st.integers(0, 3))
    def restart(self, chance: int) -> None:
        """A quarter of the times, since it takes as long as twenty other steps."""
        if chance:
            return

        def on_disk() -> dict[tuple[str, bytes], list[bool]]:
            """The parts on disk of blocks that come back.

            The blocks before them are there, too, and they have bytes or are before others that have. Without rules
            every prefix needs every byte: what continues a block whose bytes are gone does not come back.
            """
            found = {}
            for home, trie in ((home, self.trie(home)) for home in self.homes):
                rows = used_rows(trie)[(trie.any_part[used_rows(trie)] & (1 << DISK)) != 0]
                rows = rows[np.argsort(trie.depth[rows], kind="stable")]
                closed = {namespace.root for namespace in self.homes.values()}
                for row in rows.tolist():
                    whole = bool((trie.slots[row, DISK] != NO_SLOT).all())
                    if int(trie.parent[row]) in closed and (trie.has_rules or whole):
                        closed.add(row)
                some = set()
                for row in rows[::-1].tolist():
                    parts = (trie.slots[row, DISK] != NO_SLOT).tolist()
                    if row in closed and (any(parts) or row in some):
                        some.add(int(trie.parent[row]))
                        found[home, trie.key(row)] = parts
            return found

        async def again() -> None:
            self.let_go()
            if self.roomy:
                await self.rig.cache.write_back.flush()
            await self.rig.check_disk()
            before = on_disk()
            await self.rig.restart()
            self.adopt(self.rig)
            assert on_disk() == before

        self.run(again())

    # -- always -------------------------------------------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        self.rig.check()
        placement = self.rig.cache.placement
        waiting = [(trie, placement.to_write(trie, used_rows(trie))) for trie in self.rig.cache.tries]
        assert placement.queued_blocks == sum(int(np.count_nonzero(groups)) for _, groups in waiting)
        assert placement.queued_bytes_of.total() == sum(int(trie.group_bytes[groups].sum()) for trie, groups in waiting)

    @invariant()
    def what_is_held_stays(self) -> None:
        rig = self.rig
        for leased in self.leases:
            namespace, trie = self.homes[leased.home], self.trie(leased.home)
            chain = self.chain(leased.home, leased.prompt)
            for (block, part), slot in leased.slots.items():
                assert trie.slots[leased.lease.rows[block - leased.first], CPU, part] == slot
                span = rig.cache.tiers.arena.span(slot, namespace.spec.parts[part].nbytes)
                assert rig.read(span) == rig.content(namespace, chain, block, part)
        for request in self.requests:
            chain = self.chain("model", request.prompt)
            for block, row in enumerate(request.rows):
                data = rig.read(rig.frame(int(rig.trie.slots[row, GPU, 0])))
                assert data == rig.content(self.homes["model"], chain, block)

    @invariant()
    def every_block_has_its_prefix(self) -> None:
        for home in self.homes:
            trie = self.trie(home)
            prefix_of: dict[int, Prompt] = {}
            rows = used_rows(trie)
            for row in rows[np.argsort(trie.depth[rows], kind="stable")].tolist():
                parent = int(trie.parent[row])
                assert parent == self.homes[home].root or parent in prefix_of, "a block without the one before it"
                prefix_of[row] = (*prefix_of.get(parent, ()), int(trie.tokens[row, 0]))
                parts = np.flatnonzero((trie.slots[row] != NO_SLOT).any(axis=0)).tolist()
                assert set(parts) <= self.committed.get((home, prefix_of[row]), set())
                if trie.has_rules and parent >= 0 and trie.any_part[row] & (1 << DISK):
                    assert trie.any_part[parent] & (1 << DISK), "a record on disk without the one before it"

    @invariant()
    def what_is_wanted_is_there(self) -> None:
        for home, prompt in sorted(self.wanted) if self.roomy else ():
            assert self.longest(home, prompt) == len(prompt), "it went, though the disk has room"

    @invariant()
    def a_match_is_what_every_rule_allows(self) -> None:
        """Of a few prompts that were committed, others after each step."""
        self.step += 1
        known = sorted(self.committed)
        for home, prompt in [known[(self.step * 7 + more) % len(known)] for more in range(4)] if known else []:
            found = len(match_rows(self.trie(home), self.homes[home].root, self.chain(home, prompt)))
            assert found == self.longest(home, prompt)
            assert self.was_committed(home, prompt, found)


@pytest.mark.parametrize(
    ("policy", "window_bytes", "roomy"),
    [
        ("lru", PART_BYTES, False),
        pytest.param("random", 2 * PART_BYTES, False, marks=pytest.mark.slow),
        pytest.param("lru", PART_BYTES, True, marks=pytest.mark.slow),
    ],
)
def test_cache_with_groups_against_a_model(policy: str, window_bytes: int, roomy: bool) -> None:
    how = {"policy": policy, "window_bytes": window_bytes, "roomy": roomy}
    if roomy:
        how["disk"] = 600
    machine = type("Machine", (GroupsMachine,), how)
    run_state_machine_as_test(machine, settings=settings(max_examples=10, stateful_step_count=40))
