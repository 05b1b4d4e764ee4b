"""A result without a section of its own: its figures as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.report_parts.page import Section, Table
from benchmarks.report_parts.results import Result

_LEFT_OUT = ("benchmark", "circumstances")


def section(result: Result) -> Section:
    """Every single figure of the result, by its name in the file."""
    rows = [(name, _text(value)) for name, value in _figures(result.content) if name not in _LEFT_OUT]
    anchor = result.file.removesuffix(".json")
    return Section(anchor, anchor, f"Figures of benchmarks.{result.benchmark}.", result, tables=[Table(("", ""), rows)])


def _figures(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if name in _LEFT_OUT and not prefix:
            continue
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield prefix + name, value


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
