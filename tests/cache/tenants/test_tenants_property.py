"""Three tenants do whatever comes to mind on a tiny cache: what is counted is there, nobody is above its most, and what
is guaranteed to one no other takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from prefixd.base.errors import ExhaustedError, PrefixdError
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache import Lease, Reservation
from prefixd.cache.index.trie import CPU, DISK, GPU
from tests.cache.machine import RigMachine
from tests.cache.tenants.tenant_rig import Home
from tests.rig import Rig
from tests.tries import used_rows

SLOTS = {GPU: 6, CPU: 8, DISK: 10}
QUOTAS = st.fixed_dictionaries(
    {
        level: st.tuples(st.integers(0, slots // 3), st.none() | st.integers(slots // 3, slots))
        for level, slots in SLOTS.items()
    }
)
HOMES = st.integers(0, 2)
PROMPTS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


class TenantMachine(RigMachine):
    """The model is the sum over the tries, and what each tenant had before a step of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.homes: list[Home] = []
        self.grants: list[tuple[Home, Lease | Reservation]] = []

    async def make(self, path: Path) -> Rig:
        """A cache with three tiers."""
        from tests.rig import Rig

        return Rig(path, gpu=SLOTS[GPU], cpu=SLOTS[CPU], disk=SLOTS[DISK])

    def let_go(self) -> None:
        """Nothing is held by the worker."""

    @initialize(quotas=st.tuples(QUOTAS, QUOTAS, QUOTAS), sizes=st.tuples(*[st.sampled_from([1, 1, 2])] * 3))
    def begin(self, quotas: Sequence[dict[int, tuple[int, int | None]]], sizes: Sequence[int]) -> None:
        async def work() -> None:
            for number in range(3):
                nbytes = sizes[number] * self.rig.part_bytes
                self.homes.append(Home(self.rig, f"t{number}", quotas[number], nbytes=nbytes))

        self.run(work())

    # -- what tenants do -------------------------------------------------------------------------------------------

    @contextmanager
    def at_work(self, home: Home) -> Iterator[None]:
        """Nobody else has less of a tier afterwards than before, but for what was beyond its guarantee.

        What one loses in the GPU tier may go down, at the cost of its own blocks there.
        """
        use, tiers = self.rig.cache.mover.use, self.rig.cache.tiers.own
        before = {(other, tier): use.used_bytes(other.tenant, tier) for other in self.homes for tier in tiers}
        yield
        for (other, tier), had in before.items():
            kept = min(had, other.tenant.quota.tiers[tier.level].guaranteed_bytes)
            assert other is home or use.used_bytes(other.tenant, tier) >= kept, (
                f"{other.tenant.name} lost blocks in the {tier.name} tier for {home.tenant.name}"
            )

    @rule(at=HOMES, prompt=PROMPTS, durable=st.booleans())
    def put(self, at: int, prompt: list[int], durable: bool) -> None:
        home = self.homes[at]

        async def work() -> None:
            try:
                await home.put(prompt, durable=durable)
            except ExhaustedError as error:
                assert "tenant" in str(error) or "no room" in str(error)

        with self.at_work(home):
            self.run(work())

    @rule(at=HOMES, prompt=PROMPTS, leases=st.booleans())
    def grant(self, at: int, prompt: list[int], leases: bool) -> None:
        home = self.homes[at]

        async def work() -> None:
            try:
                granted = await (home.lease(prompt) if leases else home.reserve(prompt))
            except (ExhaustedError, AssertionError):
                return
            if granted is not None:
                self.grants.append((home, granted))

        with self.at_work(home):
            self.run(work())

    @rule(at=st.integers(0, 9))
    def end(self, at: int) -> None:
        if self.grants:
            home, grant = self.grants.pop(at % len(self.grants))
            try:
                home.release(grant)
            except PrefixdError:
                pytest.fail("a grant was over before it ended")

    @rule(at=HOMES, prompt=PROMPTS)
    def compute(self, at: int, prompt: list[int]) -> None:
        home, rig = self.homes[at], self.rig

        async def work() -> None:
            if home.namespace.spec.parts[0].nbytes > rig.part_bytes:
                return  # frames have room for a small block
            chain = rig.chain(prompt, home.namespace)
            frames = await rig.cache.mover.slots.take_frames(len(prompt), tenant=home.tenant)
            if frames is None:
                return
            for block, frame in enumerate(frames):
                await rig.upload(rig.frame(frame), rig.content(home.namespace, chain, block))
            _, taken = rig.cache.record(home.namespace, home.namespace.root, chain, 0, frames)
            rig.cache.tiers.compute.free([frame for frame, new in zip(frames, taken, strict=True) if not new])

        with self.at_work(home):
            self.run(work())

    @rule(at=HOMES, quotas=QUOTAS)
    def limit(self, at: int, quotas: dict[int, tuple[int, int | None]]) -> None:
        home = self.homes[at]
        tiers = {tier.level: home.used(tier) for tier in self.rig.cache.tiers.own}
        home.limit(
            {
                level: (least, None if most is None else max(most, tiers[level]))
                for level, (least, most) in quotas.items()
            }
        )

    @rule()
    def write_down(self) -> None:
        self.run(self.rig.cache.write_back.flush())

    # -- what holds ------------------------------------------------------------------------------------------------

    @invariant()
    def all_is_counted(self) -> None:
        self.rig.check()
        use = self.rig.cache.mover.use
        for tier in self.rig.cache.tiers.own:
            used = sum(use.used_bytes(home.tenant, tier) for home in self.homes)
            assert used + use.used_bytes(self.rig.cache.tenants.default, tier) == tier.used_bytes

    @invariant()
    def what_waits_for_the_disk_is_counted(self) -> None:
        cache = self.rig.cache
        waiting: Counter[Tenant] = Counter()
        for trie in cache.tries:
            rows = used_rows(trie)
            nbytes = trie.group_bytes[cache.placement.to_write(trie, rows)]
            for tenant, its in cache.mover.use.places_by_owner(trie, rows):
                waiting[tenant] += int(nbytes[its].sum())
        assert +cache.placement.queued_bytes_of == +waiting

    @invariant()
    def nobody_is_above_its_most(self) -> None:
        use = self.rig.cache.mover.use
        for home in self.homes:
            for tier in self.rig.cache.tiers.own:
                most = home.tenant.quota.tiers[tier.level].most_bytes
                assert most is None or use.used_bytes(home.tenant, tier) <= most

    @invariant()
    def what_is_held_leaves_others_their_guarantees(self) -> None:
        """Of those that were the same all the time: a quota may be given when others hold more already."""
        use, shared = self.rig.cache.mover.use, self.rig.cache.tiers.shared
        assert sum(use.held_bytes(home.tenant, shared) for home in self.homes) <= shared.capacity_bytes


TestTenants = pytest.mark.slow(TenantMachine.TestCase)
TestTenants.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
