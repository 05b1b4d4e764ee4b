"""What one of several loads costs that share the machine."""

from __future__ import annotations

from collections.abc import Callable


class LoadMeter:
    """Splits time evenly among the loads under way (processor sharing).

    Loads overlap: eight of them, each taking 80 ms because of the seven others, cost 10 ms each, and that is what has
    to be compared with computing.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._active = 0
        self._share_s = 0.0  # what a load that was always under way would have been charged so far
        self._since_s = 0.0

    def begin(self) -> float:
        """A load begins; returns a mark for `end`."""
        self._advance()
        self._active += 1
        return self._share_s

    def so_far(self, mark: float) -> float:
        """The seconds that a load under way has been charged."""
        self._advance()
        return self._share_s - mark

    def end(self, mark: float) -> float:
        """A load ended; returns the seconds it is charged."""
        self._advance()
        self._active -= 1
        return self._share_s - mark

    def _advance(self) -> None:
        now = self._clock()
        if self._active:
            self._share_s += (now - self._since_s) / self._active
        self._since_s = now
