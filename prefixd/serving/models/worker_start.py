"""Starts a worker's process, with one end of a socket."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
from contextlib import ExitStack

from prefixd.serving.models.worker_channel import WorkerChannel
from prefixd.worker_protocol.worker_settings import WorkerSettings, encode_settings
from prefixd_swap import OutOfMemoryError, started_threads

_REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n, LimitNOFILE=)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.ENOMEM: "free memory, or raise its limits (ulimit -v, the cgroup's)",
    errno.EAGAIN: "raise the limit of processes (ulimit -u, TasksMax=)",
}
ENVIRONMENT = {
    # OpenMP threads that spin at barriers take CPU time from the daemon on a small machine: with one busy core of two,
    # a step takes 188 ms spinning and 26 ms sleeping.
    "OMP_WAIT_POLICY": "PASSIVE",
    # With several threads, MKL splits the sum of a matrix product by how many rows there are, so a row's last bits
    # would depend on the batch (seen: 1,408 to 512 with two threads, 64 rows or more). Its strict mode does not.
    "MKL_CBWR": "AUTO,STRICT",
}


class NotStartedError(Exception):
    """This machine lacks a resource for starting a process. The text names it and the remedy."""


async def start_worker(
    settings: WorkerSettings, channel: WorkerChannel, stack: ExitStack
) -> tuple[socket.socket, asyncio.subprocess.Process]:
    """Starts a worker that `channel` writes to; `stack` closes the daemon's end of its socket.

    Returns:
        That end, and the process that has the other.

    Raises:
        NotStartedError: this machine lacks a resource, which may come back.
        OSError: any other error.
    """
    try:
        threads = stack.enter_context(started_threads(1, "prefixd-worker"))
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        with theirs:
            ours.setblocking(False)
            await channel.open(ours, threads)
            try:
                return ours, await _spawn(settings, theirs.fileno())
            except BaseException:
                channel.close()
                raise
    except OutOfMemoryError as error:
        raise NotStartedError(str(error)) from error
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        raise NotStartedError(f"it cannot be started ({error.strerror}); {_REMEDIES[error.errno]}") from error


async def _spawn(settings: WorkerSettings, fd: int) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "prefixd.worker", "--fd", str(fd), "--config", encode_settings(settings)),
            pass_fds=[fd, *([settings.pixels_fd] if settings.pixels_fd >= 0 else [])],
            env={**ENVIRONMENT, **os.environ},
            stdin=asyncio.subprocess.DEVNULL,
            process_group=0,  # only the daemon handles Ctrl-C, which would end a worker that does not ignore it yet
        )
    except RuntimeError as error:  # before Python 3.12: no thread to wait for the process, which ends with its socket
        raise NotStartedError(f"it cannot be started ({error}); {_REMEDIES[errno.EAGAIN]}") from error
