"""Free runs of one address range, merged with their neighbours."""

from __future__ import annotations

from bisect import bisect_left

from prefixd_swap.errors import MemoryMisuseError


class FreeExtents:
    """What is free of `nbytes` bytes, as runs that never touch each other."""

    def __init__(self, nbytes: int) -> None:
        self._starts: list[int] = [0] if nbytes else []
        self._lengths: dict[int, int] = {0: nbytes} if nbytes else {}
        self.free_bytes = nbytes

    def take(self, wanted: int, granule: int) -> tuple[int, int] | None:
        """Start and length of a run that was free: `wanted` bytes, or the most there is in whole granules.

        The lowest run that is long enough is cut; if none is, the longest one. None when not even one
        granule is free in one piece. `wanted` is a multiple of `granule` (bytes).
        """
        start = next((start for start in self._starts if self._lengths[start] >= wanted), None)
        if start is None:
            start = max(self._starts, key=self._lengths.__getitem__, default=None)
            if start is None:
                return None
            wanted = self._lengths[start] // granule * granule
            if not wanted:
                return None
        length = self._lengths.pop(start)
        at = bisect_left(self._starts, start)
        if length > wanted:
            self._starts[at] = start + wanted
            self._lengths[start + wanted] = length - wanted
        else:
            del self._starts[at]
        self.free_bytes -= wanted
        return start, wanted

    def give(self, start: int, nbytes: int) -> None:
        """Return a run.

        Raises:
            MemoryMisuseError: part of it is free already.
        """
        at = bisect_left(self._starts, start)
        before = self._starts[at - 1] if at else None
        after = self._starts[at] if at < len(self._starts) else None
        end = start + nbytes
        before_end = before + self._lengths[before] if before is not None else -1
        if before_end > start or (after is not None and after < end):
            raise MemoryMisuseError(f"bytes {start} to {end} are partly free already; return a run once")
        self.free_bytes += nbytes
        if after == end:
            nbytes += self._lengths.pop(end)
            del self._starts[at]
        if before is not None and before_end == start:
            self._lengths[before] += nbytes
        else:
            self._starts.insert(at, start)
            self._lengths[start] = nbytes

    def count(self, granule: int) -> int:
        """How many pieces of `granule` bytes could be cut from what is free."""
        return sum(length // granule for length in self._lengths.values())

    def runs(self) -> list[tuple[int, int]]:
        """(start, length) of every free run, by address."""
        return [(start, self._lengths[start]) for start in self._starts]
