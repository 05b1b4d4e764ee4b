"""This process's limits: file descriptors and locked memory. Raised as far as allowed, reported when too low."""

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
"""Its connection, its process (pidfd), and for a moment one at the memory door."""
_SPARE = 16
"""So few left are reported: the next sessions would be refused."""
_GOOD_CHECKS = 3
_WATCH_S = 1.0
_LOCK_S = 2.0


def raise_descriptor_limit(max_sessions: int, slabs: int, troubles: Troubles) -> int:
    """Raises the soft limit of open files to the hard one; reports it when it is too low for what is configured.

    Args:
        max_sessions: sessions open at once.
        slabs: slab files that the disk tier may have open.
        troubles: where it is reported.

    Returns:
        The soft limit from now on.
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
    """Reports when hardly any descriptor is left, and that there are some again.

    A metrics page needs a descriptor, too: what were over with the shortage itself, no scraper would ever see. So it is
    over when `_GOOD_CHECKS` checks in a row have found some.
    """

    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles
        self._good = 0

    def check(self) -> None:
        """Looks how many are in use now."""
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
    """Locks the arena as soon as it may be, when it could not be at the start; returns then."""
    while LOCK in troubles:
        await asyncio.sleep(_LOCK_S)
        with suppress(OutOfMemoryError), started_threads(1, "prefixd-lock") as threads:
            await asyncio.get_running_loop().run_in_executor(threads, arena.lock)
            troubles.end(LOCK)


async def watch_descriptors(troubles: Troubles) -> None:
    """Checks once a second, for ever."""
    descriptors = DescriptorCheck(troubles)
    while True:
        descriptors.check()
        await asyncio.sleep(_WATCH_S)
