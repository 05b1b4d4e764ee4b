"""Two hosts with a few slots each, and a store between them that loses, alters, swaps and refuses what it has.

Every byte that is read is compared, nothing is found that no host has committed, and the books of both hosts balance
after every step.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from prefixd.base.errors import ExhaustedError
from prefixd.cache.remote import Remote, RemoteOptions
from tests.cache.remote.memory_store import MemoryStore
from tests.cache.test_cache_property import weak_digest
from tests.rig import WAIT_S, Rig

T = TypeVar("T")

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5)
hosts = st.integers(0, 1)


class Hosts(RuleBasedStateMachine):
    """The model is `committed`: every prefix that some host has committed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="prefixd-test-")
        self.loop = asyncio.new_event_loop()
        self.objects: dict[bytes, bytes] = {}
        self.stores = [MemoryStore(self.objects), MemoryStore(self.objects)]
        self.rigs = [self.run(self.make(number)) for number in range(2)]
        self.committed: set[bytes] = set()

    async def make(self, number: int) -> Rig:
        return Rig(
            Path(self.folder.name) / str(number),
            cpu=4,
            disk=6 * number,  # one of them has no disk
            digest=weak_digest,
            remote=self.stores[number],
            options=RemoteOptions(known_blocks=4, lookup_s=WAIT_S),
        )

    def remote(self, host: int) -> Remote:
        remote = self.rigs[host].cache.mover.remote
        assert remote is not None
        return remote

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work`, and what it left to do in the background."""

        async def and_rest() -> T:
            try:
                return await work
            finally:
                for rig in getattr(self, "rigs", []):
                    await rig.cache.mover.remote.lookups.close()
                    await rig.cache.mover.quiesce()

        return self.loop.run_until_complete(asyncio.wait_for(and_rest(), 60))

    # -- hosts --------------------------------------------------------------------------------------------------

    @rule(host=hosts, prompt=prompts)
    def put(self, host: int, prompt: list[int]) -> None:
        try:
            self.run(self.rigs[host].put(prompt))
        except ExhaustedError:
            return
        chain = self.rigs[host].chain(prompt)
        self.committed.update(chain.blocks(length) for length in range(1, len(prompt) + 1))

    @rule(host=hosts, prompt=prompts)
    def get(self, host: int, prompt: list[int]) -> None:
        found = self.run(self.rigs[host].get(prompt))
        assert not found or self.rigs[host].chain(prompt).blocks(found) in self.committed

    @rule(host=hosts)
    def share(self, host: int) -> None:
        self.run(self.remote(host).sharing.write_all())

    @rule(host=hosts, seconds=st.sampled_from([0.5, 2.0, 30.0, 700.0]))
    def time_passes(self, host: int, seconds: float) -> None:
        self.rigs[host].clock.now += seconds

    @rule(host=hosts)
    def forget(self, host: int) -> None:
        self.run(self.remote(host).known.forget_old())
        assert self.remote(host).known.blocks <= 4

    @rule(host=hosts, prompt=prompts, pinned=st.booleans())
    def pin(self, host: int, prompt: list[int], pinned: bool) -> None:
        rig = self.rigs[host]
        if rows := rig.rows(prompt):
            rig.trie.pinned[rows[-1]] = pinned

    @precondition(lambda self: not self.stores[1].away)
    @rule()
    def restart(self) -> None:
        """The host with a disk; nobody can have pinned anything then."""
        rig = self.rigs[1]
        rig.trie.pinned[: rig.trie.rows] = False
        self.run(rig.cache.write_back.flush())
        self.run(rig.restart())

    # -- the store ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.objects)
    @rule(
        at=st.integers(0, 1 << 16),
        how=st.sampled_from(["lose", "cut", "flip", "swap", "empty"]),
        byte=st.integers(0, 9999),
    )
    def damage(self, at: int, how: str, byte: int) -> None:
        names = list(self.objects)
        name = names[at % len(names)]
        value = bytearray(self.objects[name])
        if how == "lose":
            del self.objects[name]
        elif how == "cut":
            self.objects[name] = bytes(value[:-1])
        elif how == "flip" and value:
            value[byte % len(value)] ^= 1 + byte % 255
            self.objects[name] = bytes(value)
        elif how == "swap":
            self.objects[name] = self.objects[names[byte % len(names)]]
        elif how == "empty":
            self.objects.clear()

    @rule(host=hosts, away=st.booleans(), full=st.booleans())
    def fail(self, host: int, away: bool, full: bool) -> None:
        self.stores[host].away, self.stores[host].full = away, full

    @rule(host=hosts)
    def probe(self, host: int) -> None:
        health = self.remote(host).health
        well = self.run(health._probe())
        assert well is not self.stores[host].away

    # -- always -------------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        for rig in self.rigs:
            rig.check()

    def teardown(self) -> None:
        async def end() -> None:
            for rig in self.rigs:
                rig.trie.pinned[: rig.trie.rows] = False
                await rig.close()

        try:
            self.loop.run_until_complete(end())
        finally:
            self.loop.close()
            self.folder.cleanup()


@pytest.mark.slow
def test_two_hosts_and_a_store_that_cannot_be_trusted() -> None:
    run_state_machine_as_test(Hosts, settings=settings(max_examples=40, stateful_step_count=40, deadline=None))


def test_a_shared_prompt_is_found_again_after_anything(tmp_path: Path) -> None:
    """A short form without chance: what the machine above may take long to find."""

    async def scenario() -> None:
        store = MemoryStore()
        rig = Rig(tmp_path, cpu=4, remote=store)
        await rig.put([0, 1, 0, 1])
        assert await rig.cache.mover.remote.sharing.write_all()  # type: ignore[union-attr]
        await rig.put([1, 1, 1, 1])
        assert await rig.get([0, 1, 0, 1]) == 4
        assert np.count_nonzero(rig.trie.slots[:, 3] != -1) >= 4
        await rig.close()

    asyncio.run(scenario())
