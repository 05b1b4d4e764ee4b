"""Figures of a path, by urgency."""

from __future__ import annotations

from dataclasses import dataclass

from prefixd_swap.transfers.estimate import PathEstimate
from prefixd_swap.transfers.pieces import Urgency


@dataclass(slots=True)
class UrgencyStats:
    """One path's figures at one urgency. When a transfer is raised, its remaining pieces move to the new urgency."""

    waiting_transfers: int = 0
    """Transfers with pieces that have not started."""
    waiting_pieces: int = 0
    waiting_bytes: int = 0
    in_flight: int = 0
    """Pieces under way."""
    started: int = 0
    """Pieces started since the beginning."""
    moved_bytes: int = 0
    """Bytes of pieces that have ended without an error since the beginning."""
    failed: int = 0
    """Pieces that have ended with an error since the beginning."""
    dropped: int = 0
    """Pieces that were cancelled before they started, since the beginning."""
    waits: int = 0
    """Transfers whose first piece has started, since the beginning."""
    waited_s: float = 0.0
    """Sum of the seconds from submission to that start."""
    longest_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PathStats:
    """One path's figures."""

    path: str
    device: str
    by_urgency: dict[Urgency, UrgencyStats]
    estimate: PathEstimate
