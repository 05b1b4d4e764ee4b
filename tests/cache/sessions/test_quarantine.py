"""Slots of a reservation that ended without its holder's word, while the holder may still write into them."""

from __future__ import annotations

import pytest

from prefixd.base.errors import ExhaustedError, NotFoundError
from prefixd.cache import Process, Reservation, Session
from prefixd.cache.sessions.reservations import ToFill
from tests.rig import MakeRig, Rig


async def reserved(rig: Rig, session: Session, prompt: list[int], **how: bool) -> Reservation:
    reservation = await rig.cache.reserve(session, rig.namespace, rig.chain(prompt), ToFill(ttl_s=5.0, **how))
    assert isinstance(reservation, Reservation)
    return reservation


async def silent(rig: Rig, *processes: Process, prompt: list[int] | None = None) -> Reservation:
    """A reservation of a session that those processes had the arena through, and whose stream has broken."""
    session = rig.open_session()
    session.processes.update(processes)
    reservation = await reserved(rig, session, prompt or [1, 2, 3])
    rig.cache.leases.close(session)
    return reservation


def used(rig: Rig) -> int:
    rig.check()
    return rig.cache.tiers.arena.pages.slots_used


@pytest.mark.parametrize("how", ["expired", "session ended"])
async def test_nobody_gets_the_slots_while_the_process_lives(make_rig: MakeRig, how: str) -> None:
    rig = make_rig(cpu=4)
    await rig.put([1])
    client = Process(4711)
    rig.session.processes.add(client)
    await reserved(rig, rig.session, [1, 2, 3, 4])
    if how == "expired":
        rig.clock.now += 5
        rig.cache.leases.expire(rig.clock())
    else:
        rig.cache.leases.close(rig.session)
    assert not rig.session.grants
    assert (used(rig), rig.cache.quarantine.nbytes) == (4, 3 * rig.part_bytes)
    assert not rig.trie.keep[: rig.trie.rows].any(), "what may be evicted does not depend on it"
    other = rig.open_session()
    partial = await rig.cache.reserve(other, rig.namespace, rig.chain([7, 8]))
    assert isinstance(partial, Reservation) and len(partial.slots) == 1, "only the block that could be evicted"
    with pytest.raises(ExhaustedError, match=f"{3 * rig.part_bytes} bytes wait for silent clients"):
        await rig.cache.reserve(other, rig.namespace, rig.chain([9]))
    rig.cache.process_ended(client)
    assert (used(rig), rig.cache.quarantine.nbytes) == (1, 0)
    assert not client.alive
    assert how == "session ended" or not rig.session.processes


async def test_the_holders_word_ends_it_even_from_a_new_session(make_rig: MakeRig) -> None:
    rig = make_rig()
    client, stranger = Process(1), Process(2)
    lost = await silent(rig, client)
    strange, again = rig.open_session(), rig.open_session()
    strange.processes.add(stranger)
    again.processes.add(client)
    for session in (rig.session, strange):  # one that has mapped nothing, and another process's
        with pytest.raises(NotFoundError, match="its session ended"):
            rig.cache.release(session, lost.id)
        assert used(rig) == 3
    with pytest.raises(NotFoundError, match="its session ended"):
        rig.cache.release(again, lost.id)
    assert used(rig) == 0
    with pytest.raises(NotFoundError):
        rig.cache.release(again, lost.id)


async def test_an_expired_reservation_is_given_up_in_its_own_session(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.session.processes.add(Process(1))
    reservation = await reserved(rig, rig.session, [1, 2])
    rig.clock.now += 5
    rig.cache.leases.expire(rig.clock())
    assert used(rig) == 2
    with pytest.raises(NotFoundError, match="its time was up"):
        rig.cache.release(rig.session, reservation.id)
    assert used(rig) == 0


async def test_all_processes_of_a_session_must_have_ended(make_rig: MakeRig) -> None:
    rig = make_rig()
    first, second = Process(1), Process(2)
    await silent(rig, first, second)
    await silent(rig, second, prompt=[7])
    rig.cache.process_ended(first)
    assert used(rig) == 4
    rig.cache.process_ended(second)
    assert used(rig) == 0


async def test_where_nobody_can_write_nothing_is_kept(make_rig: MakeRig) -> None:
    rig = make_rig()
    await silent(rig)  # a remote client, or one that never asked for the arena
    assert used(rig) == 0
    client = Process(1)
    rig.session.processes.add(client)
    await reserved(rig, rig.session, [1], by_daemon=True)  # a stream that the daemon copies itself
    given_up = await reserved(rig, rig.session, [2])
    rig.cache.release(rig.session, given_up.id)
    committed = await reserved(rig, rig.session, [3, 4])
    rig.fill(committed, 1)
    await rig.cache.commit(committed, 1)
    rig.cache.leases.close(rig.session)
    assert (used(rig), len(rig.cache.quarantine)) == (1, 0), "only the committed block"
    dead = Process(2, alive=False)
    await silent(rig, dead)
    assert used(rig) == 1


async def test_a_session_that_ends_while_its_reservation_is_made_leaves_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.session.processes.add(Process(1))
    take = rig.cache.mover.slots.allocate

    async def take_and_lose(*arguments: object, **options: object) -> list[list[int]]:
        slots = await take(*arguments, **options)  # type: ignore[arg-type]
        rig.cache.leases.close(rig.session)
        return slots

    rig.cache.mover.slots.allocate = take_and_lose  # type: ignore[method-assign, assignment]
    with pytest.raises(NotFoundError, match="is not open"):
        await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1, 2]))
    assert used(rig) == 0, "its client was never told where the slots are"


async def test_a_session_ends_with_the_last_process_that_had_its_memory(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4)
    session, other = rig.open_session(), rig.open_session()
    first, second = Process(4711), Process(4712)
    session.processes.update((first, second))
    await reserved(rig, session, [1, 2, 3])
    rig.cache.process_ended(first)
    assert session.id in rig.cache.leases.sessions
    rig.cache.process_ended(second)  # its stream may live on, in a child that it forked
    assert session.id not in rig.cache.leases.sessions and other.id in rig.cache.leases.sessions
    assert (used(rig), rig.cache.quarantine.nbytes) == (0, 0)
