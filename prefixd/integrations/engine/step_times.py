"""How long an engine's steps take."""

from __future__ import annotations

from collections import deque

_MOST_UNDER_WAY = 64


class StepTimes:
    """Times steps by what passes the scheduler. With asynchronous scheduling the engine has scheduled the next step, or
    more, before one has ended; so each has a number, which the workers' report says again. Times are in seconds."""

    def __init__(self) -> None:
        self._next = 0
        self._under_way: deque[tuple[int, int, float]] = deque(maxlen=_MOST_UNDER_WAY)  # number, tokens, beginning
        self._ended_s = 0.0

    def begin(self, tokens: int, now_s: float) -> int:
        """A step that computes so many tokens is scheduled: its number."""
        self._next += 1
        if tokens:
            self._under_way.append((self._next, tokens, now_s))
        return self._next

    def ended(self, number: int, now_s: float) -> tuple[int, float]:
        """The tokens of the step that has ended now, and how long it took when the steps before it had ended; 0 and 0
        for one that computed nothing."""
        tokens, began_s = 0, now_s
        while self._under_way and self._under_way[0][0] <= number:
            step, of_step, since_s = self._under_way.popleft()
            if step == number:
                tokens, began_s = of_step, since_s
        elapsed_s = now_s - max(began_s, self._ended_s)
        self._ended_s = now_s
        return tokens, elapsed_s
