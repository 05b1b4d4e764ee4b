"""Watches the processes that have the arena mapped, and reports when one of them has ended."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from prefixd.base.tenancy.tenants import Role
from prefixd.cache import Process, TieredCache
from prefixd.server.access.identities import Caller

_SO_PEERPIDFD = 77  # Linux 6.5: a descriptor of the process that connected, in any PID namespace
_PID = struct.Struct("i")
_PROCESSES = 16
"""Most processes of one session that may have the arena: the daemon keeps a descriptor of each while it lives."""


class ProcessWatch:
    """Tells the cache which processes of a session have the arena mapped, and when they have ended.

    A descriptor of a process (pidfd) becomes readable when the last of its threads has ended: by then its mappings are
    gone. Children that a client forks inherit its mapping and are not watched: they must not fill its reservations.

    Args:
        cache: the processes can write into its slots.
        caller_of: returns the caller for a user's process, by uid and pid. None: every user may act for every session
            if it knows the session's id.
        peer_pidfd: returns a descriptor of the process at the other end of a connection; raises OSError if the kernel
            (before 6.5) gives none. Tests pass another function.
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

    def admit(self, session_id: str, uid: int, pid: int, visitor: socket.socket, sent: int = -1) -> str | None:
        """Watches a process of a session to which the daemon is about to hand the arena.

        Args:
            session_id: the session.
            uid: user of the process.
            pid: its number, 0 if it is in a PID namespace that this daemon does not see.
            visitor: the connection of the process.
            sent: a descriptor of its own that the process sent, or -1. It is used where the kernel gives no other: in
                a PID namespace of its own before Linux 6.5. A process gains nothing by sending a wrong one, since
                every process that maps the arena can write anywhere in it.

        Returns:
            None, or why the process must not get the arena. A process that cannot be watched does not get it: the
            daemon could not find out when it has stopped writing.
        """
        try:
            pidfd = self._open_pidfd(pid, visitor, sent)
        except OSError as error:
            return (
                f"process {pid} cannot be watched for its end ({error}): run client and daemon in one PID namespace or "
                "on Linux 6.5 or later, upgrade a client that sends no descriptor of its own, or use memory='streamed' "
                "in the SDK"
            )
        process = self._find_watched(pid)
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
            asyncio.get_running_loop().add_reader(pidfd, self._report_end, pidfd)
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
            return os.pidfd_open(pid)  # fails if the process has the number 0 here

    def close(self) -> None:
        """Stops watching."""
        for pidfd in list(self._watched):
            self._forget(pidfd)

    def _find_watched(self, pid: int) -> Process | None:
        for known, process in list(self._watched.items()):
            if _has_ended(known):  # another process may have its number by now
                self._report_end(known)
            elif process.pid == pid > 0:
                return process
        return None

    def _report_end(self, pidfd: int) -> None:
        self._cache.process_ended(self._forget(pidfd))

    def _forget(self, pidfd: int) -> Process:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        return self._watched.pop(pidfd)


def _peer_pidfd(visitor: socket.socket) -> int:
    return int(_PID.unpack(visitor.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, _PID.size))[0])


def _is_pidfd_of(descriptor: int, pid: int) -> bool:
    """True if a descriptor that a client sent is that of a living process with the number that the kernel gives for the
    connection (0 in a PID namespace that is not below this one)."""
    try:
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    except OSError:
        return False
    return f"Pid:\t{pid}" in lines and not _has_ended(descriptor)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
