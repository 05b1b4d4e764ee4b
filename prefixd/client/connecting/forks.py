"""Forked processes: gRPC's asyncio client does not survive a fork while it is in use.

    parent has an open client, forks   the child has gRPC's state without its threads: calls hang, no client works there
    parent has made none yet           the child can make clients of its own
    spawned processes                  can make clients

So each fork records whether gRPC was in use, and the constructor of a client that could not work raises an error.

gRPC's own fork handlers, which its other clients need, start its threads again in the child. One of three children dies
from that by SIGSEGV, even if it makes no call (grpc 1.76). This package switches the handlers off, unless gRPC was
imported before or `GRPC_ENABLE_FORK_SUPPORT` is set.
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
"""Part of the name of the thread that serves all event loops of a process while gRPC's asyncio client is in use."""


class _Fork:
    """Records whether gRPC was in use at a fork that led to this process; children inherit the record."""

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
    """Raises `ForkedProcess` if gRPC was in use when this process was forked: no client can work then."""
    if _fork.broken:
        raise ForkedProcess(f"no client works in this process: gRPC was in use when it was forked; {REMEDY}")


def forked_from(pid: int) -> ForkedProcess:
    """The error for a client that was made in process `pid` and is used in another one."""
    return ForkedProcess(f"the client was made in process {pid}, before this one was forked; {REMEDY}")
