"""How fast the drive under the disk tier is worn by the blocks that are written to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefixd.server.figures.history import History
from prefixd.v1 import admin_pb2 as pb

_RECENT_S = 3600.0


@dataclass(frozen=True, slots=True)
class DiskWear:
    """Estimates the wear.

    Attributes:
        path: the tier's directory.
        written_bytes: returns the bytes of blocks that were written since the start.
        history: knows what was written lately.
        uptime_s: returns the seconds since the start.
        endurance_bytes: bytes that the drive stands in its life; None: unknown.
        start_bytes: bytes that had been written to it before prefixd's were counted.
        before_bytes: bytes of blocks that daemons before this one have written since then.
    """

    path: Path
    written_bytes: Callable[[], int]
    history: History
    uptime_s: Callable[[], float]
    endurance_bytes: int | None = None
    start_bytes: int = 0
    before_bytes: int = 0

    def figures(self) -> pb.DiskWear:
        """Returns the figures now."""
        written, uptime_s = self.written_bytes(), self.uptime_s()
        recent = self.history.written_bytes_per_s(_RECENT_S)
        found = pb.DiskWear(
            path=str(self.path),
            recent_bytes_per_s=recent,
            mean_bytes_per_s=written / uptime_s if uptime_s > 0 else 0.0,
        )
        if self.endurance_bytes is not None:
            used = self.start_bytes + self.before_bytes + written
            found.endurance_bytes, found.used_ratio = self.endurance_bytes, used / self.endurance_bytes
            if recent > 0:
                found.left_s = max(self.endurance_bytes - used, 0) / recent
        return found
