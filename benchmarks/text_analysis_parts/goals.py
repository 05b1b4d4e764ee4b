"""What the cache has to bring, as ratios of runs that took turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.text_analysis_parts.measuring import Measured, ratio, sooner
from benchmarks.text_analysis_parts.suites import EVERYTHING, FCFS, FCFS_ALONE, FPF, NO_CACHE, RELAXED_FPF


@dataclass(frozen=True, slots=True)
class Goal:
    """One ratio of two runs, and the least that it has to be; None where it is only told."""

    name: str
    prefix_tokens: int
    value: float
    at_least: float | None

    @property
    def met(self) -> bool:
        return self.at_least is None or self.value >= self.at_least

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def goals(measured: Sequence[Measured]) -> list[Goal]:
    """The goals of the suites `goals` and `header`."""
    return [*_of_goals(measured), *_of_header(measured)]


def _of_header(measured: Sequence[Measured]) -> list[Goal]:
    """Where prompts share a header and half are new, FPF and Relaxed-FPF are no slower than FCFS."""
    runs = {run.cell.serving: run for run in measured if run.suite == "header"}
    if not runs:
        return []
    fcfs = runs[FCFS]
    where = f"median first token, header of {fcfs.cell.header_tokens} tokens"
    return [
        Goal(f"{serving.name} over fcfs, {where}", fcfs.cell.prefix_tokens, sooner(runs[serving], fcfs), 1.0)
        for serving in (FPF, RELAXED_FPF)
    ]


def _of_goals(measured: Sequence[Measured]) -> list[Goal]:
    """Ratios of requests a second for each prefix length.

    A disk that is fast for the machine loads a prefix in less time than the other requests compute, whoever is first
    and without a prefetcher: a GPU tier that holds everything tells what there is to gain. What the policy has to gain
    is set for the slow disk and the shortest prefixes, of which it reads many.
    """
    mine = [run for run in measured if run.suite == "goals"]
    lengths = sorted({run.cell.prefix_tokens for run in mine})
    found: list[Goal] = []
    for length in lengths:
        runs = {
            (run.cell.serving, run.cell.disk_bytes_per_s is not None): run
            for run in mine
            if run.cell.prefix_tokens == length
        }
        fpf, no_cache, everything = runs[FPF, False], runs[NO_CACHE, False], runs[EVERYTHING, False]
        alone = runs[FCFS_ALONE, False]
        found += [
            Goal("fpf over no cache", length, ratio(fpf, no_cache), 4.0),
            Goal("fpf over fcfs without prefetch", length, ratio(fpf, alone), None),
            Goal("everything on gpu over fcfs without prefetch", length, ratio(everything, alone), None),
            Goal("fpf over everything on gpu", length, ratio(fpf, everything), 0.9),
            Goal("fpf with a slow disk over no cache", length, ratio(runs[FPF, True], no_cache), 1.0),
        ]
        if (slow := runs.get((FCFS_ALONE, True))) is not None:
            bound = None if slow.cell.takes_long else 1.3  # of a few requests nobody waits for the same prefix
            found.append(Goal("fpf over fcfs without prefetch, slow disk", length, ratio(runs[FPF, True], slow), bound))
    return found
