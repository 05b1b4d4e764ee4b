"""The whole cache against a dict of prefixes, over real tiers of a few slots each, with every eviction policy.

After every step: the books balance, leased and held blocks are where they were and have their bytes, and nothing
matches that was never committed. What is read is compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from prefixd.base.codec_names import CodecName
from prefixd.base.errors import ExhaustedError, NotFoundError, PreconditionError
from prefixd.cache import BlockChain, Lease, Namespace, Reservation, Trie
from prefixd.cache.coding.namespace_codings import TierCodec
from prefixd.cache.index.trie import CPU, DISK, GPU
from prefixd.cache.placement.paths import find_ancestry
from prefixd.cache.placement.retention import Retention
from prefixd.cache.sessions.reservations import ToFill
from prefixd_swap import Span
from prefixd_swap.eviction import POLICY_NAMES
from prefixd_swap.tiers import MemoryTier
from tests.cache.disk.coded_rig import CodedRig
from tests.cache.machine import RigMachine
from tests.rig import Rig
from tests.slow import slow_but
from tests.tries import forget_blocks, subtree_rows, used_rows

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5)
homes = st.sampled_from(["model", "model", "salted", "parts"])


def weak_digest(data: bytes, seed: int) -> bytes:
    """A key function with 4096 different keys, so that collisions happen and are not the rule."""
    digest = xxhash.xxh3_64_digest(data, seed)
    return bytes([digest[0], digest[1] & 15]) * 8


@dataclass(eq=False)
class Held:
    """What somebody was given: rows, their slots then, and whose blocks they are."""

    lease: Lease | None
    rows: list[int]
    slots: list[list[int]]
    tier: MemoryTier
    home: str
    chain: BlockChain
    first_block: int = 0


class CacheMachine(RigMachine):
    """The model is `committed`: for each home and prefix the parts that were ever committed."""

    policy: str
    codec: CodecName = "exact"

    def __init__(self) -> None:
        self.committed: dict[tuple[str, bytes], set[int]] = {}
        self.held: list[Held] = []
        self.reserved: list[Reservation] = []
        self.own: list[int] = []
        super().__init__()

    async def make(self, path: Path) -> Rig:
        admit_uses = int(self.policy == "lfu")  # with one of the policies, what is asked for once stays off the disk
        sizes: dict[str, Any] = {"gpu": 4, "cpu": 6, "disk": 8, "admit_uses": admit_uses, "digest": weak_digest}
        if self.codec == "exact":
            rig = Rig(path, policy=self.policy, **sizes)
        else:
            rig = CodedRig(path, policy=self.policy, disk_codec=TierCodec(self.codec), **sizes)
        self.adopt(rig)
        return rig

    def claims(self) -> Iterator[tuple[Trie, Any, list[int]]]:
        yield self.rig.trie, np.empty(0, np.int64), self.own
        for held in self.held:
            if held.lease is None:
                yield self.rig.trie, np.array(held.rows, np.int64), []

    def adopt(self, rig: Rig) -> None:
        rig.cache.claims.append(self.claims)
        self.homes: dict[str, Namespace] = {
            "model": rig.namespace,
            "salted": rig.register(salt=b"tenant"),
            "parts": rig.register("tp2", parts=2),
        }

    async def rest(self) -> None:
        """Writes back, too."""
        cache = self.rig.cache
        await cache.mover.quiesce()
        for _ in range(30):
            if not cache.mover.changed.is_set():
                return
            cache.mover.changed.clear()
            while await cache.write_back._batch():
                pass
        raise AssertionError("write back keeps giving itself work")

    def let_go(self) -> None:
        """Ends the requests, too."""
        for held in self.held:
            if held.lease is None:
                self.rig.unhold(held.rows, held.tier)
        self.rig.cache.tiers.compute.free(self.own)
        self.held, self.reserved, self.own = [], [], []

    def note(self, home: str, chain: BlockChain, block: int, parts: tuple[int, ...] = (0,)) -> None:
        self.committed.setdefault((home, chain.blocks(block + 1)), set()).update(parts)

    def whole(self, home: str, chain: BlockChain, block: int) -> bool:
        parts = range(len(self.homes[home].spec.parts))
        return self.committed.get((home, chain.blocks(block + 1)), set()) == set(parts)

    # -- engines ------------------------------------------------------------------------------------------------

    @rule(home=homes, prompt=prompts, rank=st.none() | st.integers(0, 1))
    def reserve(self, home: str, prompt: list[int], rank: int | None) -> None:
        parts = [rank] if home == "parts" and rank is not None else []
        self.rig.clock.now += 1
        chain = self.rig.chain(prompt, self.homes[home])
        try:
            given = self.run(self.rig.cache.reserve(self.rig.session, self.homes[home], chain, ToFill(parts)))
        except ExhaustedError:
            assert self.held or self.reserved or self.own, "all is free, yet there was no room"
            return
        if isinstance(given, Reservation):
            self.rig.fill(given)
            self.reserved.append(given)

    @rule(home=homes, prompt=prompts, durable=st.booleans())
    def store(self, home: str, prompt: list[int], durable: bool) -> None:
        before = len(self.reserved)
        self.reserve(home, prompt, None)
        if len(self.reserved) > before:
            self.commit_all(self.reserved[-1], len(self.reserved[-1].slots), durable)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), durable=st.booleans())
    def commit(self, data: st.DataObject, durable: bool) -> None:
        given = data.draw(st.sampled_from(self.reserved))
        self.commit_all(given, data.draw(st.integers(0, len(given.slots))), durable)

    def commit_all(self, given: Reservation, blocks: int, durable: bool) -> None:
        self.reserved.remove(given)
        home = next(name for name, namespace in self.homes.items() if namespace is given.namespace)
        collisions = self.rig.cache.mover.lost["key collision"]
        for block in range(given.first_block, given.first_block + blocks):
            self.note(home, given.chain, block, given.parts)
        try:
            committed, duplicates = self.run(self.rig.cache.commit(given, blocks, durable=durable))
        except (ExhaustedError, PreconditionError):
            assert durable
            return
        lost = self.rig.cache.mover.lost["key collision"] - collisions
        assert committed + duplicates + lost == blocks
        if durable and blocks and not lost:
            on_disk = self.rig.trie if home != "parts" else self.rig.cache.trie(given.namespace)
            rows = self.run(self.rig.cache.match(given.namespace, given.chain, given.first_block + blocks))
            assert len(rows) == given.first_block + blocks
            assert not len(on_disk.missing(rows, DISK))

    @rule(home=homes, prompt=prompts, first=st.integers(0, 2), ttl=st.sampled_from([5.0, 50.0]))
    def acquire(self, home: str, prompt: list[int], first: int, ttl: float) -> None:
        rig, namespace = self.rig, self.homes[home]
        lease = self.run(rig.lease(prompt, namespace=namespace, first_block=first, ttl_s=ttl))
        if lease is None:
            return
        chain = rig.chain(prompt, namespace)
        assert all(self.whole(home, chain, block) for block in range(first + len(lease.rows)))
        slots = lease.trie.slots[lease.rows, CPU].tolist()
        self.held.append(Held(lease, lease.rows.tolist(), slots, self.rig.cache.tiers.shared, home, chain, first))

    @rule(home=homes, prompt=prompts)
    def load(self, home: str, prompt: list[int]) -> None:
        found = self.run(self.rig.get(prompt, namespace=self.homes[home]))
        chain = self.rig.chain(prompt, self.homes[home])
        assert all(self.whole(home, chain, block) for block in range(found))

    @precondition(lambda self: any(held.lease for held in self.held))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([held for held in self.held if held.lease]))
        assert held.lease is not None
        self.rig.cache.release(self.rig.session, held.lease.id)
        self.held.remove(held)
        with pytest.raises(NotFoundError, match="it was released"):
            self.rig.cache.release(self.rig.session, held.lease.id)

    @rule(home=homes, prompt=prompts, other=prompts)
    def prefetch(self, home: str, prompt: list[int], other: list[int]) -> None:
        async def begin() -> None:
            await self.rig.cache.prefetch(self.rig.session, self.homes[home], self.rig.chain(prompt, self.homes[home]))
            await self.rig.get(other, namespace=self.homes[home])

        self.run(begin())

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        self.rig.cache.leases.expire(self.rig.clock())
        self.run(self.rig.cache.retained.sweep())
        alive = self.rig.session.grants
        self.held = [held for held in self.held if held.lease is None or held.lease.id in alive]
        self.reserved = [given for given in self.reserved if given.id in alive]

    @rule()
    def session_ends(self) -> None:
        self.rig.cache.leases.close(self.rig.session)
        self.rig.session = self.rig.open_session()
        self.held = [held for held in self.held if held.lease is None]
        self.reserved = []

    # -- the worker ---------------------------------------------------------------------------------------------

    @rule(home=st.sampled_from(["model", "salted"]), prompt=prompts)
    def compute(self, home: str, prompt: list[int]) -> None:
        self.run(self._compute(home, self.rig.chain(prompt[:4], self.homes[home])))

    async def _compute(self, home: str, chain: BlockChain) -> None:
        """One request: its prefix brought up and checked, the rest computed and recorded."""
        rig, namespace, cache = self.rig, self.homes[home], self.rig.cache
        rig.clock.now += 1
        rows = await cache.match(namespace, chain)
        assert all(self.whole(home, chain, block) for block in range(len(rows)))
        rig.trie.hold(rows, GPU)
        there = await cache.mover.bring(rig.trie, rows, cache.tiers.compute)
        rig.unhold(rows[there:].tolist(), rig.cache.tiers.compute)
        found: list[int] = rows[:there].tolist()
        frames = await cache.mover.slots.take_frames(len(chain) - there)
        for block, frame in zip(range(there, len(chain)), frames or [], strict=False):
            rig.write(rig.frame(frame), rig.content(namespace, chain, block))
            parent = found[-1] if found else namespace.root
            entered, taken = cache.record(namespace, parent, chain, block, [frame])
            if not len(entered):
                self.own += [frame]
                self.own += (frames or [])[block - there + 1 :]
                break
            rig.trie.hold(entered, GPU)
            found += entered.tolist()
            self.note(home, chain, block)
            if not taken[0]:
                self.own.append(frame)
        slots = rig.trie.slots[found, GPU].tolist() if found else []
        self.held.append(Held(None, found, slots, self.rig.cache.tiers.compute, home, chain))

    @precondition(lambda self: any(held.lease is None for held in self.held))
    @rule()
    def requests_end(self) -> None:
        for held in [held for held in self.held if held.lease is None]:
            self.rig.unhold(held.rows, self.rig.cache.tiers.compute)
            self.held.remove(held)
        self.rig.cache.tiers.compute.free(self.own)
        self.own = []

    @rule(count=st.integers(1, 4))
    def press(self, count: int) -> None:
        frames = self.run(self.rig.cache.mover.slots.take_frames(count))
        if frames is not None:
            self.rig.cache.tiers.compute.free(frames)

    # -- operators ----------------------------------------------------------------------------------------------

    @rule()
    def flush(self) -> None:
        self.run(self.rig.cache.write_back.flush())

    @rule(home=homes, prompt=prompts, pinned=st.booleans())
    def pin(self, home: str, prompt: list[int], pinned: bool) -> None:
        trie = self.rig.cache.trie(self.homes[home])
        trie.pinned[self.rig.rows(prompt, self.homes[home])] = pinned

    @rule(home=homes, prompt=prompts, end=st.integers(0, 8), priority=st.integers(-1, 1), ttl=st.sampled_from([0, 10]))
    def retain(self, home: str, prompt: list[int], end: int, priority: int, ttl: float) -> None:
        namespace, cache = self.homes[home], self.rig.cache
        with suppress(ExhaustedError):
            self.run(cache.retain(namespace, self.rig.chain(prompt, namespace), [Retention(0, end, priority, ttl)]))
        most = sum(tier.capacity_bytes for tier in cache.tiers.own) // 2
        assert priority < 1 or cache.retained.of_tenant[cache.tenants.default] <= most

    @rule(home=homes, prompt=prompts)
    def forget(self, home: str, prompt: list[int]) -> None:
        namespace, rig = self.homes[home], self.rig
        trie, rows = rig.cache.trie(namespace), rig.rows(prompt, namespace)
        if not rows:
            return
        subtree = subtree_rows(trie, np.array(rows[-1:]))
        prefix = rig.chain(prompt, namespace).blocks(len(rows))
        went = self.run(forget_blocks(rig.cache.mover, trie, subtree[::-1]))
        assert went <= len(subtree)
        if len(rig.rows(prompt, namespace)) < len(rows):
            for key in [key for key in self.committed if key[0] == home and key[1].startswith(prefix)]:
                del self.committed[key]

    @rule()
    def restart(self) -> None:
        async def again() -> None:
            self.let_go()
            await self.rig.check_disk()
            assert self.rig.store is not None
            kept = {(record.namespace, record.key): record.parent for record in self.rig.store.records()}
            closed = {at for at, parent in kept.items() if not parent or (at[0], parent) in kept}
            await self.rig.restart()
            assert self.rig.restored <= len(kept)
            if closed == set(kept):
                assert self.rig.restored == len(kept)
            self.adopt(self.rig)

        self.run(again())

    # -- always -------------------------------------------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        self.rig.check()

    @invariant()
    def what_is_held_stays(self) -> None:
        for held in self.held:
            namespace = self.homes[held.home]
            trie = self.rig.cache.trie(namespace)
            assert trie.slots[held.rows, held.tier.level].tolist() == held.slots if held.rows else True
            for i, slots in enumerate(held.slots):
                for part, slot in enumerate(slots):
                    size = namespace.spec.parts[part].nbytes
                    (address,) = held.tier.addresses(np.array([slot])).tolist()
                    data = self.rig.read(Span(address, size, held.tier.on_device))
                    exact = self.rig.content(namespace, held.chain, held.first_block + i, part)
                    self.rig.check_bytes(trie, held.rows[i], part, data, exact)

    @invariant()
    def nothing_matches_that_was_not_committed(self) -> None:
        for home, namespace in self.homes.items():
            trie = self.rig.cache.trie(namespace)
            for row in used_rows(trie).tolist():
                if trie.namespace[row] == namespace.ordinal and trie.there[row].any():
                    path = self.run(find_ancestry(trie, np.array([row])))
                    tokens = trie.tokens[path[np.argsort(trie.depth[path])]].astype("<u4").tobytes()
                    assert self.committed.get((home, tokens)) == set(range(len(namespace.spec.parts)))

    @invariant()
    def every_frame_is_the_tries_or_a_requests(self) -> None:
        assert len(self.rig.cache.tiers.compute.in_flight) == len(self.own)


@pytest.mark.parametrize("policy", slow_but(["s3-fifo"], POLICY_NAMES))
def test_cache_against_a_dict(policy: str) -> None:
    machine = type("Machine", (CacheMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=35 if policy == "lru" else 15, stateful_step_count=50)
    )


@pytest.mark.parametrize("codec", slow_but(["int8"], ["lossless", "int8", "k8v4"]))
def test_cache_with_a_codec_against_a_dict(codec: str) -> None:
    machine = type("Machine", (CacheMachine,), {"policy": "lru", "codec": codec})
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=50))
