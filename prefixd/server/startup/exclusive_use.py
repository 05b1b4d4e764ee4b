"""Refuses a second daemon for a data directory or a socket, with a message that names the first."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from prefixd.base.errors import ConfigError
from prefixd.server.access.socket_access import make_private


def lock_directory(directory: Path) -> Callable[[], None]:
    """Makes the data directory and locks it; returns a function that unlocks it.

    Raises:
        ConfigError: the directory cannot be written, or another daemon has locked it.
    """
    make_private("data_dir", directory)
    try:
        fd = os.open(directory / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"data_dir = {directory} is not writable ({error.strerror}); choose another") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise ConfigError(
            f"data_dir = {directory} is in use by another daemon (pid {holder or 'unknown'}); stop it or choose another"
        ) from None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return lambda: os.close(fd)


def remove_stale_socket(path: Path) -> None:
    """Removes the socket file that an ended daemon left.

    Raises:
        ConfigError: a process listens at the socket, or the path is not a socket.
    """
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"server.socket = {path} is a file, no socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise ConfigError(f"server.socket = {path} cannot be reached ({error.strerror}); remove it") from error
    raise ConfigError(f"server.socket = {path} is in use by another process; stop it or choose another path")
