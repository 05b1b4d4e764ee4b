"""Raises this process's limits of file descriptors and locked memory as far as allowed, and reports low ones."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from contextlib import suppress

import numpy.ma  # noqa: F401 - numpy imports it when first needed, which fails without a free descriptor

from prefixd.cache import Troubles
from prefixd_swap import CpuArena, OutOfMemoryError, started_threads

AT_START = "descriptor limit"
NOW = "file descriptors"
LOCK = "memory lock"

_BASE = 128
"""Descriptors that every daemon needs: listeners, libraries, the worker, the index, pipes."""
_A_SESSION = 3
"""Descriptors of a session: its connection, its process (pidfd), and for a moment one at the memory socket."""
_SPARE = 16
"""Below this many free descriptors a trouble begins: the daemon would soon refuse connections."""
_GOOD_CHECKS = 3
_WATCH_S = 1.0
_LOCK_S = 2.0


def raise_descriptor_limit(max_sessions: int, slabs: int, troubles: Troubles) -> int:
    """Raises the soft limit of open files to the hard one; reports it if it is too low for the configuration.

    Args:
        max_sessions: sessions open at once.
        slabs: slab files that the disk tier may have open.
        troubles: gets the report.

    Returns:
        The new soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    wanted = _BASE + _A_SESSION * max_sessions + slabs
    if soft != resource.RLIM_INFINITY and soft < wanted:
        troubles.begin(
            AT_START,
            f"{soft} open files are allowed, but {max_sessions} sessions and {slabs} slab files may take {wanted}; "
            "raise RLIMIT_NOFILE (`ulimit -n`, LimitNOFILE= of systemd) or lower server.max_sessions",
        )
    return soft


class DescriptorCheck:
    """Reports a shortage of descriptors, and its end.

    A scrape needs a descriptor too, so a trouble that ended with the shortage would never be scraped. Therefore it ends
    only after `_GOOD_CHECKS` good checks in a row.
    """

    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles
        self._good = 0

    def check(self) -> None:
        """Counts the descriptors in use, and begins or ends the trouble."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            used = len(os.listdir("/proc/self/fd"))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            used = soft
        if soft != resource.RLIM_INFINITY and used > soft - _SPARE:
            self._good = 0
            self._troubles.begin(
                NOW,
                f"{used} of {soft} open files are in use, so that new connections are refused; close sessions or raise "
                "RLIMIT_NOFILE (`ulimit -n`, LimitNOFILE= of systemd)",
            )
            return
        self._good += 1
        if self._good >= _GOOD_CHECKS:
            self._troubles.end(NOW)


async def watch_memory_lock(arena: CpuArena, troubles: Troubles) -> None:
    """Tries to lock the arena every `_LOCK_S`, if that failed at the start; returns after success."""
    while LOCK in troubles:
        await asyncio.sleep(_LOCK_S)
        with suppress(OutOfMemoryError), started_threads(1, "prefixd-lock") as threads:
            await asyncio.get_running_loop().run_in_executor(threads, arena.lock)
            troubles.end(LOCK)


async def watch_descriptors(troubles: Troubles) -> None:
    """Checks descriptors once a second until it is cancelled."""
    descriptors = DescriptorCheck(troubles)
    while True:
        descriptors.check()
        await asyncio.sleep(_WATCH_S)
