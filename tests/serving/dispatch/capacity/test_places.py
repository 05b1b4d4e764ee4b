"""Which places one tenant may have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prefixd.serving.dispatch.capacity.places import Places


def request(tenant: str, beams: int = 1) -> Any:
    return SimpleNamespace(queued=SimpleNamespace(tenant=tenant), places=beams)


def may_start(places: Places, tenant: str, beams: int = 1) -> bool:
    asked = request(tenant, beams)
    return places.has_room_for(asked) and not places.must_wait(asked)


def started(places: Places, tenant: str, beams: int = 1) -> int:
    """How many of a tenant's can start one after the other."""
    count = 0
    while may_start(places, tenant, beams):
        places.add(request(tenant, beams))
        count += 1
    return count


def test_one_tenant_has_all() -> None:
    places = Places(8, 1, [])
    assert (started(places, "a"), places.free) == (8, 0)


def test_a_place_is_kept_for_each_tenant_that_has_none() -> None:
    places = Places(8, 3, [])
    assert started(places, "a") == 6
    assert started(places, "b") == 1, "the other one that is free is for c"
    assert (started(places, "c"), places.free) == (1, 0)


def test_at_most_half_of_all_are_kept() -> None:
    places = Places(8, 100, [request("a")])
    assert started(places, "a") == 3
    assert [started(places, tenant) for tenant in "bcdef"] == [1, 1, 1, 1, 0]
    assert started(Places(1, 100, []), "a") == 1


def test_places_are_nobodys_own_once_all_tenants_have_one() -> None:
    places = Places(8, 3, map(request, "abc"))
    assert started(places, "b") == 5


def test_a_wide_search_runs_beside_those_for_whom_places_are_kept() -> None:
    places = Places(8, 3, [])
    assert may_start(places, "a", 16)
    places.add(request("a", 16))
    assert places.free == 2
    assert not may_start(places, "a") and not may_start(places, "b", 16)
    assert started(places, "b") == 1 and started(places, "c") == 1


def test_there_is_one_wide_search_at_a_time() -> None:
    places = Places(8, 100, [request("a", 16)])
    waits = request("b", 16)
    assert places.free == 4 and places.has_room_for(waits) and places.must_wait(waits)


def test_a_search_without_other_tenants_runs_alone() -> None:
    places = Places(8, 1, [request("")])
    waits = request("", 16)
    assert not places.has_room_for(waits) and not places.must_wait(waits)
    places = Places(8, 1, [waits])
    assert places.free == 0


def test_the_limit_may_fall_below_what_is_taken() -> None:
    places = Places(2, 3, map(request, "aaabb"))
    assert places.free == -3 and not any(may_start(places, tenant) for tenant in "abc")
