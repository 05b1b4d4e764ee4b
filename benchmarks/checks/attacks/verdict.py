"""The verdict on one attack, and the result of all attacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median_high
from typing import Any

import numpy as np

from benchmarks.checks.attacks.tenant_client import Sample

MOST_RATIO = 5.0
_SHOWN = 5
_P = 99


@dataclass(slots=True)
class Verdict:
    """The verdict on one attack."""

    name: str
    breaches: list[str] = field(default_factory=list)
    """Successes of the attack, one line each."""
    bystander_p99_ratio: float = 0.0
    """The median of `ratios`."""
    ratios: list[float] = field(default_factory=list)
    """One ratio for each run of the attack in which bystanders got answers."""
    p99_ms: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By kind of call: p99 in all quiet phases with the same settings, and during the attack."""
    samples: tuple[int, int] = (0, 0)
    """Calls of bystanders in these quiet phases, and during the attack."""
    honest_failures: int = 0
    failures: list[str] = field(default_factory=list)
    """The first of these failures."""
    found: dict[str, Any] = field(default_factory=dict)
    """Facts that the attacker has reported."""
    memory_mib: float = 0.0
    """Growth of the daemon's and its worker's memory during the attack."""
    not_made: str = ""
    """Reason why the attack did not take place; the verdict then proves nothing."""
    closed_by: str = ""
    seconds: float = 0.0

    @property
    def breached(self) -> bool:
        return bool(self.breaches)

    def fail(self, failures: Sequence[str]) -> None:
        """Counts calls of honest clients that failed or had a wrong answer."""
        self.honest_failures += len(failures)
        self.failures = [*self.failures, *failures][:_SHOWN]

    def add(self, again: Verdict) -> None:
        """Adds another run of the same attack: a breach or a failure counts if it happened in any run. `compare`
        computes the ratios."""
        if again.breached or again.not_made:
            self.found = again.found
        self.breaches += again.breaches
        self.honest_failures += again.honest_failures
        self.failures = [*self.failures, *again.failures][:_SHOWN]
        self.not_made = self.not_made or again.not_made
        self.memory_mib = max(self.memory_mib, again.memory_mib)
        self.seconds += again.seconds

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {
            "breached": self.breached,
            "bystander_p99_ratio": round(self.bystander_p99_ratio, 2),
            "ratios": [round(ratio, 2) for ratio in self.ratios],
            "closed_before": bool(self.closed_by),
            "memory_mib": round(self.memory_mib, 1),
            "seconds": round(self.seconds, 1),
        }

    def __str__(self) -> str:
        outcome = f"BREACHED: {'; '.join(self.breaches)}" if self.breaches else "held"
        if self.not_made:
            outcome = f"DID NOT TAKE PLACE ({self.not_made}), {outcome}"
        failures = f", {self.honest_failures} honest failures ({self.failures[0]})" if self.honest_failures else ""
        ratio = f"bystanders' p99 x {self.bystander_p99_ratio:.1f}"
        return f"{self.name}: {outcome}; {ratio}{failures} ({self.seconds:.0f} s)"


def compare(verdict: Verdict, quiet: Sequence[Sequence[Sample]], attacks: Sequence[Sequence[Sample]]) -> None:
    """Enters into the verdict how much longer calls took than in quiet phases. Can be called again with more phases.

    Kinds of calls take different times. So each call is divided by the median of its kind in the quiet phases, and the
    p99 of a phase is over calls of all kinds. It depends on about three calls, so one stall of the machine changes it.
    So the ratio uses the median of the quiet phases' p99s, and the median of the attack's ratios (of two, the greater).

    Args:
        verdict: gets the ratios.
        quiet: the bystanders' calls by quiet phase.
        attacks: the bystanders' calls by run of the attack.
    """
    by_kind: dict[str, list[float]] = {}
    for sample in (each for phase in quiet for each in phase):
        by_kind.setdefault(sample.kind, []).append(sample.seconds)
    usual = {kind: float(np.median(seconds)) for kind, seconds in by_kind.items()}

    def p99s(phases: Sequence[Sequence[Sample]]) -> list[float]:
        counted = ([each.seconds / usual[each.kind] for each in phase if each.kind in usual] for phase in phases)
        return [float(np.percentile(each, _P)) for each in counted if each]

    verdict.samples = sum(map(len, quiet)), sum(map(len, attacks))
    before, meanwhile = p99s(quiet), p99s(attacks)
    if not before or not meanwhile:
        return
    verdict.ratios = [each / float(np.median(before)) for each in meanwhile]
    verdict.bystander_p99_ratio = median_high(verdict.ratios)
    for kind, seconds in by_kind.items():
        then = [each.seconds for phase in attacks for each in phase if each.kind == kind]
        both = (float(np.percentile(each, _P)) * 1e3 if each else 0.0 for each in (seconds, then))
        first, second = (round(each, 2) for each in both)
        verdict.p99_ms[kind] = first, second


def totals(verdicts: Sequence[Verdict], skipped: dict[str, str]) -> dict[str, Any]:
    """The result of a run."""
    worst = max(verdicts, key=lambda verdict: verdict.bystander_p99_ratio, default=None)
    return {
        "breaches": sum(verdict.breached for verdict in verdicts),
        "honest_failures": sum(verdict.honest_failures for verdict in verdicts),
        "not_made": sum(bool(verdict.not_made) for verdict in verdicts),
        "worst_bystander_p99_ratio": round(worst.bystander_p99_ratio, 2) if worst else 0.0,
        "worst_scenario": worst.name if worst else "",
        "skipped": skipped,
        "seconds": round(sum(verdict.seconds for verdict in verdicts), 1),
        "scenarios": [verdict.plain() for verdict in verdicts],
    }


def complaints(result: dict[str, Any], wanted: Collection[str] = ()) -> list[str]:
    """Returns the bounds that a run has missed, one line each.

    Args:
        result: the result of `totals`.
        wanted: names of scenarios that had to run.
    """
    found = []
    breached = [each["name"] for each in result["scenarios"] if each["breached"]]
    if breached:
        found.append(f"{len(breached)} of {len(result['scenarios'])} attacks succeed: {', '.join(breached)}")
    if result["honest_failures"]:
        failing = [each["name"] for each in result["scenarios"] if each["honest_failures"]]
        found.append(f"{result['honest_failures']} calls of honest clients failed: {', '.join(failing)}")
    if idle := [f"{each['name']} ({each['not_made']})" for each in result["scenarios"] if each["not_made"]]:
        found.append(f"attacks did not take place: {', '.join(idle)}")
    slow = [each for each in result["scenarios"] if each["bystander_p99_ratio"] > MOST_RATIO]
    if slow:
        named = ", ".join(f"{each['name']} ({each['bystander_p99_ratio']:g})" for each in slow)
        found.append(f"bystanders' p99 grew to more than {MOST_RATIO:g} times: {named}")
    if missing := set(wanted) - {each["name"] for each in result["scenarios"]} - set(result["skipped"]):
        found.append(f"scenarios did not run: {', '.join(sorted(missing))}")
    return found
