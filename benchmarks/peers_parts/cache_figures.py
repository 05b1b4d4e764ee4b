"""The figures of `benchmarks.peers`: of every cache in every round, their medians, and by how much prefixd is ahead."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.engines.vllm_figures import Run, Stage

COLD, RESTARTED = PARTS = ("cold", "after restart")
"""All turns before the engine's first restart, and the others."""
HIGHER_IS_BETTER = {"requests_per_s": True, "ttft_p50_s": False, "ttft_p95_s": False}


@dataclass(frozen=True, slots=True)
class Lead:
    """How prefixd compares with another cache in one figure, over the rounds."""

    part: str
    figure: str
    ours: float
    """The median of the rounds."""
    theirs: float
    by_round: tuple[float, ...]
    """By how much prefixd is better in each round. The two of a round are neighbours in time, so what else the machine
    did is in both."""

    @property
    def ahead(self) -> float:
        """The median of the rounds' leads; positive where prefixd is better."""
        return statistics.median(self.by_round)

    @property
    def spread(self) -> float:
        """From the least lead of a round to the most."""
        return max(self.by_round) - min(self.by_round)

    @property
    def clear(self) -> bool:
        """Whether prefixd is ahead by more than its lead differs between the rounds."""
        return self.ahead > self.spread

    def to_plain(self) -> dict[str, Any]:
        names = ("part", "figure", "ours", "theirs", "by_round", "ahead", "spread", "clear")
        return {name: getattr(self, name) for name in names}


def figures(run: Run) -> dict[str, dict[str, float]]:
    """By part: requests a second, and seconds to the first token."""
    return {part: _figures(stages) for part, stages in _parts(run).items()}


def leads(rounds: Sequence[Mapping[str, Run]], ours: str, theirs: str) -> list[Lead]:
    """`ours` against `theirs`, each figure of each part."""
    found = []
    for part in PARTS:
        for figure, higher in HIGHER_IS_BETTER.items():
            mine, other = ([figures(each[name])[part][figure] for each in rounds] for name in (ours, theirs))
            by_round = tuple(us - them if higher else them - us for us, them in zip(mine, other, strict=True))
            found.append(Lead(part, figure, statistics.median(mine), statistics.median(other), by_round))
    return found


def summary(rounds: Sequence[Mapping[str, Run]]) -> dict[str, Any]:
    """By cache and part: the median of each figure, its value in every round, and the prompt tokens of all rounds."""
    made: dict[str, Any] = {}
    for name in rounds[0]:
        made[name] = {}
        for part in PARTS:
            values = {
                figure: [round(figures(each[name])[part][figure], 4) for each in rounds] for figure in HIGHER_IS_BETTER
            }
            stages = [stage for each in rounds for stage in _parts(each[name])[part]]
            made[name][part] = {
                **{figure: statistics.median(each) for figure, each in values.items()},
                "rounds": values,
                "prompt_tokens": {
                    where: sum(stage.prompt.to_plain()[where] for stage in stages)
                    for where in ("total", "computed", "local", "external")
                },
            }
    return made


def other_tokens(rounds: Sequence[Mapping[str, Run]]) -> list[str]:
    """A line for each run that gave other tokens than the first one did."""
    expected = next(iter(rounds[0].values())).outputs
    found = []
    for number, each in enumerate(rounds, 1):
        for name, run in each.items():
            different = sum(one != other for one, other in zip(run.outputs, expected, strict=True))
            if different:
                found.append(f"round {number}: {different} of {len(expected)} requests got other tokens with {name}")
    return found


def not_ahead(rounds: Sequence[Mapping[str, Run]], ours: str, theirs: str) -> list[str]:
    """A line for each figure in which `ours` is not clearly ahead of `theirs`."""
    return [
        f"{lead.part}, {lead.figure}: {lead.ours:.3f} with {ours}, {lead.theirs:.3f} with {theirs}, "
        f"ahead by {lead.ahead:.3f}, which differs between the rounds by {lead.spread:.3f}"
        for lead in leads(rounds, ours, theirs)
        if not lead.clear
    ]


def after_restart(number: int) -> str:
    """The name of the stage behind the engine's restart of this number, counted from 1."""
    return f"{RESTARTED} {number}"


def _parts(run: Run) -> dict[str, tuple[Stage, ...]]:
    parts: dict[str, tuple[Stage, ...]] = dict.fromkeys(PARTS, ())
    for stage in run.stages:
        parts[RESTARTED if stage.name.startswith(RESTARTED) else COLD] += (stage,)
    return parts


def _figures(stages: Sequence[Stage]) -> dict[str, float]:
    waits = [reply.ttft_s for stage in stages for reply in stage.replies]
    p50, p95 = np.percentile(waits, (50, 95))
    return {
        "requests_per_s": len(waits) / sum(stage.elapsed_s for stage in stages),
        "ttft_p50_s": float(p50),
        "ttft_p95_s": float(p95),
    }
