"""Any tenants' prompts, honest and not, against a model of who has computed what."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.base.errors import ExhaustedError
from prefixd.cache.index.trie import CPU
from tests.cache.tenants.house import TENANTS, House, K

Prompt = tuple[int, ...]
Step = tuple[str, Prompt, bool]

steps = st.lists(
    st.tuples(
        st.sampled_from(TENANTS),
        st.lists(st.integers(1, 2), min_size=1, max_size=4).map(tuple),
        st.sampled_from([False] * 4 + [True]),
    ),
    max_size=25,
)


@dataclass
class Model:
    """Who has computed a prefix, with whose lies ("" for the right bytes), by the prefix."""

    computed: defaultdict[Prompt, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    common: dict[Prompt, str] = field(default_factory=dict)

    def found(self, tenant: str, prompt: Prompt) -> list[str]:
        """Whose bytes a tenant finds of a prompt."""
        found = []
        for end in range(1, len(prompt) + 1):
            whose = self.common.get(prompt[:end], self.computed[prompt[:end]].get(tenant))
            if whose is None:
                break
            found.append(whose)
        return found

    def put(self, tenant: str, prompt: Prompt, lie: str) -> int:
        """A tenant computes what it does not find; how many blocks."""
        known, agreed = len(self.found(tenant, prompt)), 0
        for end in range(known + 1, len(prompt) + 1):
            self.computed[prompt[:end]][tenant] = lie
            agreed = end if self._agreed(tenant, prompt[:end]) else agreed
        for end in range(1, agreed + 1):
            if prompt[:end] not in self.common:
                if not self._agreed(tenant, prompt[:end]):
                    break
                self.common[prompt[:end]] = self.computed[prompt[:end]][tenant]
        return len(prompt) - known

    def _agreed(self, tenant: str, prefix: Prompt) -> bool:
        computed = self.computed[prefix]
        return tenant in computed and list(computed.values()).count(computed[tenant]) >= K


async def read(house: House, tenant: str, prompt: Prompt) -> list[bytes]:
    """The bytes that a tenant reads of a prompt."""
    home = house.home(tenant)
    house.act_for(home)
    lease = await house.cache.acquire(house.session, home, house.chain(prompt, home))
    if lease is None:
        return []
    slots = house.trie.slots[lease.rows, CPU, 0].tolist()
    blocks = [house.read(house.cache.tiers.arena.span(slot, house.part_bytes)) for slot in slots]
    house.cache.release(house.session, lease.id)
    return blocks


def written(house: House, tenant: str, prompt: Prompt, whose: str) -> bytes:
    """What an engine of a tenant computes of a prompt's last block: the right bytes, or somebody's lie."""
    home = house.home(tenant)
    house.liars = {whose}
    return house.content(house.home(whose) if whose else home, house.chain(prompt, home), len(prompt) - 1)


async def put(house: House, tenant: str, prompt: Prompt, lie: bool) -> int:
    house.liars = {tenant} if lie else set()
    return await house.put_for(tenant, prompt)


@given(steps)
@settings(max_examples=30)
def test_a_tenant_finds_what_it_has_computed_and_what_k_tenants_have(taken: list[Step]) -> None:
    async def play(path: Path) -> None:
        house, model = House(path, cpu=256), Model()
        for tenant, prompt, lies in taken:
            computed = model.put(tenant, prompt, tenant if lies else "")
            assert await put(house, tenant, prompt, lies) == computed
            for each in TENANTS:
                expected = [
                    written(house, each, prompt[: end + 1], whose)
                    for end, whose in enumerate(model.found(each, prompt))
                ]
                assert await read(house, each, prompt) == expected
        await house.close()

    with TemporaryDirectory() as path:
        asyncio.run(play(Path(path)))


@pytest.mark.parametrize("disk", [0, 12])
@pytest.mark.slow
def test_in_a_tiny_cache_nobody_finds_more(disk: int) -> None:
    """What is evicted is lost, or comes from disk, and may be computed again with other bytes."""

    @given(steps)
    @settings(max_examples=30)
    def run(taken: list[Step]) -> None:
        with TemporaryDirectory() as path:
            asyncio.run(play(Path(path), taken))

    async def play(path: Path, taken: list[Step]) -> None:
        house = House(path, cpu=6, disk=disk)
        ever: defaultdict[Prompt, set[tuple[str, str]]] = defaultdict(set)  # (tenant, whose lie) by prefix
        for tenant, prompt, lies in taken:
            lie = tenant if lies else ""
            for end in range(1, len(prompt) + 1):
                ever[prompt[:end]].add((tenant, lie))
            try:
                await put(house, tenant, prompt, lies)
            except ExhaustedError:
                continue
            for each in TENANTS:
                for end, block in enumerate(await read(house, each, prompt), 1):
                    computed = ever[prompt[:end]]
                    by = {whose: {tenant for tenant, lie in computed if lie == whose} for _, whose in computed}
                    may = {whose for whose, tenants in by.items() if each in tenants or len(tenants) >= K}
                    assert block in {written(house, each, prompt[:end], whose) for whose in may}
            house.check()
        await house.settle()
        await house.check_disk()
        await house.close()

    run()
