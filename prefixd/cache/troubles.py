"""Troubles: parts of the daemon that fail while the rest works. `stats`, health, metrics and the log have this list."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prefixd_swap.tiers import Tier

log = logging.getLogger(__name__)


def tier_part(tier: Tier) -> str:
    """The name of a tier as a part in `Troubles`."""
    return f"{tier.name} tier"


_SAID_AGAIN_S = 30.0
"""A changed cause is logged again at most this often."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A failure of one part."""

    part: str
    """The part that fails, such as `disk tier`."""
    what: str
    remedy: str
    since_s: float
    """When it began, on the clock of `Troubles`."""


class Troubles:
    """The current troubles, at most one of each part.

    Args:
        clock: seconds; passed in so that tests own the time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._troubles: dict[str, Trouble] = {}
        self._said_s: dict[str, float] = {}  # when a part's trouble was last logged
        self.listeners: list[Callable[[], None]] = []
        """Called when a part's trouble begins or ends."""

    def __iter__(self) -> Iterator[Trouble]:
        return iter(self._troubles.values())

    def __len__(self) -> int:
        return len(self._troubles)

    def __contains__(self, part: str) -> bool:
        return part in self._troubles

    def what(self, part: str) -> str:
        """The part's trouble with its remedy in one line; empty if it has none."""
        trouble = self._troubles.get(part)
        return f"{trouble.what}; {trouble.remedy}" if trouble else ""

    def of_tier(self, tier: Tier) -> str:
        """Why a tier is out of service or shrunk; empty if it works."""
        return self.what(tier_part(tier))

    def begin(self, part: str, line: str, *, tell: bool = False) -> None:
        """Enters a trouble, or its new cause; logs it at once if the part had none, and a new cause after a while.

        Args:
            part: the part that fails.
            line: the cause, a semicolon, and the remedy.
            tell: log a new cause at once, since an operator has just tried to end the trouble.
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
        """Removes the part's trouble, if it has one."""
        trouble = self._troubles.pop(part, None)
        if trouble is not None:
            log.warning("no more trouble with the %s, after %.1f s", part, self._clock() - trouble.since_s)
            self._tell()

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()
