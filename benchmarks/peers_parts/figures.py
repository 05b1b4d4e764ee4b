"""The figures of `benchmarks.peers`: of every cache in every round, their medians, and by how much prefixd is ahead."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.engines.vllm_figures import Run, Stage

PARTS = ("cold", "after restart")
"""All turns before the engine's restart, and the one after it."""
HIGHER_IS_BETTER = {"requests_per_s": True, "ttft_p50_s": False, "ttft_p95_s": False}


@dataclass(frozen=True, slots=True)
class Lead:
    """How prefixd compares with another cache in one figure, over the rounds."""

    part: str
    figure: str
    ours: float
    """The median of the rounds."""
    theirs: float
    ahead: float
    """The difference of the medians; positive where prefixd is better."""
    spread: float
    """From the least to the most of the rounds, of prefixd or of the other, whichever is more."""

    @property
    def clear(self) -> bool:
        """Whether prefixd is ahead by more than the rounds differ."""
        return self.ahead > self.spread

    def to_plain(self) -> dict[str, Any]:
        """As JSON types."""
        names = ("part", "figure", "ours", "theirs", "ahead", "spread", "clear")
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
            spread = max(max(values) - min(values) for values in (mine, other))
            us, them = statistics.median(mine), statistics.median(other)
            found.append(Lead(part, figure, us, them, us - them if higher else them - us, spread))
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
        f"where the rounds differ by {lead.spread:.3f}"
        for lead in leads(rounds, ours, theirs)
        if not lead.clear
    ]


def _parts(run: Run) -> dict[str, tuple[Stage, ...]]:
    return dict(zip(PARTS, (run.stages[:-1], run.stages[-1:]), strict=True))


def _figures(stages: Sequence[Stage]) -> dict[str, float]:
    waits = [reply.ttft_s for stage in stages for reply in stage.replies]
    p50, p95 = np.percentile(waits, (50, 95))
    return {
        "requests_per_s": len(waits) / sum(stage.elapsed_s for stage in stages),
        "ttft_p50_s": float(p50),
        "ttft_p95_s": float(p95),
    }
