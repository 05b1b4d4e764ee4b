"""The number of kernel mappings that this process may still make.

A process that reaches `vm.max_map_count` cannot even give mappings back, since that may split one, and every allocator
and thread in it fails too. So this package stays below seven eighths of the limit, and leaves the rest to other code.
"""

from __future__ import annotations

import threading
from pathlib import Path

from prefixd_swap.errors import OutOfMemoryError

_LIMIT_FILE = Path("/proc/sys/vm/max_map_count")


def kernel_limit() -> int:
    """The most mappings that the kernel permits a process."""
    return int(_LIMIT_FILE.read_text())


class MappingBudget:
    """Counts mappings against `limit`; safe to use from several threads."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Mappings that are counted now."""
        return self._used

    def take(self, count: int) -> None:
        """Count `count` more mappings, or fewer if negative. Raises OutOfMemoryError above the limit."""
        with self._lock:
            if count > 0 and self._used + count > self.limit:
                raise OutOfMemoryError(
                    f"{count} more mappings are wanted and {self._used} of {self.limit} are used; raise the "
                    "limit (sysctl vm.max_map_count=1048576), use larger chunks, or run fewer requests at once"
                )
            self._used += count

    def give(self, count: int) -> None:
        """Count `count` fewer mappings. May be negative: unmapping may split a mapping, and is never refused."""
        with self._lock:
            self._used -= count


# The kernel's limit is the process's, so all memories of the process share one budget.
PROCESS_MAPPINGS = MappingBudget(kernel_limit() // 8 * 7)
