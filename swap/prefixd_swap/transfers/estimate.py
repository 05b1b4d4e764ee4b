"""The measured throughput of a path."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEMORY_S = 10.0
"""Seconds of work after which an observation counts 1/e of a new one."""
_PIECE_WEIGHT = 1 / 16


@dataclass(frozen=True, slots=True)
class PathEstimate:
    """The recent throughput of a path; exponentially weighted."""

    pieces: int
    """Pieces measured since the start; 0: the other figures are unknown."""
    bytes_per_s: float | None
    """Bytes per second while at least one piece was under way, all pieces together."""
    piece_s: float | None
    """Seconds that one piece took from its start to its end."""


class PathMeter:
    """Measures one path. Time is passed in."""

    def __init__(self) -> None:
        self._pieces = 0
        self._bytes = 0.0
        self._seconds = 0.0
        self._piece_s: float | None = None
        self._counted_until_s = -math.inf

    def ended(self, began_s: float, ended_s: float, nbytes: int) -> None:
        """Counts a piece of `nbytes` bytes that was under way from `began_s` to `ended_s`."""
        # Only the time since the last end is new: time beside another piece was counted with that piece.
        busy_s = max(0.0, ended_s - max(began_s, self._counted_until_s))
        self._counted_until_s = max(self._counted_until_s, ended_s)
        decay = math.exp(-busy_s / _MEMORY_S)
        self._bytes = self._bytes * decay + nbytes
        self._seconds = self._seconds * decay + busy_s
        piece_s = max(0.0, ended_s - began_s)
        self._piece_s = piece_s if self._piece_s is None else self._piece_s + _PIECE_WEIGHT * (piece_s - self._piece_s)
        self._pieces += 1

    def estimate(self) -> PathEstimate:
        return PathEstimate(self._pieces, self._bytes / self._seconds if self._seconds > 0 else None, self._piece_s)
