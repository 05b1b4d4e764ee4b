"""Time lost against the better choice in hindsight, when a cached prefix was loaded, computed again, or both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Regret:
    """Sums over decisions whose outcome is known.

    What was done is measured. What was not done can only be estimated, after the fact: what loading and computing were
    learned to take since the decision counts as well. A decision that was faster than all others by their estimates is
    not regretted; that one was better by more makes up for no other.

    Attributes:
        judged: decisions.
        spent_s: seconds that they took.
        lost_s: seconds of these that the best other choice would have saved.
    """

    judged: int = 0
    spent_s: float = 0.0
    lost_s: float = 0.0

    def judge(self, spent_s: float, *others_s: float | None) -> float:
        """A decision took `spent_s` seconds; each other choice would have taken so many, None where that was never
        observed. Returns the seconds lost."""
        known = [other_s for other_s in others_s if other_s is not None]
        if not known:
            return 0.0
        lost_s = max(0.0, spent_s - min(known))
        self.judged += 1
        self.spent_s += spent_s
        self.lost_s += lost_s
        return lost_s
