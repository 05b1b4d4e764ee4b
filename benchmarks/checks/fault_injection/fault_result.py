"""The result of one fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_COUNTS = ("crashes", "wrong_bytes", "unserved", "silently_lost")


@dataclass(slots=True)
class Result:
    """The result of one scenario."""

    name: str
    crashes: int = 0
    wrong_bytes: int = 0
    unserved: int = 0
    unreported: list[str] = field(default_factory=list)
    not_back: list[str] = field(default_factory=list)
    silently_lost: int = 0
    calls: int = 0
    refused: int = 0
    """Durable commits that were refused, with a remedy, while they could not be."""
    noticed_s: float | None = None
    back_s: float | None = None
    slowest_call_s: float = 0.0
    lost_blocks: dict[str, int] = field(default_factory=dict)
    said: str = ""
    """The trouble in the daemon's words."""
    failures: list[str] = field(default_factory=list)
    """The first calls that failed and should not have, and other findings."""
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def __str__(self) -> str:
        found = [f"{name} {getattr(self, name)}" for name in _COUNTS if getattr(self, name)]
        found += [f"unreported by {way}" for way in self.unreported] + self.not_back + self.failures
        what = f"NOT survived: {'; '.join(found)}" if found else "survived"
        return f"{self.name}: {what} ({self.seconds:g} s)"

    @property
    def good(self) -> bool:
        counts = sum(getattr(self, name) for name in _COUNTS)
        return not (counts or self.unreported or self.not_back or self.failures)
