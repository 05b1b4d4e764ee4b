"""Detects a worker that hangs in a step: a silent worker is pinged, and has to answer between two steps."""

from __future__ import annotations

from typing import Literal


class StepWatchdog:
    """Decides when to ping the worker, and when an answer is overdue.

    A worker that waits for frames or for loaded blocks is silent without a fault.

    ```
    heard ...  limit / 2  ... ask ... ... limit ... ... hangs
    ```

    Args:
        limit_s: the longest that a step may take.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._heard_s = 0.0
        self._asked_s: float | None = None
        self._looked_s = 0.0

    @property
    def period_s(self) -> float:
        """How often to `check`."""
        return min(1.0, self.limit_s / 4)

    def heard(self, now_s: float) -> None:
        """The worker has sent a message, or has become ready."""
        self._heard_s = self._looked_s = now_s
        self._asked_s = None

    def check(self, now_s: float) -> Literal["wait", "ask", "hangs"]:
        """What to do now. Time in which this process itself stood still does not count."""
        stood_still_s = max(0.0, now_s - self._looked_s - self.limit_s / 2)
        self._looked_s = now_s
        self._heard_s += stood_still_s
        if self._asked_s is not None:
            self._asked_s += stood_still_s
            return "hangs" if now_s - self._asked_s >= self.limit_s else "wait"
        if now_s - self._heard_s < self.limit_s / 2:
            return "wait"
        self._asked_s = now_s
        return "ask"
