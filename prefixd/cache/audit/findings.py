"""The result of an audit: counts of what it checked, and contradictions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

_SHOWN = 3  # rows or slots named in one line


@dataclass(slots=True)
class Findings:
    """Counts, and contradictions by kind."""

    blocks: int = 0
    slots: int = 0
    sessions: int = 0
    leases: int = 0
    reservations: int = 0
    _wrong: dict[str, list[int]] = field(default_factory=dict)
    """By contradiction, its first rows or slots, and then their number; empty for one without rows."""

    @property
    def violations(self) -> list[str]:
        """A line for each kind of contradiction."""
        return [_line(what, numbers) for what, numbers in self._wrong.items()]

    def demand(self, holds: bool, otherwise: str) -> None:
        """Notes `otherwise` unless it holds."""
        if not holds:
            self._wrong.setdefault(otherwise, [])

    def demand_none(self, wrong: Iterable[int], what: str) -> None:
        """Notes that rows or slots are `what`: the first ones by number, and how many in all calls."""
        numbers = np.fromiter(wrong, np.int64)
        if len(numbers):
            before = self._wrong.get(what, [0])
            shown = [*before[:-1], *numbers.tolist()][:_SHOWN]
            self._wrong[what] = [*shown, before[-1] + len(numbers)]


def _line(what: str, numbers: list[int]) -> str:
    if not numbers:
        return what
    *shown, count = numbers
    more = f" and {count - len(shown):,} more" if count > len(shown) else ""
    return f"{what}: {', '.join(map(str, shown))}{more}"
