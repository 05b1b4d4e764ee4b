"""Sessions, leases and reservations: how each ends, and what is said about it afterwards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from itertools import pairwise

import pytest

from prefixd.base.errors import (
    ExhaustedError,
    InvalidArgumentError,
    NotFoundError,
    PreconditionError,
    SessionEndedError,
    UnavailableError,
    UnsupportedError,
)
from prefixd.base.tenancy.tenants import Quota, Tenants
from prefixd.cache import Lease, Reservation
from prefixd.cache.index.trie import CPU
from prefixd.cache.options import CacheOptions
from prefixd.cache.sessions.lease_table import LeaseTable
from prefixd.cache.sessions.reservations import ToFill
from tests.rig import Rig


def make_table(tenants: Tenants | None = None, *, max_sessions: int = 1) -> LeaseTable:
    return LeaseTable(
        lambda work: None,
        lambda session: None,
        CacheOptions(default_ttl_s=60.0, max_ttl_s=100.0, max_sessions=max_sessions, max_grants=4),
        tenants or Tenants(),
    )


async def test_a_lease_released_twice_says_so(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    await rig.put([1, 2])
    lease = await rig.lease([1, 2])
    assert lease is not None
    rig.cache.release(rig.session, lease.id)
    with pytest.raises(NotFoundError, match=f"{lease.id} is over: it was released"):
        rig.cache.release(rig.session, lease.id)
    with pytest.raises(NotFoundError, match="5-beef was never granted"):
        rig.cache.release(rig.session, "5-beef")
    with pytest.raises(NotFoundError, match=r"\(empty\) was never granted"):
        rig.cache.release(rig.session, "")


async def test_leases_expire_when_their_time_is_up_and_not_before(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    await rig.put([1, 2])
    lease = await rig.lease([1, 2], ttl_s=5.0)
    assert lease is not None
    rig.clock.now = lease.expires_s - 0.001
    assert rig.cache.leases.expire(rig.clock()) == 0
    rig.clock.now = lease.expires_s
    assert rig.cache.leases.expire(rig.clock()) == 1
    with pytest.raises(NotFoundError, match="its time was up; acquire or reserve again"):
        rig.cache.release(rig.session, lease.id)
    assert not rig.trie.holds[lease.rows].any()


async def test_a_renewed_lease_lives_on_and_an_unknown_one_renews_none(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    await rig.put([1, 2])
    lease = await rig.lease([1, 2], ttl_s=5.0)
    reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([3]), ToFill(ttl_s=5.0))
    assert lease is not None and isinstance(reservation, Reservation)
    leases = rig.cache.leases
    rig.clock.now += 4
    with pytest.raises(NotFoundError, match="never granted"):
        leases.renew(rig.session, [lease.id, "5-beef"], 5.0, rig.clock())
    with pytest.raises(NotFoundError, match="never granted to this session"):
        leases.renew(rig.open_session(), [lease.id], 5.0, rig.clock())
    rig.clock.now += 0.5
    leases.renew(rig.session, [reservation.id], 5.0, rig.clock())
    rig.clock.now += 0.5
    assert leases.expire(rig.clock()) == 1, "the reservation alone was renewed"
    assert list(rig.session.grants) == [reservation.id]
    with pytest.raises(NotFoundError, match="its time was up"):
        leases.renew(rig.session, [reservation.id, lease.id], 5.0, rig.clock())
    rig.clock.now += 4.5
    assert leases.expire(rig.clock()) == 1
    assert not rig.session.grants


async def test_a_reservation_that_expired_cannot_be_committed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1, 2]), ToFill(ttl_s=5.0))
    assert isinstance(reservation, Reservation)
    rig.fill(reservation)
    rig.clock.now += 5
    assert rig.cache.leases.expire(rig.clock()) == 1
    with pytest.raises(NotFoundError, match="its time was up"):
        await rig.cache.commit(reservation, 2)
    assert rig.rows([1, 2]) == []
    assert rig.cache.tiers.arena.pages.used_bytes == 0


async def test_a_reservation_is_committed_once(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1, 2]))
    assert isinstance(reservation, Reservation)
    with pytest.raises(InvalidArgumentError, match=f"commit of 3 blocks, but reservation {reservation.id} has 2"):
        await rig.cache.commit(reservation, 3)
    rig.fill(reservation)
    assert await rig.cache.commit(reservation, 2) == (2, 0)
    with pytest.raises(NotFoundError, match="it was committed"):
        await rig.cache.commit(reservation, 2)


async def test_a_partial_commit_gives_the_rest_back(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=4)
    reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1, 2, 3, 4]))
    assert isinstance(reservation, Reservation)
    assert len(rig.rows([1, 2, 3, 4])) == 0, "nothing is visible before commit"
    rig.fill(reservation, 1)
    assert await rig.cache.commit(reservation, 1) == (1, 0)
    assert await rig.get([1, 2, 3, 4]) == 1
    assert rig.cache.tiers.arena.pages.slots_used == 1
    empty = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1, 2]))
    assert isinstance(empty, Reservation) and empty.first_block == 1
    assert await rig.cache.commit(empty, 0) == (0, 0)
    assert rig.cache.tiers.arena.pages.slots_used == 1


async def test_a_session_takes_all_it_was_granted_with_it(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=4)
    await rig.put([1, 2])
    lease = await rig.lease([1, 2])
    reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1, 2, 3]))
    assert lease is not None and isinstance(reservation, Reservation)
    leases = rig.cache.leases
    assert (leases.count(Lease), leases.count(Reservation)) == (1, 1)
    leases.close(rig.session)
    leases.close(rig.session)
    assert (leases.count(Lease), leases.count(Reservation)) == (0, 0)
    assert rig.cache.tiers.arena.pages.slots_used == 2
    assert not rig.trie.keep[: rig.trie.rows].any()
    with pytest.raises(SessionEndedError, match="its session ended"):  # so that the SDK asks again in a new one
        await rig.cache.commit(reservation, 1)
    with pytest.raises(NotFoundError, match=f"session {rig.session.id[:8]} is not open"):
        leases.session(rig.session.id)


async def test_sessions_are_limited(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_sessions=2)
    second = rig.open_session()
    with pytest.raises(ExhaustedError, match=r"2 sessions are open.*server\.max_sessions"):
        rig.open_session()
    rig.cache.leases.close(second)
    assert rig.open_session().id != second.id


def test_a_session_that_ended_with_the_daemon_is_no_mistake_of_its_client() -> None:
    table = make_table()
    session = table.open("one", 1, 0.0, Tenants().default)
    table.close(session)
    with pytest.raises(NotFoundError, match="is not open"):
        table.session(session.id)
    table.ending = True
    with pytest.raises(UnavailableError, match="try again when it is back"):
        table.session(session.id)


def test_lifetimes_are_bounded() -> None:
    table = make_table()
    assert [table.ttl(wanted) for wanted in (0.0, 5.0, 500.0, math.inf)] == [60.0, 5.0, 100.0, 100.0]
    for wrong in (-1.0, math.nan):
        with pytest.raises(InvalidArgumentError, match=f"ttl_s is {wrong}"):
            table.ttl(wrong)


def test_a_tenant_opens_as_many_sessions_as_its_quota_allows() -> None:
    tenants = Tenants({"one": Quota(sessions=2)})
    table, one = make_table(tenants, max_sessions=100), tenants.known("one")
    first, _ = (table.open("a", 1, 0.0, one) for _ in range(2))
    with pytest.raises(ExhaustedError, match=r"tenant one: 2 of 2 sessions.*tenants\.one\.sessions.*close one"):
        table.open("a", 1, 0.0, one)
    assert one.refused["sessions"] == 1
    table.open("b", 1, 0.0, tenants.default)
    table.close(first)
    table.close(first)
    table.open("a", 1, 0.0, one)
    assert (table.sessions_of[one], table.sessions_of[tenants.default]) == (2, 1)


@pytest.mark.parametrize(("max_sessions", "kept"), [(64, 8), (9, 3), (2, 0)])
def test_no_tenant_takes_all_sessions(max_sessions: int, kept: int) -> None:
    tenants = Tenants()
    greedy, second = tenants.known("greedy"), tenants.known("second")
    table = make_table(tenants, max_sessions=max_sessions)
    table.open("early", 1, 0.0, tenants.default)
    left = max_sessions - kept - max(kept, 1)
    for _ in range(left):
        table.open("g", 1, 0.0, greedy)
    with pytest.raises(ExhaustedError, match=rf"tenant greedy: .* {max_sessions} \(limit server\.max_sessions\)"):
        table.open("g", 1, 0.0, greedy)
    for _ in range(kept):
        table.open("s", 1, 0.0, second)
    for _ in range(kept - 1):
        table.open("d", 1, 0.0, tenants.default)
    assert len(table.sessions) == max_sessions


@pytest.mark.parametrize("name", ["x" * 257, "two\nlines", "\x1b[31mred", "\u202ereversed"])
def test_a_clients_name_can_be_shown(name: str) -> None:
    table = make_table()
    with pytest.raises(InvalidArgumentError, match=f"client_name has {len(name)} characters.*at most 256, printable"):
        table.open(name, 1, 0.0, Tenants().default)
    table.open("é" * 256, 1, 0.0, Tenants().default)


async def test_grants_are_limited_for_each_session_and_each_tenant(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    await rig.put([1])
    tenant, leases = rig.session.tenant, rig.cache.leases
    leases.max_grants = 2
    first, _ = [await rig.lease([1]) for _ in range(2)]
    assert first is not None
    of_session = rf"session {rig.session.id[:8]} of tenant default has 2 leases.*server\.max_grants"
    for grant in (rig.lease([1]), rig.put([2])):
        with pytest.raises(ExhaustedError, match=of_session):
            await grant
    other = rig.open_session()
    tenant.quota = Quota(grants=3)
    assert isinstance(await rig.cache.reserve(other, rig.namespace, rig.chain([3])), Reservation)
    with pytest.raises(ExhaustedError, match=r"tenant default: 3 of 3 leases.*tenants\.default\.grants"):
        await rig.cache.acquire(other, rig.namespace, rig.chain([1]))
    assert tenant.refused["grants"] == 3
    rig.cache.release(rig.session, first.id)
    assert await rig.cache.acquire(other, rig.namespace, rig.chain([1])) is not None
    leases.close(other)
    assert leases.grants_of[tenant] == 1
    rig.check()


async def test_what_was_granted_to_others_meanwhile_counts(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.cache.leases.max_grants = 1
    chains = [rig.chain([prompt]) for prompt in (1, 2)]
    both = await asyncio.gather(
        *(rig.cache.reserve(rig.session, rig.namespace, chain) for chain in chains), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in both) == ["ExhaustedError", "Reservation"]
    assert rig.cache.tiers.arena.pages.slots_used == 1
    rig.check()


async def test_renew_takes_no_more_ids_than_a_session_can_have(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    await rig.put([1])
    lease = await rig.lease([1])
    assert lease is not None
    leases = rig.cache.leases
    leases.max_grants = 2
    leases.renew(rig.session, [lease.id] * 2, 5.0, rig.clock())
    with pytest.raises(InvalidArgumentError, match=r"lease_ids has 3 ids.*at most 2.*server\.max_grants"):
        leases.renew(rig.session, [lease.id] * 3, 5.0, rig.clock())


async def test_renewing_for_ever_keeps_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    await rig.put([1])
    lease = await rig.lease([1])
    assert lease is not None
    for tenths in range(500, 0, -1):
        rig.cache.leases.renew(rig.session, [lease.id], tenths / 10, rig.clock())
    assert sum(map(len, rig.cache.leases._due.values())) == 1


async def test_many_grants_whose_time_is_up_end_in_many_turns(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.cache.sessions.lease_table._EXPIRED_AT_ONCE", 3)
    rig = make_rig()
    await rig.put([1])
    for ttl_s in (1.0, 1.0, 2.0, 2.0, 2.0):
        await rig.lease([1], ttl_s=ttl_s)
    rig.clock.now += 10
    assert [rig.cache.leases.expire(rig.clock()) for _ in range(3)] == [3, 2, 0]
    rig.check()


async def test_only_so_many_ended_leases_are_remembered(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.cache.sessions.lease_table._REMEMBERED", 2)
    rig = make_rig()
    await rig.put([1])
    ended = []
    for _ in range(3):
        lease = await rig.lease([1])
        assert lease is not None
        rig.cache.release(rig.session, lease.id)
        ended.append(lease.id)
    with pytest.raises(NotFoundError, match="never granted"):
        rig.cache.release(rig.session, ended[0])
    for lease_id in ended[1:]:
        with pytest.raises(NotFoundError, match="it was released"):
            rig.cache.release(rig.session, lease_id)


async def test_prompts_that_are_none_are_refused(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    with pytest.raises(InvalidArgumentError, match="token_ids is empty"):
        rig.cache.chain(rig.namespace, b"")
    with pytest.raises(InvalidArgumentError, match="token_ids has 7 bytes, not a multiple of 4"):
        rig.cache.chain(rig.namespace, bytes(7))
    short = rig.cache.chain(rig.namespace, bytes(4))
    assert await rig.cache.reserve(rig.session, rig.namespace, short) == 0, "no full block, so nothing to reserve"
    assert await rig.cache.acquire(rig.session, rig.namespace, short) is None


async def test_without_a_cpu_tier_nothing_is_leased(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=0, gpu=4)
    with pytest.raises(UnsupportedError, match=r"cpu\.bytes"):
        await rig.cache.acquire(rig.session, rig.namespace, rig.chain([1]))
    with pytest.raises(UnsupportedError, match=r"cpu\.bytes"):
        await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1]))
    rig.unhold(await rig.put_gpu([1, 2]), rig.cache.tiers.compute)
    assert await rig.cache.prefetch(rig.session, rig.namespace, rig.chain([1, 2])) == 0, "there is nowhere to bring it"


async def test_a_lease_covers_what_was_asked_for(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    await rig.put([1, 2, 3, 4])
    rows = rig.rows([1, 2, 3, 4])
    middle = await rig.lease([1, 2, 3, 4, 5], first_block=1, max_blocks=2)
    assert middle is not None and middle.rows.tolist() == rows[1:3]
    assert rig.trie.holds[rows, CPU].ravel().tolist() == [0, 1, 1, 0]
    assert await rig.lease([1, 2, 3, 4, 5], first_block=4) is None
    assert rig.cache.offsets(middle, [0]).ravel().tolist() == rig.trie.slots[rows[1:3], CPU, 0].tolist()


async def test_hits_are_counted_where_they_were_found(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(gpu=4, disk=8)
    await rig.put([1, 2], durable=True)
    rig.unhold(await rig.put_gpu([1]), rig.cache.tiers.compute)
    await rig.get([1, 2, 3])
    assert rig.cache.counters.asked_tokens == 6
    assert rig.cache.counters.hit_tokens == [2, 2, 0, 0]


async def test_durable_needs_a_disk(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    with pytest.raises(PreconditionError, match=r"disk\.bytes"):
        await rig.put([1], durable=True)
    assert rig.rows([1]) == []


async def test_every_lookup_is_hits_and_misses_and_a_second_lease_is_none(make_rig: Callable[..., Rig]) -> None:
    """asked = hit + missed, by the blocks that were asked for; a lease of what was counted before changes nothing."""
    rig = make_rig(cpu=8, disk=16)
    await rig.put([1, 2, 3], durable=True)
    await rig.restart()
    counters = rig.cache.counters
    lookups = [  # prompt, from, at most: (asked, found) blocks
        ([1, 2, 3, 4, 5], 0, 0, 5, 3),
        ([1, 2, 3, 4, 5], 2, 0, 3, 1),
        ([1, 2, 3, 4, 5], 0, 2, 2, 2),
        ([1, 2, 3, 4, 5], 4, 8, 1, 0),
        ([1, 2, 3], 9, 0, 0, 0),
        ([7, 8], 0, 0, 2, 0),
    ]
    for prompt, first, most, asked, found in lookups:
        before, hits = counters.asked_tokens, sum(counters.hit_tokens)
        for counted in (True, False, False):
            lease = await rig.lease(prompt, first_block=first, max_blocks=most, counted=counted)
            if lease is not None:
                rig.cache.release(rig.session, lease.id)
        assert (counters.asked_tokens - before, sum(counters.hit_tokens) - hits) == (2 * asked, 2 * found)
    assert counters.hit_tokens == [0, 2 * 3, 2 * 3, 0], "the first lookup found the blocks on disk, and brought them up"


async def test_a_grant_ends_at_its_last_deadline_however_often_it_was_renewed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=4)
    await rig.put([1])
    start_s, leases = rig.clock.now, rig.cache.leases
    later, sooner, gone = [await rig.lease([1], ttl_s=20.0) for _ in range(3)]
    assert later is not None and sooner is not None and gone is not None
    rig.cache.release(rig.session, gone.id)
    assert (leases.count(Lease), leases.count(Reservation)) == (2, 0)
    leases.renew(rig.session, [later.id], 50.0, start_s)
    leases.renew(rig.session, [sooner.id], 5.0, start_s)
    leases.renew(rig.session, [sooner.id], 10.0, start_s)
    for after_s, ended in ((4.0, 0), (5.0, 0), (9.0, 0), (10.0, 1), (20.0, 0), (49.0, 0), (50.0, 1), (99.0, 0)):
        assert leases.expire(start_s + after_s) == ended, f"after {after_s} s"
    assert leases.count(Lease) == 0
    assert not leases._due
    rig.check()


async def test_a_session_with_many_leases_ends_in_many_turns(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.cache.sessions.lease_table._ENDED_AT_ONCE", 2 * (2 + 2048))
    rig = make_rig(cpu=4)
    await rig.put([1, 2])
    for _ in range(7):
        assert await rig.lease([1, 2]) is not None
    held = rig.trie.holds[rig.rows([1, 2])[0], CPU]
    rig.cache.leases.close(rig.session)
    assert rig.cache.leases.count(Lease) == 0
    seen = []
    while rig.trie.keep.any():
        seen.append(int(held[0]))
        await asyncio.sleep(0)
    assert [before - after for before, after in pairwise([7, *dict.fromkeys(seen), 0])] == [2, 2, 2, 1]
    rig.check()


async def test_a_long_reservation_is_given_back_in_many_turns(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.cache.sessions.reservations._RELEASED_AT_ONCE", 4)
    rig = make_rig(cpu=16)
    reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain(list(range(15))))
    assert isinstance(reservation, Reservation)
    rig.cache.release(rig.session, reservation.id)
    assert rig.cache.tiers.arena.pages.slots_used == 11, "others have a turn now"
    again = await rig.cache.reserve(rig.session, rig.namespace, rig.chain(list(range(100, 116))))
    assert isinstance(again, Reservation) and len(again.slots) == 16, "what is being given back counts as free"
    rig.cache.release(rig.session, again.id)
    await rig.cache.mover.quiesce()
    assert rig.cache.tiers.arena.pages.slots_used == 0
    rig.check()
