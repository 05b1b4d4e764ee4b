"""Forked processes: gRPC's asyncio client does not survive a fork while it is in use.

    parent has an open client, forks   the child has gRPC's state without its threads: calls hang, no client works there
    parent has made none yet           the child makes clients of its own
    spawned processes                  as any other

So what a fork finds is noted, and a client that cannot work says so as it is made. gRPC's own handlers for forks, which
are for its other clients, start its threads again in the child: in one of three children they end it by SIGSEGV, though
it makes no call (grpc 1.76). They are off where this package is the first to import gRPC and
`GRPC_ENABLE_FORK_SUPPORT` says nothing else.
"""

from __future__ import annotations

import os
import sys
import threading

_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"

if "grpc" not in sys.modules and _FORK_SUPPORT not in os.environ:
    os.environ[_FORK_SUPPORT] = "0"  # read as gRPC is imported
    try:
        import grpc  # noqa: F401
    finally:
        del os.environ[_FORK_SUPPORT]

from prefixd.client.errors import ForkedProcess  # noqa: E402

REMEDY = (
    "start the process with multiprocessing's 'spawn' (multiprocessing.get_context('spawn')), or fork before the first "
    "client is made"
)
_POLLER = "_poll_wrapper"
"""In the name of the thread that serves all event loops of a process while gRPC's asyncio client is in use."""


class _Fork:
    """What the forks that led to this process found. A fork's child keeps what its parent found just before."""

    def __init__(self) -> None:
        self.broken = False
        self._in_use = False

    def before(self) -> None:
        self._in_use = any(_POLLER in thread.name for thread in threading.enumerate())

    def in_child(self) -> None:
        self.broken |= self._in_use


_fork = _Fork()
os.register_at_fork(before=_fork.before, after_in_child=_fork.in_child)


def check_not_forked() -> None:
    """Raises `ForkedProcess` where no client can work: gRPC was in use when this process was forked."""
    if _fork.broken:
        raise ForkedProcess(f"no client works in this process: gRPC was in use when it was forked; {REMEDY}")


def forked_from(pid: int) -> ForkedProcess:
    """The error of a client that was made in process `pid` and is used in another one."""
    return ForkedProcess(f"the client was made in process {pid}, before this one was forked; {REMEDY}")
