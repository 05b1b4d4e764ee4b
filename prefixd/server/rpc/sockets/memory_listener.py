"""The local door: hands out the arena, as a file descriptor, and local credentials to processes of this host.

A client connects to a unix socket, sends one line and gets one line of JSON:

    ticket       {"ticket": "e803..."}: proves at the gRPC socket which user calls (`LocalCredentials`)
    SESSION ID   {"arena_bytes": 8589934592}; its first byte carries the descriptor (SCM_RIGHTS). The client's line may
                 carry a descriptor of the client's process (pidfd), for a kernel that does not give the daemon one

A refused client gets `{"error": "..."}`. A descriptor cannot be taken back, so it goes only to processes of operators,
of users that `server.allow_uids` names, and of tenants with `map_memory`.

Visitors that send nothing cannot keep others out: if there are too many, of one user or of all users, the one that has
waited longest gets an error and is disconnected. An honest client sends its line as soon as it has connected.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import stat
import struct
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from prefixd.server.access.socket_access import SocketAccess

log = logging.getLogger(__name__)

TICKET = "ticket"
_LINE_LIMIT = 256
_ANSWER_TIME_S = 5.0
_BACKLOG = 64  # connections that the kernel keeps until they are accepted
_VISITORS = 64
_VISITORS_OF_A_USER = 16
_CLOSING = 16
_CLOSING_OF_A_USER = 4
_SHORTAGE_PAUSE_S = 0.05
_WARN_S = 60.0
_UCRED = struct.Struct("iII")  # pid, uid, gid


class MemoryListener:
    """Listens at `path` and hands out the arena to processes of open sessions.

    Args:
        path: the unix socket.
        fd: descriptor of the arena; -1: there is none, and the door hands out credentials only.
        nbytes: size of the arena.
        is_session: returns True for the id of an open session.
        access: users that may connect.
        admit: called with (session id, uid, pid, connection, descriptor that the client sent or -1) before the arena
            is handed out; returns why it must not be, or None.
        may_map: returns True for a user that may map the arena.
        ticket: returns a credential for (uid, pid); None: there are none.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        nbytes: int,
        is_session: Callable[[str], bool],
        access: SocketAccess = SocketAccess(),  # noqa: B008 - immutable
        admit: Callable[[str, int, int, socket.socket, int], str | None] = lambda *visitor: None,
        may_map: Callable[[int], bool] = lambda uid: uid in (0, os.geteuid()),
        ticket: Callable[[int, int], str] | None = None,
    ) -> None:
        self.path = path
        self._fd = fd
        self._nbytes = nbytes
        self._is_session = is_session
        self._access = access
        self._admit = admit
        self._may_map = may_map
        self._ticket = ticket
        self._listener: socket.socket | None = None
        self._visits: dict[asyncio.Task[None], tuple[int, socket.socket]] = {}
        """The visitors under way with their users and connections, the oldest first."""
        self._visits_of: Counter[int] = Counter()
        self._warn_s = 0.0
        self._logged = set[int]()
        """Users that the log names as refused."""
        self._closing: Counter[int] = Counter()
        """Descriptors that visitors sent and that are not closed yet, by user. At the limit, no more are received."""
        self._unclosed: list[tuple[int, int]] = []
        """(user, descriptor) of those that still wait for a thread to close them."""

    async def start(self) -> None:
        """Begins to listen, and replaces a socket file that an ended daemon has left.

        Raises:
            OSError: the path is another kind of file, or a process listens there.
        """
        self._remove_leftover()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.bind(str(self.path))
            self._access.open(self.path)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._listen(listener)

    async def close(self) -> None:
        """Stops listening and removes the socket; processes keep the descriptors that they have."""
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
            self.path.unlink(missing_ok=True)
        visits = list(self._visits)
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)

    def _listen(self, listener: socket.socket) -> None:
        if listener is self._listener:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accepts one visitor; other tasks of the event loop run before the next."""
        loop = asyncio.get_running_loop()
        try:
            visitor, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # out of descriptors: the socket stays readable, and the loop must not spin
            loop.remove_reader(listener)
            loop.call_later(_SHORTAGE_PAUSE_S, self._listen, listener)
            return
        visitor.setblocking(False)
        _, uid = _peer(visitor)
        if self._visits_of[uid] >= _VISITORS_OF_A_USER:
            self._disconnect(next(task for task, (user, _) in self._visits.items() if user == uid))
        elif len(self._visits) >= _VISITORS:
            self._disconnect(next(iter(self._visits)))
        visit = loop.create_task(self._serve(visitor), name="prefixd-memory-door")
        self._visits[visit] = uid, visitor
        self._visits_of[uid] += 1
        visit.add_done_callback(self._forget_visit)

    def _disconnect(self, visit: asyncio.Task[None]) -> None:
        uid, visitor = self._visits[visit]
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._warn_s:  # a crowd must not fill the log
            self._warn_s = now_s + _WARN_S
            log.warning("user %d has too many idle connections to the memory door: the oldest are closed", uid)
        with suppress(OSError):
            visitor.send(
                _line(
                    {
                        "error": f"{self._visits_of[uid]} connections of user {uid} and {len(self._visits)} in all "
                        f"wait at the memory door, which takes {_VISITORS_OF_A_USER} and {_VISITORS}, and this one had "
                        "asked for nothing yet; end those that ask for nothing, and try again"
                    }
                )
            )
        visit.cancel()
        self._forget_visit(visit)

    def _forget_visit(self, visit: asyncio.Task[None]) -> None:
        ended = self._visits.pop(visit, None)
        if ended is not None:
            self._visits_of[ended[0]] -= 1

    async def _serve(self, visitor: socket.socket) -> None:
        with visitor, suppress(OSError, TimeoutError):
            pid, uid = _peer(visitor)
            self._close_unclosed()
            async with asyncio.timeout(_ANSWER_TIME_S), self._descriptors(uid) as sent:
                session_id = await _read_line(visitor, sent, int(self._may_receive_descriptor(uid)))
                if session_id == TICKET and self._ticket is not None:
                    await asyncio.get_running_loop().sock_sendall(visitor, _line({"ticket": self._ticket(uid, pid)}))
                    return
                refusal = self._find_refusal(visitor, session_id, sent[0] if sent else -1)
                if refusal is not None:
                    await asyncio.get_running_loop().sock_sendall(visitor, _line({"error": refusal}))
                else:
                    # One short line into an empty socket buffer: it cannot block.
                    socket.send_fds(visitor, [_line({"arena_bytes": self._nbytes})], [self._fd])

    def _may_receive_descriptor(self, uid: int) -> bool:
        return self._closing.total() < _CLOSING and self._closing[uid] < _CLOSING_OF_A_USER

    @asynccontextmanager
    async def _descriptors(self, uid: int) -> AsyncGenerator[list[int]]:
        """Yields a list for the descriptors that a visitor sends, and closes them at the end."""
        received: list[int] = []
        try:
            yield received
        finally:
            for descriptor in received:
                if _is_pidfd(descriptor):
                    os.close(descriptor)
                else:  # closing a file of a file system that does not answer never returns: not on the event loop
                    self._closing[uid] += 1
                    self._unclosed.append((uid, descriptor))
            self._close_unclosed()

    def _close_unclosed(self) -> None:
        """Closes descriptors in threads. If no thread can be started, the rest waits for the next visitor."""
        loop = asyncio.get_running_loop()

        def closed(uid: int) -> None:
            self._closing[uid] -= 1
            self._closing += Counter()  # drops users with a count of 0

        def close(uid: int, descriptor: int) -> None:
            with suppress(OSError):
                os.close(descriptor)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(closed, uid)

        while self._unclosed:
            try:
                threading.Thread(target=close, args=self._unclosed[-1], name="prefixd-close", daemon=True).start()
            except RuntimeError:  # another part of the daemon reports the limit of threads
                return
            self._unclosed.pop()

    def _find_refusal(self, visitor: socket.socket, session_id: str | None, sent: int) -> str | None:
        pid, uid = _peer(visitor)
        if self._fd < 0:
            return "this daemon has no CPU tier to share: set cpu.bytes, or use memory='streamed' in the SDK"
        if not self._may_map(uid):
            if uid not in self._logged:  # an engine asks again every second
                self._logged.add(uid)
                log.warning("user %d asked for the memory and is not in server.allow_uids", uid)
            return (
                f"user {uid} may not map the memory of user {os.geteuid()}: have an operator who trusts the user with "
                "all tenants' blocks set tenants.NAME.map_memory, or add the user to server.allow_uids; or use "
                "memory='streamed' in the SDK"
            )
        if session_id is None or not self._is_session(session_id):
            return "no such session: it has ended, or was never opened"
        self._logged.discard(uid)
        return self._admit(session_id, uid, pid, visitor, sent)

    def _remove_leftover(self) -> None:
        try:
            if not stat.S_ISSOCK(self.path.lstat().st_mode):
                return  # bind fails and says that the path is in use
        except FileNotFoundError:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink(missing_ok=True)


def _peer(visitor: socket.socket) -> tuple[int, int]:
    """Returns the pid and uid of the process that connected."""
    pid, uid, _ = _UCRED.unpack(visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(pid), int(uid)


def _is_pidfd(descriptor: int) -> bool:
    """True for a process's descriptor: a link to `anon_inode:[pidfd]`, since Linux 6.9 to `pidfd:[4242]`."""
    try:
        return "pidfd" in os.readlink(f"/proc/self/fd/{descriptor}").partition("/")[0]
    except OSError:
        return False


async def _receive(visitor: socket.socket, descriptors: list[int], most: int) -> bytes:
    """Returns the next bytes, as `sock_recv` does, and adds up to `most` descriptors that come with them to
    `descriptors`."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, received, _, _ = socket.recv_fds(visitor, _LINE_LIMIT, most)
        except BlockingIOError:
            readable = loop.create_future()
            loop.add_reader(visitor, readable.set_result, None)
            try:
                await readable
            finally:
                loop.remove_reader(visitor)
            continue
        descriptors += received
        return data


async def _read_line(visitor: socket.socket, descriptors: list[int], most: int) -> str | None:
    line = b""
    while not line.endswith(b"\n"):
        data = await _receive(visitor, descriptors, most)
        if not data or len(line) + len(data) > _LINE_LIMIT or len(descriptors) > 1:  # a client sends one descriptor
            return None
        line += data
    return line[:-1].decode(errors="replace")


def _line(content: dict[str, object]) -> bytes:
    return json.dumps(content).encode() + b"\n"
