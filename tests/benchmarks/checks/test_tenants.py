"""The tenants harness in short, and proof that it sees what it looks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks import tenants
from benchmarks.checks.tenancy.house import House
from benchmarks.checks.tenancy.isolation import Levels, Phase, broken, isolation, kept_shares
from benchmarks.checks.tenancy.left_behind import left_of_tenants
from benchmarks.common.harness import BenchmarkError
from prefixd.base.tenancy.tenants import Role
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, NamespaceSpec, PartSpec
from prefixd.settings import Settings
from prefixd.v1 import admin_pb2, cache_pb2

CPU, DISK = cache_pb2.TIER_CPU, cache_pb2.TIER_DISK


def has(name: str, cpu: int, disk: int = 0) -> admin_pb2.TenantStats:
    """A tenant with 100 bytes guaranteed of the CPU tier and 200 at most, and at most 50 of the disk tier."""
    return admin_pb2.TenantStats(
        name=name,
        quota=admin_pb2.TenantQuota(
            tiers=[
                admin_pb2.TierQuota(tier=CPU, guaranteed_bytes=100, most_bytes=200),
                admin_pb2.TierQuota(tier=DISK, guaranteed_bytes=0, most_bytes=50),
            ]
        ),
        tiers=[
            admin_pb2.TenantTierUse(tier=CPU, used_bytes=cpu),
            admin_pb2.TenantTierUse(tier=DISK, used_bytes=disk),
        ],
    )


def test_a_guarantee_counts_from_when_it_was_reached() -> None:
    levels = Levels()
    for used in (0, 99, 100, 150, 200):
        levels.look(1.0, [has("a", used)])
    assert (levels.samples, levels.below_guarantee, levels.above_most, levels.found) == (5, 0, 0, [])
    assert levels.reached(["a"], ["cpu"]) and not levels.reached(["a", "b"], ["cpu"])
    levels.look(2.0, [has("a", 100), has("b", 40)])
    assert levels.below_guarantee == 0 and levels.lowest == {"a cpu": 1.0}
    levels.look(2.5, [has("a", 99), has("b", 40)])
    assert levels.below_guarantee == 1 and levels.lowest == {"a cpu": 0.99}
    assert levels.found == ["2.50 s: a cpu has 99 of 100 guaranteed bytes"]


def test_who_rests_loses_nothing_of_what_it_is_guaranteed() -> None:
    levels = Levels()
    for used in (150, 120, 100):
        levels.look(1.0, [has("b", used)], resting="b")
    assert (levels.below_guarantee, levels.resting_samples) == (0, 3)
    levels.look(2.0, [has("b", 99), has("a", 1)], resting="b")
    assert levels.below_guarantee == 1
    assert levels.found == ["2.00 s: b cpu, which rests, has 99 of 100 bytes (guaranteed: 100)"]
    poor = Levels()
    for used in (60, 60, 59):
        poor.look(1.0, [has("b", used)], resting="b")
    assert poor.below_guarantee == 1
    empty = Levels()
    empty.look(1.0, [has("b", 0)], resting="b")
    assert empty.resting_samples == 0


def test_more_than_the_most_of_any_tier_is_seen() -> None:
    levels = Levels()
    levels.look(1.0, [has("a", 201, 50), has("b", 200, 51)])
    assert levels.above_most == 2
    assert levels.found == ["1.00 s: a cpu has 201 of at most 200 bytes", "1.00 s: b disk has 51 of at most 50 bytes"]


def test_isolation_is_by_the_quiet_phases_around_a_flood() -> None:
    """A machine that becomes slower steadily, and a flood that takes a tenth of the calls and half of the requests."""
    phases = [
        Phase(flooded, {"calls": speed * (0.9 if flooded else 1.0), "requests": speed * (0.5 if flooded else 1.0)})
        for flooded, speed in ((False, 100), (True, 90), (False, 80), (True, 70), (False, 60))
    ]
    assert kept_shares(phases, "calls") == [pytest.approx(0.9)] * 2
    assert isolation(phases) == {"calls": 0.9, "requests": 0.5}
    assert isolation(phases[:1]) == {"calls": 0.0, "requests": 0.0}
    idle, busy = Phase(False, {"calls": 0}), Phase(True, {"calls": 1})
    assert isolation([idle, busy, idle]) == {"calls": 0.0}


def test_each_bound_breaks() -> None:
    good: dict[str, Any] = dict.fromkeys(("below_guarantee", "above_most", "failed_calls", "integrity_violations"), 0)
    good |= {"isolation": 0.8, "unreached": [], "resting_samples": 1}
    assert broken(good) == []
    for name in ("below_guarantee", "above_most", "failed_calls", "integrity_violations"):
        assert broken({**good, name: 1}) == [f"{name} is 1"]
    assert broken({**good, "isolation": 0.79}) == ["isolation is 0.79, less than 0.8"]
    assert "a cpu" in broken({**good, "unreached": ["a cpu"]})[0]
    assert "nothing to lose" in broken({**good, "resting_samples": 0})[0]


def test_a_run_begins_and_ends_quiet() -> None:
    assert [tenants.phases_in(seconds) for seconds in (3, 24, 30, 120)] == [3, 3, 5, 15]


def test_a_house_has_a_token_for_each_tenant_and_role(tmp_path: Path) -> None:
    house = House(tmp_path, {"a": {"cpu_most": "1MiB", "sessions": 3}, "b": {}}, port=7)
    settings = Settings.load(None, {key: str(value) for key, value in house.settings.items()}, {})
    assert settings.quotas["a"].sessions == 3 and settings.quotas["a"].tiers[1].most_bytes == 1 << 20
    assert settings.server.tcp == "127.0.0.1:7" and settings.server.tokens == tmp_path / "tokens"
    lines = [line.split() for line in (tmp_path / "tokens").read_text().splitlines()]
    assert {(tenant, role): token for _, role, token, tenant in lines} == {
        (tenant, role): house.token(tenant, role) for tenant in ("a", "b") for role in Role
    }
    assert (tmp_path / "tokens").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_what_is_left_of_a_tenant_is_found(tmp_path: Path) -> None:
    house = House(tmp_path, {"a": {}})
    with DaemonProcess({"cpu.bytes": "4MiB", "disk.bytes": 0, **house.settings}) as daemon:
        with Client(daemon.address) as admin, Client(daemon.tcp, token=house.token("a")) as client:
            assert left_of_tenants(admin, 0.0) == []
            client.register(NamespaceSpec("left", 4, (PartSpec("full", 0, 64),)))
            assert left_of_tenants(admin, 0.0) == ["tenant a: 1 sessions are left over"]
            cache = admin.register(NamespaceSpec("left", 4, (PartSpec("full", 0, 64),)))
            cache.store(range(8), bytes(128))
            with cache.acquire(range(8)):
                left = " ".join(left_of_tenants(admin, 0.0))
                assert "tenant default: 1 sessions" in left and "tenant default: 1 grants" in left
        with Client(daemon.address) as admin:
            assert left_of_tenants(admin, 60.0) == []


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a daemon; how fast it is, and whether the tenants have filled it, is no matter here."""
    file = tmp_path / "result.json"
    monkeypatch.setattr(tenants, "_FILL_S", 0.0)
    monkeypatch.setattr(tenants, "_FLOOD", (16, 8))
    with pytest.raises(BenchmarkError, match="never had what they are guaranteed"):
        tenants.main(["--seconds", "3", "--json", str(file)])
    result = json.loads(file.read_text())
    assert (result["above_most"], result["failed_calls"], result["integrity_violations"]) == (0, 0, 0), result["found"]
    assert len(result["phases"]) == 3 and result["samples"] and result["done_a"]["calls"]
