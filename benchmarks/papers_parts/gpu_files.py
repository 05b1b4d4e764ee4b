"""What `benchmarks.gpu` measured, for the figures that a CPU cannot show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.papers_parts.figure import Figure, Values

COMMAND = "make gpu-check"
"""What measures them."""


@dataclass(frozen=True, slots=True)
class OnGpu:
    """A figure's values on a GPU. file: of the result."""

    values: Values
    device: str
    date: str
    commit: str
    file: str


def on_gpu(figure: Figure, files: Mapping[str, Mapping[str, Any]]) -> OnGpu | None:
    """A figure's values in the newest of these results, by name of the file, that has them; None if none has."""
    if figure.gpu is None:
        return None
    found = [(name, content) for name, content in files.items() if content.get("figures") == "measured"]
    for name, content in sorted(found, key=lambda each: each[1]["circumstances"]["date"], reverse=True):
        try:
            values = figure.gpu(content["parts"])
        except (LookupError, ValueError):  # ValueError: the most of no points
            continue
        where = content["circumstances"]
        return OnGpu(values, content["device"], where["date"], where["commit"], name)
    return None


def point(points: Iterable[Mapping[str, Any]], **wanted: object) -> Mapping[str, Any]:
    """The first of `points` with these values. Raises LookupError when there is none."""
    for candidate in points:
        if all(candidate.get(name) == value for name, value in wanted.items()):
            return candidate
    raise LookupError("no point with " + ", ".join(f"{name} = {value!r}" for name, value in wanted.items()))


def paged_us(of: Mapping[str, Any]) -> float:
    """Of a point of the part `attention`: microseconds a layer through block tables, or where no kernel reads them, of
    copying the blocks together. Raises LookupError."""
    microseconds: float = of["paged_us"] if "paged_us" in of else of["gathered_us"]
    return microseconds
