"""Passing a memory to another process: descriptors go over a unix socket, and the other process attaches them.

The order on the wire: the caller sends `Export.meta` and `Export.count` in a message of its own. Then each batch is one
byte with up to 253 descriptors. The receiver must have read exactly up to that byte: a reader that buffers more loses
the descriptors.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator

from prefixd_swap.errors import TransferError
from prefixd_swap.vmem.backends.cuda import CudaMemory
from prefixd_swap.vmem.backends.host import HostMemory
from prefixd_swap.vmem.base import Export, VirtualMemory

BATCH = 253  # SCM_MAX_FD: the most descriptors that one message can carry
_MARK = b"\x01"
_RETRY_S = 0.005


def send_export(
    sock: socket.socket, export: Export, timeout_s: float = 60.0, clock: Callable[[], float] = time.monotonic
) -> None:
    """Send every descriptor of `export`. Blocks, also on a non-blocking socket: call it in a thread.

    Raises TransferError when the peer is gone or does not receive them within `timeout_s`.
    """
    deadline = clock() + timeout_s
    for start in range(0, export.count, BATCH):
        fds: list[int] = []
        try:
            fds.extend(export.open(index) for index in range(start, min(start + BATCH, export.count)))
            _send_batch(sock, fds, deadline, clock)
        finally:
            for fd in fds:
                os.close(fd)


def recv_export(
    sock: socket.socket, count: int, timeout_s: float = 60.0, clock: Callable[[], float] = time.monotonic
) -> Iterator[int]:
    """Receive `count` descriptors; a batch is received when the consumer needs it. The consumer closes each one.

    Raises TransferError when the peer is gone, sends something else, or takes longer than `timeout_s`.
    """
    deadline = clock() + timeout_s
    received = 0
    while received < count:
        _wait(sock, select.POLLIN, deadline, clock)
        try:
            data, fds, flags, _ = socket.recv_fds(sock, len(_MARK), BATCH, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            continue
        except OSError as error:
            raise TransferError(f"receiving descriptors failed: {error}") from error
        problem = _problem(data, fds, flags, count - received)
        if problem:
            for fd in fds:
                os.close(fd)
            raise TransferError(f"after {received} of {count} descriptors {problem}")
        received += len(fds)
        yield from _owned(fds)


def attach_memory(meta: bytes, fds: Iterable[int]) -> VirtualMemory:
    """Rebuild a memory from `Export.meta` and the descriptors; its chunks have the same ids.

    `fds` is an iterator of `recv_export`, or a list; the memory owns every descriptor that it takes. Chunks cannot be
    created or destroyed on an attached memory. Raises TransferError, and DeviceError when the GPU is absent.
    """
    try:
        told = json.loads(meta)
        kind, chunk_bytes, runs = told["kind"], int(told["chunk_bytes"]), told["chunks"]
        ordinal = int(told.get("ordinal", 0))
    except (ValueError, KeyError, TypeError) as error:
        raise TransferError(f"{meta[:80]!r} does not describe a memory; are both processes of one version?") from error
    if kind == "cuda":
        return CudaMemory.attach(ordinal, chunk_bytes, runs, fds)
    if kind == "host":
        fd = next(iter(fds), None)
        if fd is None:
            raise TransferError("no descriptor came for the memory file; send exactly one")
        return HostMemory.attach(chunk_bytes, runs, fd)
    raise TransferError(f"a memory of kind {kind!r} is unknown; are both processes of one version?")


def _owned(fds: list[int]) -> Iterator[int]:
    """Yield descriptors one by one; close the rest when the consumer stops."""
    try:
        while fds:
            yield fds.pop(0)
    finally:
        for fd in fds:
            os.close(fd)


def _problem(data: bytes, fds: list[int], flags: int, wanted: int) -> str | None:
    if not data:
        return "the peer closed the connection"
    if flags & socket.MSG_CTRUNC:
        return "this process ran out of file descriptors; raise its limit (ulimit -n)"
    if data != _MARK or not fds or len(fds) > wanted:
        return f"the peer sent {data!r} with {len(fds)} descriptors; are both processes of one version?"
    return None


def _send_batch(sock: socket.socket, fds: list[int], deadline: float, clock: Callable[[], float]) -> None:
    while True:
        _wait(sock, select.POLLOUT, deadline, clock)
        try:
            socket.send_fds(sock, [_MARK], fds)
            return
        except BlockingIOError:
            continue
        except OSError as error:
            # Descriptors under way count against the sender's limit until the peer receives them.
            if error.errno != errno.ETOOMANYREFS or clock() > deadline:
                raise TransferError(f"sending {len(fds)} descriptors failed: {error}") from error
            time.sleep(_RETRY_S)


def _wait(sock: socket.socket, event: int, deadline: float, clock: Callable[[], float]) -> None:
    poller = select.poll()
    poller.register(sock, event)
    if not poller.poll(max(0.0, deadline - clock()) * 1000):
        raise TransferError("the peer did not answer in time while descriptors were passed")
