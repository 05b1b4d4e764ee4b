"""One HTML page without anything that has to be fetched: style, figures and text are in it."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.report_parts.results import Result

Draw = Callable[[Any], None]
"""Fills a matplotlib figure."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of the table at the top: what to set for one kind of requests, with the figures that decide it."""

    requests: str
    policy: str
    policy_why: str
    memory: str
    memory_why: str
    gain: str
    anchor: str
    """The section that shows it."""


@dataclass(frozen=True, slots=True)
class Card:
    """A further answer below that table."""

    question: str
    answer: str
    why: str
    anchor: str
    """The section that shows it."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure, and in words what is to be seen in it."""

    says: str
    draw: Draw
    width_in: float = 9.0
    height_in: float = 3.4


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; the row whose number is `best` is marked."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: int | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """One result."""

    anchor: str
    title: str
    finding: str
    """What it shows, in a sentence."""
    result: Result
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    choices: Sequence[Choice] = ()
    cards: Sequence[Card] = field(default_factory=tuple)


def render(sections: Sequence[Section], others: Sequence[Section]) -> str:
    """The page: choices and cards of `sections`, then the sections; `others` folded away at its end."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["svg"] = svg
    cards = [card for section in sections for card in section.cards]
    choices = [choice for section in sections for choice in section.choices]
    return environment.get_template("page.html.j2").render(
        choices=choices, cards=cards, sections=sections, others=others
    )


@cache
def svg(picture: Picture) -> str:
    """The picture as the address of an image that is written out in the address itself. Raises as its `draw`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "prefixd",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.axisbelow": True,
        "text.parse_math": False,  # a dollar sign in a name is one
    }
    with rc_context(style):
        figure = Figure(figsize=(picture.width_in, picture.height_in), layout="constrained")
        picture.draw(figure)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
