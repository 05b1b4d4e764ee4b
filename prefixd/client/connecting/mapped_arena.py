"""The daemon's CPU-tier arena, mapped into this process."""

from __future__ import annotations

import json
import mmap
import os
import socket
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.client.errors import ClientClosed, MemoryUnavailable

_ANSWER_LIMIT = 4096


class Arena:
    """A mapping of the arena; blocks are at the byte offsets that leases and reservations name.

    An engine that copies from here to its GPU registers `address` and `nbytes` with `cudaHostRegister`.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps `nbytes` of `fd`, which the caller closes. Raises `MemoryUnavailable`."""
        size = os.fstat(fd).st_size
        if not 0 < nbytes <= size:
            raise MemoryUnavailable(f"the daemon announces an arena of {nbytes} bytes and hands over one of {size}")
        try:
            self._map: mmap.mmap | None = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            raise MemoryUnavailable(f"cannot map {nbytes} bytes of the arena: {error}") from error
        self.nbytes = nbytes
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)

    def bytes_at(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """`nbytes` bytes from `offset`, uint8, no copy, writable.

        Raises `ClientClosed` after `close`, `IndexError` outside the arena.
        """
        if self._bytes is None:
            raise ClientClosed("the arena is no longer mapped: its client was closed or its session ended")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise IndexError(f"bytes {offset} to {offset + nbytes} are outside an arena of {self.nbytes}")
        return self._bytes[offset : offset + nbytes]

    def close(self) -> None:
        """Unmaps the memory, at once or with the last view of it."""
        self._bytes = None
        if self._map is not None:
            # BufferError: a view is alive. Reading it would crash the process if the memory were unmapped now.
            with suppress(BufferError):
                self._map.close()
            self._map = None


def fetch_arena(door: str, session_id: str, timeout_s: float) -> Arena:
    """Asks the daemon's memory socket at path `door` for the arena and maps it. It blocks: call it in a thread.

    Raises `MemoryUnavailable` if the socket cannot be reached or the daemon refuses.
    """
    descriptors: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(door)
            _send_line(connection, session_id)
            answer = b""
            while not answer.endswith(b"\n") and len(answer) < _ANSWER_LIMIT:
                data, received, _, _ = socket.recv_fds(connection, _ANSWER_LIMIT, 1)
                descriptors += received
                if not data:
                    break
                answer += data
        header = _parse_answer(answer, door)
        if not descriptors:
            raise MemoryUnavailable(f"{door} sent no descriptor")
        return Arena(descriptors[0], int(header["arena_bytes"]))
    except OSError as error:
        raise MemoryUnavailable(f"cannot get the arena from {door}: {error}") from error
    finally:
        for fd in descriptors:
            os.close(fd)


def _send_line(connection: socket.socket, session_id: str) -> None:
    """Sends the session's id, with a descriptor of this process (pidfd).

    The daemon reuses slots that this process may still write into only after the process has ended, so it watches the
    process. A kernel before 6.5 does not identify a process in another PID namespace; the descriptor does.
    """
    line = session_id.encode() + b"\n"
    try:
        pidfd = os.pidfd_open(os.getpid())
    except OSError:  # Linux before 5.3, or a seccomp profile: the daemon may still find this process by its pid
        connection.sendall(line)
        return
    try:
        socket.send_fds(connection, [line], [pidfd])  # short enough for an empty buffer
    finally:
        os.close(pidfd)


def _parse_answer(answer: bytes, door: str) -> dict[str, Any]:
    try:
        header = json.loads(answer)
    except ValueError as error:
        raise MemoryUnavailable(f"{door} does not speak prefixd's memory protocol: {answer[:80]!r}") from error
    if not isinstance(header, dict) or "arena_bytes" not in header:
        reason = header.get("error") if isinstance(header, dict) else header
        raise MemoryUnavailable(f"the daemon does not hand over its arena: {reason}")
    return header
