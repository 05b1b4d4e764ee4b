"""Blocks become common when k tenants have computed them, and until then no tenant finds what another one has."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.base.rules.rules import RecurrentState, SlidingWindow
from prefixd.base.tenancy.tenants import COMMON, Quota, Tenants, TierQuota
from prefixd.cache import PartSpec
from prefixd.cache.background import common_blocks
from prefixd.cache.background.common_blocks import _ENTRY_BYTES, Computed
from prefixd.cache.index.trie import CPU, DISK, GPU
from prefixd.settings import Settings
from tests.cache.remote.memory_store import MemoryStore
from tests.cache.tenants.house import FULL, TENANTS, House
from tests.rig import BLOCK_TOKENS, PART_BYTES

WINDOW = PartSpec("window", 0, PART_BYTES, SlidingWindow(2 * BLOCK_TOKENS))
STATE = PartSpec("state", 0, PART_BYTES, RecurrentState())


@pytest.fixture
async def make_house(tmp_path: Path) -> AsyncIterator[Callable[..., House]]:
    made: list[House] = []

    def make(**how: Any) -> House:
        made.append(House(tmp_path / f"disk{len(made)}", **how))
        return made[-1]

    yield make
    for house in made:
        await house.settle()
        await house.check_disk()
        await house.close()


MakeHouse = Callable[..., House]


async def test_a_prompt_is_common_when_so_many_tenants_have_computed_it(make_house: MakeHouse) -> None:
    house = make_house(cpu=32)
    prompt = [1, 2, 3]
    for number, tenant in enumerate("abc"):
        assert await house.has(tenant, prompt) == 0
        assert await house.put_for(tenant, prompt) == 3
        assert await house.has("d", prompt) == (3 if number == 2 else 0)
    assert house.trie.blocks_of(house.common.ordinal) == 3
    assert house.cache.tenants.get(COMMON) is not None
    assert house.copies(prompt, CPU) == 4
    # What is common is stored by nobody any more, and what continues it is again one's own.
    assert await house.put_for("d", [*prompt, 4]) == 1
    assert house.copies(prompt, CPU) == 4
    assert (await house.has("d", [*prompt, 4]), await house.has("a", [*prompt, 4])) == (4, 3)


async def test_who_only_used_a_common_block_has_not_computed_it(make_house: MakeHouse) -> None:
    house = make_house(cpu=64)
    for tenant in "abc":
        await house.put_for(tenant, [1, 2])
    for tenant in "da":
        await house.put_for(tenant, [1, 2, 3])
    assert await house.has("b", [1, 2, 3]) == 2
    await house.put_for("b", [1, 2, 3])
    assert await house.has("c", [1, 2, 3]) == 3


async def test_tenants_need_not_have_the_same_prompt(make_house: MakeHouse) -> None:
    """Blocks become common as far as k tenants have them."""
    house = make_house(cpu=64)
    for tenant, prompt in {"a": [1, 2, 3, 4], "b": [1, 2, 3], "c": [1, 2, 9]}.items():
        await house.put_for(tenant, prompt)
    assert await house.has("d", [1, 2, 3, 4]) == 2


async def test_one_tenant_cannot_have_others_read_what_it_made_up(make_house: MakeHouse) -> None:
    house = make_house(cpu=64)
    house.liars.add("a")
    for tenant in "abc":
        await house.put_for(tenant, [1, 2])
    assert await house.has("d", [1, 2]) == 0  # two have computed these bytes, and one others
    await house.put_for("d", [1, 2])
    house.liars.clear()  # what the liar reads now is what the others have computed: its own is not preferred
    assert await house.has("a", [1, 2]) == 2
    for tenant in "bcd":
        assert await house.has(tenant, [1, 2]) == 2


async def test_nothing_is_common_behind_a_block_about_which_tenants_disagree(make_house: MakeHouse) -> None:
    house = make_house(cpu=64)
    for tenant in "abc":
        house.liars = {tenant}
        await house.put_for(tenant, [1])
        house.liars.clear()
        assert await house.put_for(tenant, [1, 2]) == 1
    await house.put_for("d", [1])
    assert await house.has("d", [1, 2]) == 1
    assert house.trie.blocks_of(house.common.ordinal) == 0


async def test_bytes_that_were_changed_after_they_were_counted_do_not_become_common(make_house: MakeHouse) -> None:
    house = make_house(cpu=64)
    for tenant in "ab":
        await house.put_for(tenant, [1, 2])
    home = house.home("c")
    await house.put([1, 2], namespace=home)
    common = house.cache.common
    assert common is not None
    count_them = common._count

    async def counted(*about: Any) -> int:
        reached = await count_them(*about)
        row = house.rows([1, 2], home)[1]
        house.write(house.cache.tiers.arena.span(int(house.trie.slots[row, CPU, 0]), PART_BYTES), bytes(PART_BYTES))
        return reached

    common._count = counted  # type: ignore[method-assign]
    await house.settle()
    assert house.trie.blocks_of(house.common.ordinal) == 1
    assert await house.has("d", [1, 2]) == 1


async def test_with_a_salt_nothing_becomes_common(make_house: MakeHouse) -> None:
    house = make_house(cpu=64)
    for tenant in "abc":
        await house.put([1, 2], namespace=house.home(tenant, salt=b"mine"))
        await house.settle()
    assert house.home("d", salt=b"mine").common is None
    assert await house.get([1, 2], namespace=house.home("d", salt=b"mine")) == 0


async def test_at_once_all_tenants_have_one_namespace(make_house: MakeHouse) -> None:
    house = make_house(cpu=16, share_after=1)
    assert house.cache.common is None
    assert house.home("a") is house.home("b")
    assert house.home("a").spec.tenant == COMMON
    assert house.home("a", salt=b"mine") is not house.home("b", salt=b"mine")
    await house.put([1, 2], namespace=house.home("a"))
    assert await house.has("b", [1, 2]) == 2


async def test_by_default_nothing_is_shared(make_house: MakeHouse) -> None:
    house = make_house(cpu=64, share_after=0)
    for tenant in "abc":
        assert house.home(tenant).common is None
        await house.put([1, 2], namespace=house.home(tenant))
    assert await house.has("d", [1, 2]) == 0


async def test_common_and_own_blocks_come_back_from_disk_and_counting_begins_anew(make_house: MakeHouse) -> None:
    house = make_house(cpu=32, disk=64)
    for tenant in "abc":
        await house.put_for(tenant, [1, 2])
    for tenant in "ab":
        await house.put_for(tenant, [1, 2, 3])  # behind rows without bytes
    await house.put([1, 2, 7], namespace=house.home("d"), durable=True)  # d has no bytes of the first two
    await house.cache.persist(house.home("a"), house.chain([1, 2, 3], house.home("a")))
    await house.cache.write_back.flush()
    await house.check_disk()
    house.homes.clear()
    await house.restart()
    assert house.cache.mover.lost == {}
    assert [await house.has(tenant, [1, 2, 3]) for tenant in TENANTS] == [3, 3, 2, 2]
    assert [await house.has(tenant, [1, 2, 7]) for tenant in TENANTS] == [2, 2, 2, 3]
    await house.put_for("c", [1, 2, 3])
    assert await house.has("d", [1, 2, 3]) == 2  # one has computed it since the start
    await house.check_disk()


async def test_a_block_behind_common_ones_is_durable(make_house: MakeHouse) -> None:
    """Its own predecessors have records without bytes."""
    house = make_house(cpu=32, disk=64)
    for tenant in "abc":
        await house.put_for(tenant, [1, 2])
    await house.put([1, 2, 3, 4], namespace=house.home("d"), durable=True)
    home = house.home("d")
    own = house.trie.nodes(home.root, house.chain([1, 2, 3, 4], home)).tolist()
    assert [house.trie.has(row, DISK) for row in own] == [False, False, True, True]
    assert house.copies([1, 2], DISK) >= 1
    await house.check_disk()


async def test_blocks_become_common_from_the_disk(make_house: MakeHouse) -> None:
    """When there is room at last, the tenants have the beginning on disk alone."""
    house = make_house(cpu=9, disk=64)
    leases = []
    for tenant in "abc":
        await house.put([1, 2, 3], namespace=house.home(tenant), durable=True)
        leases.append(await house.lease([1, 2, 3], namespace=house.home(tenant)))
    await house.settle()  # there is no room
    for lease in leases:
        assert lease is not None
        house.cache.release(lease.session, lease.id)
    for tenant in "abc":
        await house.put([8, 8, 8, 8, 8], namespace=house.home("d", salt=tenant.encode()), durable=True)
        assert await house.put_for(tenant, [1, 2, 3, 4]) == 1
    assert await house.has("d", [1, 2, 3, 4]) == 4


async def test_without_room_there_is_no_copy(make_house: MakeHouse) -> None:
    house = make_house(cpu=9)
    leases = []
    for tenant in "abc":
        await house.put([1, 2, 3], namespace=house.home(tenant))
        leases.append(await house.lease([1, 2, 3], namespace=house.home(tenant)))
    await house.settle()
    assert await house.has("d", [1, 2, 3]) == 0
    assert house.trie.blocks_of(house.common.ordinal) == 0
    for lease in leases:
        assert lease is not None
        house.cache.release(lease.session, lease.id)
    await house.put_for("d", [1, 2, 3])  # who computes it next gives another chance
    assert await house.get([1, 2, 3], namespace=house.common) == 3


async def test_what_tenants_are_guaranteed_does_not_go_for_a_copy(make_house: MakeHouse) -> None:
    house = make_house(cpu=9)
    quota = Quota(tiers=(TierQuota(), TierQuota(guaranteed_bytes=3 * PART_BYTES), TierQuota()))
    house.cache.tenants.set_quotas(dict.fromkeys("abc", quota))
    for tenant in "abc":
        await house.put_for(tenant, [1, 2, 3])
    assert house.trie.blocks_of(house.common.ordinal) == 0
    assert [await house.has(tenant, [1, 2, 3]) for tenant in TENANTS] == [3, 3, 3, 0]
    house.cache.tenants.set_quotas({})
    await house.put_for("d", [1])
    assert house.trie.blocks_of(house.common.ordinal) == 1


async def test_what_is_common_has_a_quota_like_a_tenants(make_house: MakeHouse) -> None:
    house = make_house(cpu=64)
    quota = Quota(tiers=(TierQuota(), TierQuota(most_bytes=2 * PART_BYTES), TierQuota()))
    house.cache.tenants.set_quotas({COMMON: quota})
    for tenant in "abc":
        await house.put_for(tenant, [1, 2, 3])
    assert await house.has("d", [1, 2, 3]) == 2


async def test_a_lease_of_common_and_own_blocks_counts_for_each_of_their_tenants(make_house: MakeHouse) -> None:
    house = make_house(cpu=64)
    quota = Quota(tiers=(TierQuota(), TierQuota(most_bytes=4 * PART_BYTES), TierQuota()))
    for tenant in "abc":
        await house.put_for(tenant, [1, 2, 3])
    house.cache.tenants.set_quotas({"d": quota})
    await house.put_for("d", [1, 2, 3, 4, 5])
    lease = await house.lease([1, 2, 3, 4, 5], namespace=house.home("d"))
    assert lease is not None
    use, shared = house.cache.mover.use, house.cache.tiers.shared
    tenants = [house.cache.tenants.known(name) for name in (COMMON, "d")]
    assert [use.held_bytes(tenant, shared) for tenant in tenants] == [3 * PART_BYTES, 2 * PART_BYTES]
    house.check()
    house.cache.release(lease.session, lease.id)
    assert [use.held_bytes(tenant, shared) for tenant in tenants] == [0, 0]


async def test_windows_become_common_with_the_prefix_that_needs_them(make_house: MakeHouse) -> None:
    house = make_house(cpu=64, parts=(FULL, WINDOW))
    for tenant in "abc":
        assert await house.has(tenant, [1, 2, 3, 4]) == 0
        await house.put_for(tenant, [1, 2, 3, 4])
    common = house.trie.nodes(house.common.root, house.chain([1, 2, 3, 4], house.common))
    assert house.trie.expired[common].tolist() == [2, 2, 0, 0]  # as of any prompt that was stored
    assert await house.has("d", [1, 2, 3, 4]) == 4
    await house.put_for("d", [1, 2, 3, 4, 5, 6])
    assert house.trie.expired[common].tolist() == [2, 2, 0, 0]  # it was not d who stored these
    assert await house.has("d", [1, 2, 3, 4, 5, 6]) == 6
    assert await house.has("a", [1, 2, 3, 4, 5, 6]) == 4


async def test_what_workers_compute_is_taken_as_it_is(make_house: MakeHouse) -> None:
    """Their bytes are the daemon's; they may differ in the last bit."""
    house = make_house(gpu=32, cpu=32, worker=True)
    house.liars.update("abc")
    for number, tenant in enumerate("abc"):
        house.namespace = house.home(tenant)
        rows = await house.put_gpu([1, 2])
        house.unhold(rows, house.cache.tiers.compute)
        await house.settle()
        match = await house.cache.match(house.home("d"), house.chain([1, 2], house.home("d")))
        assert len(match) == (2 if number == 2 else 0)
    assert all(house.trie.has(int(row), CPU) for row in match)
    assert not any(house.trie.has(int(row), GPU) for row in match)


def test_a_tenant_counts_once_and_with_its_last_bytes() -> None:
    computed = Computed()
    assert [computed.note(b"key", tenant, b"x") for tenant in "aab"] == [1, 1, 2]
    assert computed.note(b"key", "c", b"y") == 1
    assert computed.note(b"key", "a", b"y") == 2
    assert computed.agreed(b"key", "a") == (2, b"y")
    assert computed.agreed(b"key", "b") == (1, b"x")
    assert computed.agreed(b"key", "d") == computed.agreed(b"other", "a") == (0, b"")
    assert len(computed) == 3


def test_what_was_computed_longest_ago_is_forgotten_first() -> None:
    computed = Computed(4 * _ENTRY_BYTES)
    for key in (b"1", b"2", b"3"):
        computed.note(key, "a", b"x")
    computed.note(b"1", "b", b"x")
    computed.note(b"4", "a", b"x")
    assert len(computed) == 4
    assert [computed.agreed(key, "a")[0] for key in (b"1", b"2", b"3", b"4")] == [2, 0, 1, 1]


def test_a_tenant_makes_nobody_forget_but_itself() -> None:
    """147,456 blocks of a byte made the daemon forget what all others had computed."""
    computed = Computed(1000 * _ENTRY_BYTES)
    for number in range(300):
        computed.note(b"%d" % number, "a", b"x")
    for number in range(100_000):
        computed.note(b"mine %d" % number, "mallory", b"x")
    assert len(computed) == 1000
    assert [computed.note(b"%d" % number, "b", b"x") for number in range(300)] == [2] * 300
    assert computed.agreed(b"mine 99999", "mallory") == (1, b"x")


def test_forgetting_costs_the_same_with_any_number_of_tenants() -> None:
    """A look at all 20,000 tenants for each block took 20 s."""
    computed, tenants = Computed(20_000 * _ENTRY_BYTES), [f"tenant {number}" for number in range(20_000)]
    for tenant in tenants:
        computed.note(tenant.encode(), tenant, b"x")
    begin = time.thread_time()
    for number in range(20_000):
        computed.note(b"%d" % number, "mallory", b"x")
    assert time.thread_time() - begin < 2.0
    assert len(computed) == 20_000


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.sampled_from([b"x", b"y"])), max_size=80))
def test_what_is_remembered_is_so_and_divided(notes: list[tuple[str, int, bytes]]) -> None:
    """Against a model that forgets nothing: of six places, two are each tenant's."""
    computed = Computed(6 * _ENTRY_BYTES)
    said: dict[str, dict[bytes, bytes]] = {tenant: {} for tenant in "abc"}
    for tenant, number, digest in notes:
        key = b"%d" % number
        computed.note(key, tenant, digest)
        said[tenant][key] = digest
        assert len(computed) <= 6
        for each, digests in said.items():
            known = {name: computed.agreed(name, each) for name in digests if computed.agreed(name, each)[0]}
            assert len(known) >= min(len(digests), 2)
            for name, (agreed, last) in known.items():
                assert last == digests[name]
                assert 1 <= agreed <= sum(others.get(name) == last for others in said.values())


async def test_blocks_that_wait_to_be_counted_wait_for_those_of_no_other_tenant(make_house: MakeHouse) -> None:
    house = make_house(cpu=64)
    common = house.cache.common
    assert common is not None
    waiting = common_blocks._Waiting()
    one = np.zeros(1, np.int64)
    for _ in range(common_blocks._QUEUED_BLOCKS + 7):
        waiting.append("mallory", (house.trie, one, one))
    for _ in range(3):
        waiting.append("a", (house.trie, one[:0], one))
    counted = []
    while waiting:
        counted.append(len(waiting.pop()[1]))
    assert counted[:7] == [1, 0, 1, 0, 1, 0, 1] and sum(counted) == common_blocks._QUEUED_BLOCKS


async def test_what_is_common_takes_no_more_than_its_part_of_a_tier_and_after_a_restart(make_house: MakeHouse) -> None:
    """Colluders moved 160 MiB past their quotas into the common blocks."""
    most = 4 * PART_BYTES
    quota = Quota(tiers=(TierQuota(), TierQuota(most_bytes=most), TierQuota(most_bytes=most)))
    house = make_house(cpu=64, disk=64)

    def common_bytes() -> list[int]:
        cache = house.cache
        return [cache.mover.use.used_bytes(cache.tenants.known(COMMON), tier) for tier in cache.tiers.own]

    for restarted in (False, True):
        house.cache.tenants.set_quotas({COMMON: quota})
        for number in range(6):
            for tenant in "abc":
                await house.put_for(tenant, [100 * restarted + 10 * number + each for each in (1, 2, 3)])
            await house.settle()
            assert all(nbytes <= most for nbytes in common_bytes())
        assert await house.has("d", [100 * restarted + 50 + each for each in (1, 2, 3)]) == 3  # the last ones
        if not restarted:
            house.homes.clear()
            await house.restart()
            assert any(common_bytes())


def test_the_settings_bound_what_is_common() -> None:
    tiers = {"cache.share_after": 3, "cpu.bytes": "16MiB", "disk.bytes": "64MiB"}
    for settings, most in (({}, (4 << 20, 16 << 20)), ({"cache.common_bytes": "2MiB"}, (2 << 20, 2 << 20))):
        quota = Settings.load(None, {**tiers, **settings}, {}).quotas[COMMON]
        assert tuple(tier.most_bytes for tier in quota.tiers) == (None, *most)
    assert Settings.load(None, {**tiers, "cache.share_after": 1}, {}).quotas == {}
    assert Tenants({COMMON: quota}).calling == 1
    assert Tenants({COMMON: quota, "a": Quota()}).calling == 2


@pytest.mark.parametrize("salt", [b"", b"mine"])
async def test_a_shared_store_has_common_and_own_blocks_apart(make_house: MakeHouse, salt: bytes) -> None:
    """Another host finds of what one has shared what is common, and a tenant's own for that tenant alone."""
    stores = MemoryStore(), MemoryStore()
    stores[1].objects = stores[0].objects
    here, there = (make_house(cpu=64, remote=store) for store in stores)
    for tenant in "abc":
        await here.put([1, 2], namespace=here.home(tenant, salt))
        await here.settle()
    await here.put([1, 2, 3], namespace=here.home("d", salt))  # behind common ones, without a salt
    assert here.cache.mover.remote is not None
    assert await here.cache.mover.remote.sharing.write_all()
    for tenant, blocks in {"a": 2, "b": 2, "d": 3, "e": 0 if salt else 2}.items():
        assert await there.get([1, 2, 3], namespace=there.home(tenant, salt)) == blocks


async def test_a_key_that_is_another_blocks_ends_what_becomes_common(make_house: MakeHouse) -> None:
    """Who knows a block's tokens can choose others with its key; k tenants can have them first."""
    house = make_house(cpu=64, digest=lambda data, seed: bytes([data[-4] % 8]) * 16)
    for tenant in "abc":
        await house.put_for(tenant, [1, 2, 3])
    for tenant in "efg":
        assert await house.put_for(tenant, [4, 10, 5]) == 3  # 10 has the key of 2
    assert await house.has("d", [1, 2, 3]) == 3
    assert await house.has("d", [4, 10, 5]) == 1
    assert await house.has("e", [4, 10, 5]) == 3


async def test_behind_common_blocks_nothing_is_kept_where_an_own_block_has_a_key_of_theirs(
    make_house: MakeHouse,
) -> None:
    house = make_house(cpu=64, digest=lambda data, seed: bytes([data[-4] % 8]) * 16)
    for tenant in "abc":
        await house.put_for(tenant, [1, 2])
    await house.put_for("d", [10])
    assert await house.put_for("d", [1, 2, 3]) == 0
    assert house.cache.mover.lost["key collision"] == 1
    assert (await house.has("d", [1, 2, 3]), await house.has("d", [10])) == (2, 1)
