"""Measures how long an engine's steps take."""

from __future__ import annotations

from collections import deque

_MOST_UNDER_WAY = 64


class StepTimes:
    """Times steps from scheduling to the workers' report. With asynchronous scheduling the engine schedules the next
    steps before one has ended, so each step has a number, which the report repeats. Times are in seconds."""

    def __init__(self) -> None:
        self._next = 0
        self._under_way: deque[tuple[int, int, float]] = deque(maxlen=_MOST_UNDER_WAY)  # number, tokens, beginning
        self._ended_s = 0.0

    def begin(self, tokens: int, now_s: float) -> int:
        """Notes a scheduled step that computes `tokens` tokens; returns its number."""
        self._next += 1
        if tokens:
            self._under_way.append((self._next, tokens, now_s))
        return self._next

    def ended(self, number: int, now_s: float) -> tuple[int, float]:
        """Notes the end of a step; returns its tokens and the seconds since it began and the steps before it ended.
        Returns 0 tokens for a step that computed nothing."""
        tokens, began_s = 0, now_s
        while self._under_way and self._under_way[0][0] <= number:
            step, of_step, since_s = self._under_way.popleft()
            if step == number:
                tokens, began_s = of_step, since_s
        elapsed_s = now_s - max(began_s, self._ended_s)
        self._ended_s = now_s
        return tokens, elapsed_s
