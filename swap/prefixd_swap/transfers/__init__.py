"""Transfers: every movement of blocks between tiers, in the order of its urgency.

`transfers` starts pieces and collects their outcomes, `transfer_handle` is one movement as its owner sees it,
`device_queue` decides which piece a device starts next, `pieces` cuts work into pieces, `path_stats` counts, and
`estimate` measures the throughput of a path.
"""

from __future__ import annotations

from prefixd_swap.transfers.device_queue import DeviceLimits
from prefixd_swap.transfers.estimate import PathEstimate
from prefixd_swap.transfers.path_stats import PathStats, UrgencyStats
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
from prefixd_swap.transfers.transfer_handle import Transfer
from prefixd_swap.transfers.transfers import Transfers

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
