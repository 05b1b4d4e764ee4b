"""What an audit has accounted for, and what does not add up."""

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
    """The first rows or slots of each kind of contradiction, and then their number; empty for one that names none."""

    @property
    def violations(self) -> list[str]:
        """What does not add up, a line for each kind."""
        return [_line(what, numbers) for what, numbers in self._wrong.items()]

    def demand(self, holds: bool, otherwise: str) -> None:
        """Notes `otherwise` unless it holds."""
        if not holds:
            self._wrong.setdefault(otherwise, [])

    def demand_none(self, wrong: Iterable[int], what: str) -> None:
        """Notes rows or slots that are `what`, the first of them by number. What was noted before is added up."""
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
