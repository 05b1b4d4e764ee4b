"""What is not as it should be while the rest goes on: the same list for `stats`, health, metrics and the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prefixd_swap.tiers import Tier

log = logging.getLogger(__name__)


def tier_part(tier: Tier) -> str:
    """What a tier's troubles are about, in `Troubles`."""
    return f"{tier.name} tier"


_SAID_AGAIN_S = 30.0
"""A cause that changes is logged again, no more often than this."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is not as it should be."""

    part: str
    """What it is about, such as `disk tier`."""
    what: str
    remedy: str
    since_s: float
    """When it began, by the board's clock."""


class Troubles:
    """The troubles there are, at most one of each part.

    Args:
        clock: seconds; passed in so that tests own the time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._troubles: dict[str, Trouble] = {}
        self._said_s: dict[str, float] = {}  # when the log last had a line of a part's trouble
        self.listeners: list[Callable[[], None]] = []
        """Called when a part's trouble begins or ends."""

    def __iter__(self) -> Iterator[Trouble]:
        return iter(self._troubles.values())

    def __len__(self) -> int:
        return len(self._troubles)

    def __contains__(self, part: str) -> bool:
        return part in self._troubles

    def what(self, part: str) -> str:
        """The part's trouble with its remedy in one line, empty when it has none."""
        trouble = self._troubles.get(part)
        return f"{trouble.what}; {trouble.remedy}" if trouble else ""

    def of_tier(self, tier: Tier) -> str:
        """Why a tier is out or shrunk; empty for one that is well."""
        return self.what(tier_part(tier))

    def begin(self, part: str, line: str, *, tell: bool = False) -> None:
        """Enters a trouble, or its new reason; logs it when the part had none, and a new reason after a while.

        Args:
            part: what it is about.
            line: what is wrong, a semicolon, and what to do.
            tell: log a new reason at once: somebody has just tried to end the trouble.
        """
        what, _, remedy = line.partition("; ")
        before = self._troubles.get(part)
        since_s = before.since_s if before else self._clock()
        self._troubles[part] = Trouble(part, what, remedy or "see the log", since_s)
        now_s = self._clock()
        if before is None:
            log.error("trouble with the %s: %s; %s", part, what, remedy)
            self._said_s[part] = now_s
            self._tell()
        elif before.what != what and (tell or now_s >= self._said_s.get(part, now_s) + _SAID_AGAIN_S):
            log.error("the trouble with the %s is now: %s; %s", part, what, remedy)
            self._said_s[part] = now_s

    def end(self, part: str) -> None:
        """Strikes the part's trouble off, if it has one."""
        trouble = self._troubles.pop(part, None)
        if trouble is not None:
            log.warning("no more trouble with the %s, after %.1f s", part, self._clock() - trouble.since_s)
            self._tell()

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()
