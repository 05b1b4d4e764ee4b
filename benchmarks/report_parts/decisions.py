"""The sections of `benchmarks.scheduler` and `benchmarks.load_or_recompute`: how well and how fast it is decided."""

from __future__ import annotations

from typing import Any

from benchmarks import load_or_recompute as loads
from benchmarks import scheduler as queues
from benchmarks.report_parts.page import Card, Picture, Section, Table
from benchmarks.report_parts.results import Result
from benchmarks.report_parts.runs import duration


def scheduler(result: Result) -> Section:
    """What a decision of the queue takes, and how long requests wait."""
    content = result.content
    rows = [
        (
            policy,
            *(f"{content['decision_us'][where][policy]['p99']:.0f}" for where in content["decision_us"]),
            _wait(wait),
        )
        for policy, wait in content["longest_wait_s"].items()
        if policy in content["decision_us"]["daemon"]
    ]
    bounded = _wait(content["longest_wait_s"]["fpf with a bound"])
    return Section(
        "scheduler",
        "The queue: what a decision takes, and who waits",
        f"{content['waiting']:,} requests wait. The longest wait is that of a simulated queue of {content['limit']} "
        f"that never runs empty, one request a second; Relaxed-FPF's is at most {content['relaxed_fpf_bound_s']:g} s "
        f"by proof, and FPF's with a starvation bound was {bounded}.",
        result,
        pictures=[
            Picture("A decision, by policy", lambda figure: queues.draw(figure.subplots(), dict(content)), height_in=3)
        ],
        tables=[Table(("policy", *(f"{where}, p99, us" for where in content["decision_us"]), "longest wait"), rows)],
        cards=[
            Card(
                "Does the queue keep up?",
                f"{content['decision_us_p99']:.0f} us a decision",
                f"at most, p99, with {content['waiting']:,} requests waiting",
                "scheduler",
            )
        ],
    )


def load_or_recompute(result: Result) -> Section:
    """Whether the better of loading and computing was chosen, over disks and lengths."""
    content = result.content
    points: list[dict[str, Any]] = content["points"]
    slowest, fastest = (end(point["mb_per_s"] for point in points) for end in (min, max))
    rows = [
        (
            f"{point['mb_per_s']:g} MB/s, {point['latency_ms']:g} ms",
            f"{point['tokens']:,}",
            *(duration(point["ttft_ms"][mode] / 1000) for mode in loads.MODES),
            f"{point['regret']:+.1%}",
        )
        for point in points
    ]
    return Section(
        "load_or_recompute",
        "Load or recompute: time to the first token by disk and length",
        f"At worst {content['worst_regret']:.1%} later than the better of always loading and always computing "
        f"({content['worst_point']}); earlier than both at {content['both_at_once_wins']} of {len(points)} points. A "
        f"load whose disk turns slow ends {content['abandoned_ratio']:g} times as late as computing from that moment.",
        result,
        pictures=[Picture("auto against the better of always and never", lambda f: loads.draw(f.subplots(), content))],
        tables=[Table(("disk", "tokens", *loads.MODES, "auto against the better"), rows)],
        cards=[
            Card(
                "Load or compute, on a slow disk?",
                "scheduler.load = auto",
                f"at most {max(content['worst_regret'], 0):.0%} later than the better of loading and computing, on "
                f"disks from {slowest:g} to {fastest:g} MB/s",
                "load_or_recompute",
            )
        ],
    )


def _wait(seconds: float | None) -> str:
    return "for ever" if seconds is None else f"{seconds:,.0f} s"
