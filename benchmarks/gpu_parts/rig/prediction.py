"""A figure that was predicted before a run, and what the run says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["CONFIRMED", "REFUTED", "NOT MEASURED"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A figure of a part, written down before it was measured.

    name: what is measured, with its conditions: "decode, 8 requests of 8,192 tokens".
    predicted: for people, with its unit: "95 to 120 us a layer".
    figure: finds the figure in the part's answer; None where it was not measured.
    at_least, at_most: beyond these, the prediction is refuted.
    """

    name: str
    predicted: str
    figure: Callable[[Mapping[str, Any]], float | None]
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if self.at_least is None and self.at_most is None:
            raise ValueError(f"nothing could refute the prediction {self.name!r}; give at_least or at_most")

    def judge(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The prediction, the figure and the verdict, to be written as JSON."""
        figure = self.figure(answer)
        verdict: Verdict = "NOT MEASURED"
        if figure is not None:
            low = self.at_least is not None and not figure >= self.at_least
            high = self.at_most is not None and not figure <= self.at_most
            verdict = "REFUTED" if low or high else "CONFIRMED"
        return {
            "name": self.name,
            "predicted": self.predicted,
            "at_least": self.at_least,
            "at_most": self.at_most,
            "figure": figure,
            "verdict": verdict,
        }


def line(judged: Mapping[str, Any]) -> str:
    """`CONFIRMED  decode, 8 requests of 8,192 tokens: 101 (predicted 95 to 120 us a layer, refuted above 150)`."""
    bounds = [("below", judged["at_least"]), ("above", judged["at_most"])]
    refuted = " or ".join(f"{side} {bound:g}" for side, bound in bounds if bound is not None)
    figure = "no figure" if judged["figure"] is None else f"{judged['figure']:g}"
    return f"{judged['verdict']:<12} {judged['name']}: {figure} (predicted {judged['predicted']}, refuted {refuted})"


def point_figure(key: str, **conditions: object) -> Callable[[Mapping[str, Any]], float | None]:
    """Finds `key` in the first of the answer's "points" that meets all `conditions`: `point_figure("us", batch=8)`."""

    def find(answer: Mapping[str, Any]) -> float | None:
        points: Sequence[Mapping[str, Any]] = answer.get("points", ())
        for point in points:
            if key in point and all(point.get(name) == value for name, value in conditions.items()):
                return float(point[key])
        return None

    return find
