"""Judges samples and phases: each tenant's bytes against its quota, and its throughput during another's flood."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.common import harness
from prefixd.base.tiers import Tier
from prefixd.v1 import admin_pb2, cache_pb2

ISOLATION = 0.8
"""The least share of its throughput that a tenant must keep when another floods the daemon."""
_SHOWN = 20


@dataclass(slots=True)
class Levels:
    """Holds samples of what tenants have of the tiers against their quotas.

    Attributes:
        samples: how many looks there were.
        resting_samples: at how many of them a tenant rested that had something to lose.
        above_most: how often a tenant had more of a tier than its most.
        below_guarantee: how often a tenant that had once had what it is guaranteed of the CPU or the disk tier had
            less; or a tenant that rests had less than when it began to, and than it is guaranteed. In the GPU tier a
            tenant's requests take and give back memory as they begin and end, so there only one that rests is judged.
        lowest: by tenant and tier, the least that it had since then, as a share of its guarantee.
    """

    samples: int = 0
    resting_samples: int = 0
    above_most: int = 0
    below_guarantee: int = 0
    lowest: dict[str, float] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    _at_rest: dict[str, int] = field(default_factory=dict)
    """Least bytes that a resting tenant must keep, by tenant and tier."""

    def look(self, at_s: float, tenants: Iterable[admin_pb2.TenantStats], resting: str = "") -> None:
        """Takes in one sample; `resting`: a tenant that does nothing, from this sample on or for longer already."""
        self.samples += 1
        for tenant in tenants:
            used = {tier.tier: tier.used_bytes for tier in tenant.tiers}
            for quota in tenant.quota.tiers:
                who = f"{tenant.name} {_name(quota.tier)}"
                if quota.tier not in used:
                    continue
                if quota.HasField("most_bytes") and used[quota.tier] > quota.most_bytes:
                    self.above_most += 1
                    self._note(f"{at_s:.2f} s: {who} has {used[quota.tier]} of at most {quota.most_bytes} bytes")
                if tenant.name == resting:
                    self._judge_resting(at_s, who, quota.guaranteed_bytes, used[quota.tier])
                elif quota.guaranteed_bytes and quota.tier != cache_pb2.TIER_GPU:
                    self._judge_working(at_s, who, quota.guaranteed_bytes, used[quota.tier])

    def reached(self, tenants: Iterable[str], tiers: Iterable[str]) -> bool:
        """Whether each of these tenants has had what it is guaranteed of each of these tiers."""
        return all(f"{tenant} {tier}" in self.lowest for tenant in tenants for tier in tiers)

    def _judge_working(self, at_s: float, who: str, guaranteed: int, used: int) -> None:
        if used >= guaranteed or who in self.lowest:
            self.lowest[who] = min(self.lowest.get(who, 1e9), round(used / guaranteed, 4))
        if who in self.lowest and used < guaranteed:
            self.below_guarantee += 1
            self._note(f"{at_s:.2f} s: {who} has {used} of {guaranteed} guaranteed bytes")

    def _judge_resting(self, at_s: float, who: str, guaranteed: int, used: int) -> None:
        least = self._at_rest.setdefault(who, min(guaranteed, used))
        self.resting_samples += least > 0
        if used < least:
            self.below_guarantee += 1
            self._note(f"{at_s:.2f} s: {who}, which rests, has {used} of {least} bytes (guaranteed: {guaranteed})")

    def _note(self, line: str) -> None:
        if len(self.found) < _SHOWN:
            self.found.append(line)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time in which no tenant changed its load.

    Attributes:
        flooded: whether a tenant flooded the daemon meanwhile.
        rates: of the tenant that is watched: what it got done a second, by kind ("calls", "requests").
    """

    flooded: bool
    rates: Mapping[str, float]


def kept_shares(phases: Sequence[Phase], kind: str) -> list[float]:
    """For each flooded phase between two quiet ones: its rate, by the mean of theirs.

    By their mean, a machine that becomes slower or faster steadily changes nothing.
    """
    shares = []
    for before, during, after in zip(phases, phases[1:], phases[2:], strict=False):
        if during.flooded and not before.flooded and not after.flooded:
            quiet = (before.rates[kind] + after.rates[kind]) / 2
            shares.append(during.rates[kind] / quiet if quiet else 0.0)
    return shares


def isolation(phases: Sequence[Phase]) -> dict[str, float]:
    """By kind, the median share of its throughput that the tenant kept under the flood; 0 of what was not measured."""
    kinds = phases[0].rates if phases else {}
    return {kind: round(median(kept_shares(phases, kind) or [0.0]), 4) for kind in kinds}


def broken(result: Mapping[str, Any]) -> list[str]:
    """Returns the bounds that a result misses, one line each."""
    zero = ("below_guarantee", "above_most", "failed_calls", "integrity_violations")
    lines = harness.missed(result, zero=zero, least={"isolation": ISOLATION})
    if not result["resting_samples"]:
        lines.append("the tenant that rested had nothing to lose, so that nothing was shown")
    if result["unreached"]:
        lines.append(f"never had what they are guaranteed, so that nothing was shown: {', '.join(result['unreached'])}")
    return lines


def _name(tier: int) -> str:
    return Tier.from_wire(tier).label
