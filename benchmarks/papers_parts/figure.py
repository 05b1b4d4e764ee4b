"""A figure or table of a paper: the paper's values, and how ours are measured.

Example: of vTensor's figure 8 a claim is "batch 16, over SGLang's Triton kernel: 3.49 times". Its `cpu` runs the
worker's attention over both kinds of memory and returns {"batch_peak": 1.9}; its `gpu` finds the same in what
`benchmarks.gpu` measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Values = Mapping[str, float]
"""Our values, by `Claim.key`. A claim that could not be measured is left out."""


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper or talk. machine: where it measured, unless a figure says otherwise."""

    name: str
    title: str
    source: str
    machine: str


@dataclass(frozen=True, slots=True)
class Claim:
    """One value of a figure.

    key: its name in a result.  text: what is compared, with the conditions.  unit: "x" for a ratio, "%", "s", "us".
    paper: the paper's value; None where it only draws it, and `words` then says what the paper says of it.
    """

    key: str
    text: str
    unit: str
    paper: float | None = None
    words: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure as lines: by name, the places on x and the values."""

    x: str
    y: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]

    def draw(self, axes: Any) -> None:
        """Draws the lines on axes from 0."""
        for name, (places, values) in self.lines.items():
            axes.plot(places, values, marker="o", markersize=3, label=name)
        axes.set_xlabel(self.x)
        axes.set_ylabel(self.y)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a measurement came to. details: further figures for the result file."""

    values: Values
    curve: Curve | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure or table.

    Attributes:
        name: "vtensor-8".
        place: "figure 8".
        shows: what it shows.
        claims: the paper's values.
        conditions: model and load that the paper measured with; its machine where that is not `Paper.machine`.
        ours: what we run.
        why: why our values differ.
        seconds: how long `cpu` takes on two cores.
        timed: True if values are times or depend on them, so that they need a machine that does nothing else.
        cpu: measures; its argument asks for the short form, which goes through everything and means nothing. None: a
            CPU cannot show it.
        gpu: our values in the parts of a result of `benchmarks.gpu`. Raises LookupError or ValueError where they are
            missing. None: `benchmarks.gpu` has no such values.
    """

    name: str
    paper: Paper
    place: str
    shows: str
    claims: Sequence[Claim]
    conditions: str
    ours: str
    why: str
    seconds: int = 0
    timed: bool = True
    cpu: Callable[[bool], Measured] | None = None
    gpu: Callable[[Mapping[str, Any]], Values] | None = None
