"""Transfers: every movement of blocks between tiers, in the order of its urgency.

`transfers` starts pieces and collects their outcomes, `device_queue` decides which piece a device starts next,
`pieces` says what a piece is and cuts work into pieces, `estimate` measures what a path moves.
"""

from __future__ import annotations

from prefixd_swap.transfers.device_queue import DeviceLimits
from prefixd_swap.transfers.estimate import PathEstimate
from prefixd_swap.transfers.pieces import (
    PIECE_BYTES,
    PIECE_ITEMS,
    Outcome,
    Piece,
    Result,
    Urgency,
    grouped,
    piece_items,
)
from prefixd_swap.transfers.transfers import PathStats, Transfer, Transfers, UrgencyStats

__all__ = [
    "PIECE_BYTES",
    "PIECE_ITEMS",
    "DeviceLimits",
    "Outcome",
    "PathEstimate",
    "PathStats",
    "Piece",
    "Result",
    "Transfer",
    "Transfers",
    "Urgency",
    "UrgencyStats",
    "grouped",
    "piece_items",
]
