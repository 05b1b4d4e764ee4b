"""Namespaces are bounded by memory: the least recently used go, and nobody loses what he uses to another tenant."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from prefixd.base.errors import ExhaustedError, NamespaceClosedError
from prefixd.base.tenancy.tenants import Quota, Tenants
from prefixd.cache import Namespace, NamespaceSpec, PartSpec, Session
from prefixd.cache.background.forgetting import find_namespaces
from prefixd.cache.namespace_room import PART
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd_swap.codecs.part_shape import AXES, PartShape
from tests.rig import Rig

SPEC = NamespaceSpec("model", 2, (PartSpec("kv", 0, 4096),), bytes(8))


def salted(number: int, tenant: str = "default") -> NamespaceSpec:
    return msgspec.structs.replace(SPEC, salt=number.to_bytes(8, "little"), tenant=tenant)


def room_for(namespaces: int) -> int:
    """Bytes of so many namespaces beside the rig's own."""
    return (namespaces + 1) * SPEC.nbytes + 100


def session(rig: Rig, tenant: str = "default", *, reopens: bool = True) -> Session:
    return rig.cache.leases.open("engine", 1, 0.0, rig.cache.tenants.known(tenant), reopens=reopens)


async def use(rig: Rig, of: Session, spec: NamespaceSpec) -> tuple[int, Namespace]:
    """What an engine does with a salt: look, store what is missing; the blocks that were found."""
    namespace = await rig.cache.open_namespace(of, spec)
    lease = await rig.lease([1, 2], namespace=namespace)
    if lease is not None:
        found = len(lease.rows)
        rig.cache.release(rig.session, lease.id)
        return found, namespace
    await rig.put([1, 2], namespace=namespace)
    return 0, namespace


async def test_many_salts_through_one_session(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=4096, namespace_bytes=room_for(24))
    one = session(rig)
    for number in range(300):
        assert (await use(rig, one, salted(number)))[0] == 0
        found, _ = await use(rig, one, salted(number % 8))
        assert found == 2, "a salt in use is kept"
        assert rig.cache.namespaces.nbytes <= room_for(24)
    assert rig.cache.namespace_room.refused == 0 and rig.cache.namespace_room.forgotten >= 300 - 24
    assert len(one.namespaces) <= 25 and PART not in rig.cache.tiers.troubles
    assert len(rig.cache.tries) == 1
    rig.check()


async def test_a_namespace_that_is_used_by_its_id_alone_is_kept(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=256, namespace_bytes=room_for(8))
    one = session(rig)
    _, namespace = await use(rig, one, salted(0))
    identity = namespace.id
    del namespace
    for number in range(1, 60):
        await use(rig, one, salted(number))
        assert rig.cache.open_in(one, identity).spec == salted(0)
    assert (await use(rig, one, salted(0)))[0] == 2


async def test_a_restart_keeps_within_the_bound(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=64, disk=256, namespace_bytes=room_for(32))
    one = session(rig)
    for number in range(32):
        namespace = await rig.cache.open_namespace(one, salted(number))
        await rig.put([1], namespace=namespace, durable=True)
    del namespace
    await rig.restart()
    rig.cache.namespace_room.limit_bytes = room_for(8)  # it was lowered
    assert rig.cache.namespaces.counted > 30, "they come back"
    await rig.cache.namespace_room.trim()
    assert rig.cache.namespaces.nbytes <= room_for(8) and rig.cache.namespaces.counted > 2
    await rig.cache.mover.quiesce()
    assert rig.store is not None and len(rig.store.namespaces()) <= 9
    await rig.check_disk()


async def test_a_restart_with_as_many_as_a_quota_allows_forgets_none(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=64, disk=256, tenants=Tenants({"default": Quota(namespaces=5)}))
    one = session(rig)
    for number in range(8):
        namespace = await rig.cache.open_namespace(one, salted(number))
        await rig.put([1], namespace=namespace, durable=True)
    del namespace
    assert rig.cache.namespaces.count("default") == 5
    await rig.restart()
    await rig.cache.namespace_room.trim()
    assert (rig.cache.namespaces.count("default"), rig.cache.namespace_room.forgotten) == (5, 0)


async def test_what_is_held_pinned_or_reserved_is_kept_and_the_limit_is_a_trouble(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(cpu=64, namespace_bytes=room_for(4))
    one = session(rig)
    leased, pinned, reserved, called = [await rig.cache.open_namespace(one, salted(number)) for number in range(4)]
    identities = [each.id for each in (leased, pinned, reserved, called)]
    await rig.put([1, 2], namespace=leased)
    await rig.put([1, 2], namespace=pinned)
    lease = await rig.lease([1, 2], namespace=leased)
    await rig.cache.pins.pin(rig.cache.trie(pinned), np.array(rig.rows([1, 2], pinned)))
    reservation = await rig.cache.reserve(rig.session, reserved, rig.chain([1], reserved))
    del leased, pinned, reserved  # `called` is what a call has in hand
    with pytest.raises(ExhaustedError, match=r"in use.*server\.namespace_bytes"):
        await rig.cache.open_namespace(one, salted(9))
    assert all(identity in rig.cache.namespaces for identity in identities)
    assert PART in rig.cache.tiers.troubles and rig.cache.namespace_room.refused == 1
    assert rig.cache.tenants.default.refused["namespaces"] == 1
    assert lease is not None and not isinstance(reservation, int)
    rig.cache.release(rig.session, lease.id)
    del lease
    with pytest.raises(ExhaustedError):  # nobody looks again at once
        await rig.cache.open_namespace(one, salted(9))
    rig.clock.now += 2
    assert (await rig.cache.open_namespace(one, salted(9))).spec == salted(9)
    assert identities[0] not in rig.cache.namespaces and all(each in rig.cache.namespaces for each in identities[1:])
    assert PART not in rig.cache.tiers.troubles
    assert called.id == identities[3]
    rig.cache.release(rig.session, reservation.id)


async def test_the_trouble_ends_when_room_comes_back_by_itself(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(namespace_bytes=room_for(1))
    one = session(rig, reopens=False)
    await rig.cache.open_namespace(one, salted(1))
    with pytest.raises(ExhaustedError):
        await rig.cache.open_namespace(one, salted(2))
    rig.cache.namespace_room.check_trouble()
    assert PART in rig.cache.tiers.troubles
    rig.cache.leases.close(one)
    rig.cache.registration.forget_unused()
    rig.cache.namespace_room.check_trouble()
    assert PART not in rig.cache.tiers.troubles


async def test_a_client_that_would_not_register_again_loses_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(namespace_bytes=room_for(4))
    old, new = session(rig, reopens=False), session(rig)
    kept = [(await rig.cache.open_namespace(old, salted(number))).id for number in range(3)]
    for number in range(100):
        await rig.cache.open_namespace(new, salted(1000 + number))
    assert [old.namespace(identity).id for identity in kept] == kept
    with pytest.raises(NamespaceClosedError, match="register it"):
        new.namespace(rig.cache.namespaces._by_id[kept[0]].id)


def test_one_session_has_so_many_open_and_no_more(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    one = session(rig, reopens=False)
    for number in range(3000):
        one.open_namespace(rig.cache.register(salted(number)))
        if number > 1023:  # an old connector's cache: it registers anew what is not among its last 1,024
            assert one.namespace(rig.cache.register(salted(number - 1023)).id)
    assert len(one.namespaces) == 2048


async def test_no_tenant_makes_the_daemon_forget_what_another_uses(make_rig: Callable[..., Rig]) -> None:
    tenants = Tenants({"a": Quota(), "b": Quota(), "c": Quota()})
    rig = make_rig(cpu=1024, namespace_bytes=room_for(40), tenants=tenants)
    sessions = {name: session(rig, name) for name in ("a", "b", "c")}
    theirs = [salted(number, "b") for number in range(9)]  # within a quarter: four tenants
    for spec in theirs:
        await use(rig, sessions["b"], spec)
    for number in range(150):
        await use(rig, sessions["a"], salted(number, "a"))
        if number % 30 == 15:
            await use(rig, sessions["c"], salted(number, "c"))
    assert [(await use(rig, sessions["b"], spec))[0] for spec in theirs] == [2] * 9
    assert rig.cache.namespaces.count("c") == 5, "one that has little takes from the one that has most"
    assert tenants.known("a").refused == {}


async def test_a_quota_is_kept_by_forgetting_ones_own(make_rig: Callable[..., Rig]) -> None:
    tenants = Tenants({"a": Quota(namespaces=4), "b": Quota()})
    rig = make_rig(cpu=1024, tenants=tenants)
    one, other = session(rig, "a"), session(rig, "b")
    kept = (await use(rig, other, salted(1, "b")))[1].id
    for number in range(50):
        await use(rig, one, salted(number, "a"))
        assert rig.cache.namespaces.count("a") <= 4
    assert kept in rig.cache.namespaces and tenants.known("a").refused == {}
    held = [await rig.cache.open_namespace(one, salted(number, "a")) for number in range(100, 104)]
    rig.clock.now += 2
    with pytest.raises(ExhaustedError, match="4 of 4 namespaces are in use"):
        await rig.cache.open_namespace(one, salted(200, "a"))
    assert len(held) == 4 and PART not in rig.cache.tiers.troubles, "a quota is the operator's wish"


@pytest.mark.parametrize("seed", range(4))
async def test_random_uses_against_a_model(make_rig: Callable[..., Rig], seed: int) -> None:
    """Whatever is used, held and let go: the bound holds, what is held is there, blocks are found or missing whole."""
    chance = random.Random(seed)
    tenants = Tenants({"a": Quota(), "b": Quota(namespaces=5)})
    rig = make_rig(cpu=512, disk=512, namespace_bytes=room_for(12), tenants=tenants)
    sessions = [session(rig, name) for name in ("a", "a", "b")]
    held: dict[str, bytes] = {}
    for _ in range(150):
        of = chance.choice(sessions)
        spec = salted(chance.randrange(30), of.tenant.name)
        rig.clock.now += 1.5
        try:
            found, namespace = await use(rig, of, spec)
        except ExhaustedError:
            assert len(set(held.values())) >= 4
            continue
        assert found in (0, 2) and of.namespaces[namespace.id] is namespace
        if chance.random() < 0.1 and len(held) < 5:
            lease = await rig.lease([1, 2], namespace=namespace)
            assert lease is not None
            held[lease.id] = namespace.id
            del lease
        elif held and chance.random() < 0.1:
            identity = chance.choice(list(held))
            rig.cache.release(rig.session, identity)
            del held[identity]
        del namespace
        assert rig.cache.namespaces.nbytes <= room_for(12)
        assert rig.cache.namespaces.count("b") <= 5
        assert all(identity in rig.cache.namespaces for identity in held.values())
    for identity in held:
        rig.cache.release(rig.session, identity)
    rig.check()
    await rig.check_disk()


@pytest.mark.parametrize("shape", [None, PartShape("bfloat16", 2048, 16, 1024, 512, AXES)], ids=["no shape", "shape"])
@pytest.mark.parametrize(("parts", "name"), [(1, "m" * 64), (8, "m" * 64), (1, "m" * 1024), (200, "m")])
def test_a_namespace_takes_about_as_much_as_is_counted(parts: int, name: str, shape: PartShape | None) -> None:
    registry = NamespaceRegistry()
    nbytes = 4096 if shape is None else shape.nbytes
    groups = tuple(PartSpec(f"group {number}", 0, nbytes, shape=shape) for number in range(parts))
    spec = NamespaceSpec(name, 16, groups, bytes(32), "bfloat16", "token")
    encoded = msgspec.msgpack.encode(spec)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        opened: dict[bytes, Namespace] = {}
        for number in range(200):
            mine = msgspec.msgpack.decode(encoded, type=NamespaceSpec)
            mine = msgspec.structs.replace(mine, salt=number.to_bytes(32, "little"))
            each = registry.register(mine)
            opened[each.id] = each
        taken = (tracemalloc.get_traced_memory()[0] - before) / 200
    finally:
        tracemalloc.stop()
    assert taken < spec.nbytes < 4 * taken + 2048, taken


@pytest.mark.parametrize("turn", [1, 2])
async def test_what_is_registered_or_used_meanwhile_is_not_forgotten(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    """A namespace of another tenant that gets the ordinal of one that has gone, and one that is used again."""
    rig = make_rig(cpu=64, namespace_bytes=room_for(40))
    room = rig.cache.namespace_room
    for number in range(31):
        await rig.put([1], namespace=rig.cache.register(salted(number)))
    held = [rig.cache.register(salted(31))]
    rig.cache.tenants.known("b")
    turns, done = 0, list[bytes]()

    async def give_way() -> None:
        nonlocal turns
        turns += 1
        if turns == turn:
            ordinal = held.pop().ordinal
            room._drop(ordinal)
            new = rig.cache.registration.add(rig.cache.namespaces.register(salted(99, "b")))
            assert new.ordinal == ordinal
            done.extend([new.id, rig.cache.register(salted(20)).id])

    monkeypatch.setattr("prefixd.cache.namespace_room.give_way", give_way)
    monkeypatch.setattr("prefixd.cache.namespace_room._IN_ONE_TURN", 2)
    room.limit_bytes = room_for(10)
    await room.trim()
    assert len(done) == 2 and all(identity in rig.cache.namespaces for identity in done)
    assert rig.cache.namespaces.nbytes <= room_for(10)


async def test_blocks_of_namespaces_are_looked_at_in_slices(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=256)
    homes = [rig.cache.register(salted(number)) for number in range(4)]
    for home in homes:
        await rig.put(list(range(50)), namespace=home)
    pinned = await rig.cache.match(homes[3], rig.chain([0], homes[3]))
    rig.trie.pinned[pinned] = True
    monkeypatch.setattr("prefixd.cache.index.scan.SCANNED_AT_ONCE", 16)
    found = await find_namespaces(rig.trie, [home.ordinal for home in homes])
    turns = 0

    async def give_way() -> None:
        nonlocal turns
        turns += 1

    monkeypatch.setattr("prefixd.cache.namespace_room.give_way", give_way)
    monkeypatch.setattr("prefixd.cache.background.forgetting.give_way", give_way)
    assert await rig.cache.namespace_room._in_use(found) == {homes[3].ordinal} and turns >= 200 // 16
    some = await found.of([homes[0].ordinal, homes[2].ordinal])
    assert turns >= 2 * (200 // 16)
    assert set(rig.trie.namespace[some.rows].tolist()) == {homes[0].ordinal, homes[2].ordinal} and len(some) == 100
    assert (np.diff(rig.trie.depth[some.rows]) <= 0).all(), "children before parents"
    rig.trie.pinned[pinned] = False
