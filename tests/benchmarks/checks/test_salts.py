"""`benchmarks.checks.salts` fails when a promise about salts is broken."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.checks.salts import Salts, failures

WELL: dict[str, Any] = {
    "refused": 0,
    "daemon_refused": 0,
    "daemon_troubles": 0,
    "asked_in_use": 5,
    "found_in_use": 5,
    "daemon_asked_in_use": 5,
    "daemon_found_in_use": 5,
    "most_namespace_bytes": 9,
    "namespace_limit_bytes": 9,
    "daemon_namespace_bytes": 9,
    "daemon_namespace_bytes_after_restart": 9,
    "daemon_namespace_limit_bytes": 9,
    "growth_bytes": 0,
    "daemon_violations": [],
}


@pytest.mark.parametrize(
    "broken",
    [
        {"refused": 1},
        {"daemon_refused": 1},
        {"daemon_troubles": 1},
        {"found_in_use": 4},
        {"daemon_found_in_use": 4},
        {"most_namespace_bytes": 10},
        {"daemon_namespace_bytes": 10},
        {"daemon_namespace_bytes_after_restart": 10},
        {"growth_bytes": 17 << 20},
        {"daemon_violations": ["violation"]},
    ],
)
def test_what_is_broken_is_named(broken: dict[str, Any]) -> None:
    assert failures(WELL) == []
    (name, value) = next(iter(broken.items()))
    (found,) = failures(WELL | broken)
    assert found in value if name == "daemon_violations" else found.startswith(f"{name} is {value:g}")


async def test_salts_beyond_the_room_are_forgotten_but_those_in_use() -> None:
    salts = Salts(1, 4)
    salts.cache.namespace_room.limit_bytes = 256 << 10
    resident = await salts.run(200)
    assert len(resident) == 5 and salts.figures["refused"] == 0 and salts.cache.namespace_room.forgotten > 50
    assert salts.figures["found_in_use"] == salts.figures["asked_in_use"] == 2 * 13
