"""The processes that have the arena mapped, and how their ends are noticed."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from prefixd.base.tenants import Role
from prefixd.cache import Process, TieredCache
from prefixd.server.access.caller import Caller

_SO_PEERPIDFD = 77  # Linux 6.5: a descriptor of the process that connected, whatever its pid is called where
_PID = struct.Struct("i")
_PROCESSES = 16
"""Of one session, that have the arena: each takes a descriptor while it lives."""


class ProcessWatch:
    """Tells the cache which sessions' clients have the arena mapped, and when their processes have ended.

    A descriptor of the process (pidfd) becomes readable when the last of its threads has ended: by then its mappings
    are gone. Children that a client forks inherit its mapping and are not watched: they must not fill its reservations.

    Args:
        cache: whose slots the processes can write into.
        caller_of: who a user's process is, by uid and pid. Without it every user may act for every session whose id it
            knows.
        peer_pidfd: a descriptor of the process at the other end of a connection, OSError where the kernel (before 6.5)
            gives none; another one in tests.
    """

    def __init__(
        self,
        cache: TieredCache,
        caller_of: Callable[[int, int], Caller] | None = None,
        peer_pidfd: Callable[[socket.socket], int] | None = None,
    ) -> None:
        self._cache = cache
        self._caller_of = caller_of
        self._peer_pidfd = peer_pidfd or _peer_pidfd
        self._watched: dict[int, Process] = {}  # by pidfd

    def visit(self, session_id: str, uid: int, pid: int, visitor: socket.socket, sent: int = -1) -> str | None:
        """The arena is about to be handed to process `pid` of user `uid`, for a session; returns why it must not be.

        A process that cannot be watched gets none: nobody could ever know when it has stopped writing. `sent` is the
        descriptor of its own that it sent (-1: none), for which nobody but it answers: it is used where there is no
        other, in a PID namespace of its own before Linux 6.5. Who lies about it gains nothing, since whoever maps the
        arena can write anywhere in it.
        """
        try:
            pidfd = self._open_pidfd(pid, visitor, sent)
        except OSError as error:
            return (
                f"process {pid} cannot be watched for its end ({error}): run client and daemon in one PID namespace or "
                "on Linux 6.5 or later, upgrade a client that sends no descriptor of its own, or use memory='streamed' "
                "in the SDK"
            )
        process = self._known(pid)
        session = self._cache.leases.sessions.get(session_id)
        if session is None:
            os.close(pidfd)
            return "the session ended with the process that had its memory: open another"
        caller = None if self._caller_of is None else self._caller_of(uid, pid)
        if caller is not None and caller.role is not Role.ADMIN and caller.tenant is not session.tenant:
            os.close(pidfd)
            return (
                f"user {uid} belongs to tenant {caller.tenant.name}, and the session to tenant {session.tenant.name}: "
                "show a ticket of this user as the session is opened, or use memory='streamed' in the SDK"
            )
        if process not in session.processes and len(session.processes) >= _PROCESSES:
            os.close(pidfd)
            return f"{_PROCESSES} processes of the session have the arena, the most allowed: open another session"
        if process is None:
            process = Process(pid)
            self._watched[pidfd] = process
            asyncio.get_running_loop().add_reader(pidfd, self._ended, pidfd)
        else:
            os.close(pidfd)
        session.processes.add(process)
        return None

    def _open_pidfd(self, pid: int, visitor: socket.socket, sent: int) -> int:
        try:
            return self._peer_pidfd(visitor)
        except OSError:  # an older kernel
            if sent >= 0 and _is_pidfd_of(sent, pid):
                return os.dup(sent)
            return os.pidfd_open(pid)  # fails where its number here is 0

    def close(self) -> None:
        """Stops watching."""
        for pidfd in list(self._watched):
            self._forget(pidfd)

    def _known(self, pid: int) -> Process | None:
        for known, process in list(self._watched.items()):
            if _has_ended(known):  # its number may be another's by now
                self._ended(known)
            elif process.pid == pid > 0:
                return process
        return None

    def _ended(self, pidfd: int) -> None:
        self._cache.process_ended(self._forget(pidfd))

    def _forget(self, pidfd: int) -> Process:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        return self._watched.pop(pidfd)


def _peer_pidfd(visitor: socket.socket) -> int:
    return int(_PID.unpack(visitor.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, _PID.size))[0])


def _is_pidfd_of(descriptor: int, pid: int) -> bool:
    """Whether a descriptor that a client sent is a living process's, and of the number that the kernel says it has here
    (0 in a PID namespace that is not below ours)."""
    try:
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    except OSError:
        return False
    return f"Pid:\t{pid}" in lines and not _has_ended(descriptor)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
