"""Wishes for the blocks of a prompt: which blocks they are for, for how long, and what a tenant may have of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, NotFoundError
from prefixd.base.tenancy.tenants import Quota, Tenant
from prefixd.cache import check_integrity
from prefixd.cache.index.trie import DISK
from prefixd.cache.placement.retention import MOST_RANGES, Retention
from prefixd.cache.sessions.reservations import ToFill
from prefixd_swap import IntegrityError
from tests.rig import BLOCK_TOKENS, PART_BYTES, Rig
from tests.tries import forget_blocks

KEEP = Retention(priority=50)


def priorities(rig: Rig, prompt: list[int]) -> list[int]:
    """Of the prompt's cached blocks, now."""
    found: list[int] = rig.trie.priorities(np.array(rig.rows(prompt), np.int64), rig.clock()).tolist()
    return found


async def retain(rig: Rig, prompt: list[int], *wishes: Retention) -> int:
    return await rig.cache.retain(rig.namespace, rig.chain(prompt), wishes)


def allow(rig: Rig, blocks: int | None) -> None:
    """The tenant may retain so many blocks; None: as many as there is room for by default."""
    rig.cache.tenants.default.quota = Quota(retained_bytes=None if blocks is None else blocks * PART_BYTES)


def retained_blocks(rig: Rig) -> float:
    return rig.cache.retained.of_tenant[rig.cache.tenants.default] / PART_BYTES


async def test_a_block_belongs_to_the_range_of_its_last_token_and_the_last_range_counts(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(cpu=20)
    prompt = [1, 2, 3, 4, 5]
    await rig.put(prompt)
    assert BLOCK_TOKENS == 2  # last tokens 1, 3, 5, 7, 9
    assert await retain(rig, prompt, Retention(1, 7, 10), Retention(3, 5, -20)) == 3
    assert priorities(rig, prompt) == [10, -20, 10, 0, 0]
    assert await retain(rig, prompt, Retention(4, 0, 3)) == 5
    assert priorities(rig, prompt) == [10, -20, 3, 3, 3], "blocks of no range stay as they are"
    assert await retain(rig, prompt, Retention(0, 4, 0)) == 3
    assert priorities(rig, prompt) == [0, 0, 3, 3, 3]
    assert await retain(rig, prompt) == 0
    assert (priorities(rig, prompt), retained_blocks(rig)) == ([0] * 5, 0)


async def test_a_wish_reaches_as_far_as_the_prompt_is_cached(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=20)
    await rig.put([1, 2])
    assert await retain(rig, [1, 2, 3, 4], Retention(2, 1000, 7)) == 1
    assert priorities(rig, [1, 2]) == [0, 7]
    assert await retain(rig, [9], KEEP) == 0


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (Retention(4, 4, 1), r"retention\[1\], for tokens 4 to 4, is no range"),
        (Retention(4, 3, 1), "tokens 4 to 3, is no range"),
        (Retention(0, 0, 101), "to the end, has priority 101; it must be between -100 and 100"),
        (Retention(0, 0, -101), "has priority -101"),
        (Retention(0, 0, 1, -1.0), "has ttl_s -1.0; it must be a number of seconds"),
        (Retention(0, 0, 1, math.nan), "has ttl_s nan"),
        (Retention(0, 0, 1, math.inf), "has ttl_s inf"),
    ],
)
async def test_what_cannot_be_is_refused(make_rig: Callable[..., Rig], wish: Retention, said: str) -> None:
    rig = make_rig(cpu=20)
    await rig.put([1])
    with pytest.raises(InvalidArgumentError, match=said):
        await retain(rig, [1], KEEP, wish)
    assert priorities(rig, [1]) == [0]


async def test_there_are_at_most_so_many_ranges(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=20)
    await rig.put([1])
    assert await retain(rig, [1], *[KEEP] * MOST_RANGES) == 1
    with pytest.raises(InvalidArgumentError, match="retention has 65 ranges; send at most 64"):
        await retain(rig, [1], *[KEEP] * (MOST_RANGES + 1))


async def test_a_priority_is_over_after_its_time_and_then_counts_no_more(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=20)
    allow(rig, 3)
    await rig.put([1, 2, 3, 4, 5])
    await retain(rig, [1, 2, 3, 4, 5], Retention(0, 4, 5, ttl_s=10), Retention(4, 6, 5, ttl_s=30))
    rig.clock.now += 9.9
    assert priorities(rig, [1, 2, 3]) == [5, 5, 5]
    rig.clock.now += 0.1
    assert priorities(rig, [1, 2, 3]) == [0, 0, 5]
    assert rig.trie.prioritized == 3, "nobody has looked"
    await retain(rig, [1, 2, 3, 4, 5], Retention(6, 0, 5))  # which has room, now that two are over
    assert (rig.trie.prioritized, retained_blocks(rig)) == (3, 3)
    rig.clock.now += 20
    await rig.cache.retained.sweep()
    assert (rig.trie.prioritized, retained_blocks(rig)) == (2, 2)


async def test_what_has_no_end_or_is_far_off_is_not_looked_for(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=20)
    await rig.put([1, 2])
    await retain(rig, [1, 2], Retention(0, 2, 5), Retention(2, 4, 5, ttl_s=10))
    looked = []
    prioritize = type(rig.trie).prioritize
    monkeypatch.setattr(type(rig.trie), "prioritize", lambda *args: (looked.append(args), prioritize(*args)))
    await rig.cache.retained.sweep()
    assert not looked
    rig.clock.now += 10
    await rig.cache.retained.sweep()
    await rig.cache.retained.sweep()
    assert len(looked) == 1


async def test_a_wish_beyond_the_quota_is_refused_whole_and_the_refusal_names_it(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=20)
    allow(rig, 3)
    await rig.put([1, 2, 3, 4])
    with pytest.raises(
        ExhaustedError,
        match=rf"tenant default: 0 of {3 * PART_BYTES} bytes have a priority above 0, and {4 * PART_BYTES} more were "
        r"asked for \(limit tenants\.default\.retained_bytes\); retain fewer tokens",
    ):
        await retain(rig, [1, 2, 3, 4], KEEP)
    assert (priorities(rig, [1, 2, 3, 4]), rig.cache.tenants.default.refused["retained_bytes"]) == ([0] * 4, 1)
    await retain(rig, [1, 2, 3, 4], Retention(0, 6, 9))
    await retain(rig, [1, 2, 3, 4], Retention(0, 6, 50))  # those that have one already are not asked for again
    assert await retain(rig, [1, 2, 3, 4], Retention(6, 0, -50)) == 4, "a priority below 0 counts nothing"
    assert priorities(rig, [1, 2, 3, 4]) == [50, 50, 50, -50]
    with pytest.raises(ExhaustedError):
        await retain(rig, [1, 2, 3, 4], Retention(6, 0, 1))


async def test_without_a_quota_half_of_the_tiers_is_shared(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=8)
    await rig.put([1, 2, 3, 4, 5])
    with pytest.raises(ExhaustedError, match=rf"0 of {4 * PART_BYTES} bytes \(of {4 * PART_BYTES}, half of this"):
        await retain(rig, [1, 2, 3, 4, 5], KEEP)
    assert await retain(rig, [1, 2, 3, 4, 5], Retention(0, 8, 50)) == 4
    with pytest.raises(ExhaustedError, match=f"{4 * PART_BYTES} of {4 * PART_BYTES} bytes"):
        await retain(rig, [1, 2, 3, 4, 5], Retention(8, 0, 50))


async def test_one_tenant_does_not_take_what_tenants_share(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=32)  # 16 blocks are shared: 4 for each of two, 8 for whoever comes first
    rig.cache.tenants.set_quotas({"default": Quota(), "other": Quota()})
    prompt = list(range(1, 14))
    await rig.put(prompt)
    assert await retain(rig, prompt, Retention(0, 24, 50)) == 12
    most = 12 * PART_BYTES
    with pytest.raises(ExhaustedError, match=rf"{most} of {most} bytes \(of {16 * PART_BYTES}, half of this host's"):
        await retain(rig, prompt, KEEP)
    theirs = rig.cache.register(msgspec.structs.replace(rig.namespace.spec, tenant="other"))
    path = np.zeros(0, np.int64)
    wish = await rig.cache.retained.grant(theirs, rig.trie, [KEEP], path, 4, 1)
    refused = await rig.cache.retained.grant(theirs, rig.trie, [KEEP], path, 1, 1, optional=True)
    assert f"{4 * PART_BYTES} of {4 * PART_BYTES} bytes" in refused.refused
    wish.end()


async def test_a_commit_beyond_the_quota_stores_its_blocks_without_priorities(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=20)
    allow(rig, 3)
    await rig.put([1, 2])
    await retain(rig, [1, 2], KEEP)
    reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1, 2, 3, 4]))
    assert not isinstance(reservation, int)
    rig.fill(reservation)
    with pytest.raises(InvalidArgumentError, match="has 2; commit only what was reserved"):
        await rig.cache.commit(reservation, (1 << 32) - 1, retention=[KEEP])
    assert await rig.cache.commit(reservation, 1, retention=[KEEP]) == (1, 0)
    assert not reservation.retention_refused
    reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1, 2, 3, 4]))
    assert not isinstance(reservation, int)
    rig.fill(reservation)
    assert await rig.cache.commit(reservation, 1, retention=[KEEP]) == (1, 0)
    assert "limit tenants.default.retained_bytes); retain fewer tokens" in reservation.retention_refused
    assert (len(rig.rows([1, 2, 3, 4])), rig.cache.retained.claimed.total()) == (4, 0)
    assert rig.cache.tenants.default.refused["retained_bytes"] == 1
    assert priorities(rig, [1, 2, 3, 4]) == [50, 50, 50, 0]
    with pytest.raises(NotFoundError):
        await rig.cache.commit(reservation, 2)
    await rig.cache.mover.checksums.wait_for_all()


async def test_wishes_at_the_same_time_do_not_pass_the_quota_together(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=20)
    allow(rig, 3)

    async def refused(*firsts: int) -> list[bool]:
        """Of commits at the same time, of two blocks each, whether the wish of each was refused."""
        reservations = []
        for first in firsts:
            reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([first, 8]))
            assert not isinstance(reservation, int)
            rig.fill(reservation)
            reservations.append(reservation)
        await asyncio.gather(*(rig.cache.commit(each, 2, retention=[KEEP]) for each in reservations))
        return sorted(bool(each.retention_refused) for each in reservations)

    groups = rig.trie.all_groups
    with await rig.cache.grant_retention(
        rig.namespace, rig.chain([5, 6]), 2, groups, [KEEP]
    ):  # two blocks to be computed
        assert await refused(1, 2) == [True, True], "two of three are claimed"
    assert await refused(3, 4) == [False, True]
    assert (retained_blocks(rig), rig.cache.retained.claimed.total()) == (2, 0)
    await rig.cache.mover.checksums.wait_for_all()


async def test_a_block_counts_once_in_whatever_tiers_it_is_and_no_more_when_it_has_gone(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(cpu=4, disk=20)
    await rig.put([1, 2], durable=True)
    await retain(rig, [1, 2], KEEP)
    assert retained_blocks(rig) == 2
    await rig.put([3, 4, 5, 6])
    assert rig.tiers([1, 2], DISK) == [True, True]
    assert (priorities(rig, [1, 2]), retained_blocks(rig)) == ([50, 50], 2), "the priority goes where the block goes"
    await forget_blocks(rig.cache.mover, rig.trie, rig.rows([1, 2])[::-1])
    assert (rig.trie.prioritized, retained_blocks(rig)) == (0, 0)
    await rig.put([1, 2])
    assert priorities(rig, [1, 2]) == [0, 0], "who comes after it does not inherit it"


async def test_a_restart_ends_it(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=8, disk=20)
    await rig.put([1, 2], durable=True)
    await retain(rig, [1, 2], KEEP)
    await rig.restart()
    assert priorities(rig, [1, 2]) == [0, 0]


async def test_of_a_block_in_parts_the_bytes_that_are_there_count(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=20)
    tenant = rig.cache.tenants.default
    home = rig.register("two ranks", parts=2)
    await rig.put([1], namespace=home, parts=[0])
    reservation = await rig.cache.reserve(rig.session, home, rig.chain([1], home), ToFill([1]))
    assert not isinstance(reservation, int)
    rig.fill(reservation)
    await rig.cache.commit(reservation, 1, retention=[KEEP])
    assert rig.cache.retained.of_tenant[tenant] == 2 * PART_BYTES
    await rig.cache.mover.checksums.wait_for_all()


async def test_wrong_counts_are_found(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=20)
    await rig.put([1, 2])
    await retain(rig, [1, 2], KEEP)
    trie, (first, _) = rig.trie, rig.rows([1, 2])
    check_integrity(rig.cache)

    trie.prioritized += 1
    with pytest.raises(IntegrityError, match="3 blocks with a priority are counted, 2 are there"):
        check_integrity(rig.cache)
    trie.prioritized -= 1
    trie.retained_bytes[rig.namespace.ordinal] += 1
    with pytest.raises(IntegrityError, match="bytes are retained by namespace"):
        check_integrity(rig.cache)
    trie.retained_bytes[rig.namespace.ordinal] -= 1
    rig.cache.retained.of_tenant[rig.cache.tenants.default] += 1
    with pytest.raises(IntegrityError, match="are counted as retained by tenant, not"):
        check_integrity(rig.cache)
    rig.cache.retained.of_tenant[rig.cache.tenants.default] -= 1
    trie.retained_groups[first] = 0
    with pytest.raises(IntegrityError, match=r"rows with wrong retained KV groups"):
        check_integrity(rig.cache)
    trie.retained_groups[first] = 1
    trie.priority[first] = 101
    with pytest.raises(IntegrityError, match="a priority beyond 100"):
        check_integrity(rig.cache)
    trie.priority[first] = 50


async def test_a_wish_costs_the_same_with_any_number_of_namespaces(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 25,000 namespaces that had retained blocks, each wish took 8 ms of the event loop."""
    rig = make_rig(cpu=80)
    for number in range(30):
        home = rig.register(salt=number.to_bytes(2, "big"))
        await rig.put([1], namespace=home)
        assert await rig.cache.retain(home, rig.chain([1], home), [KEEP]) == 1
    await rig.put([2])
    asked: list[int] = []
    really = rig.cache.retained._tenant_of

    def tenant_of(ordinal: int) -> Tenant:
        asked.append(ordinal)
        return really(ordinal)

    monkeypatch.setattr(rig.cache.retained, "_tenant_of", tenant_of)
    await retain(rig, [2], KEEP)
    assert len(asked) <= 4
    assert rig.cache.retained.of_tenant[rig.cache.tenants.default] == 31 * PART_BYTES
    check_integrity(rig.cache)
