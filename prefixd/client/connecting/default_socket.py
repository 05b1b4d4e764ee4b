"""Checks that no other user can have made the default socket: such a user could read prompts and serve wrong bytes.

Another user can guess the default path, and can make the directory first if it lies in /tmp (without XDG_RUNTIME_DIR).
So a client connects there only if the directory and the socket belong to this user or to root, and no other user can
replace them. A path that the caller gives, as an argument or by PREFIXD_SERVER__SOCKET, is not checked: the daemon may
belong to another user then.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from prefixd.client.errors import ServerUnavailable, SocketUntrusted

_OTHERS_WRITE = 0o022


def check_default_socket(path: Path) -> None:
    """Checks that this user can trust the socket at the default `path`.

    Raises:
        ServerUnavailable: there is no such directory.
        SocketUntrusted: the directory, or the socket in it, belongs to another user, or another user can replace it.
    """
    folder = path.parent
    try:
        around, found = folder.parent.stat(), folder.lstat()
    except OSError as error:  # gRPC must not connect later either: another user may make the directory meanwhile
        raise ServerUnavailable(f"no answer from the daemon at unix:{path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise _untrusted(path, f"{folder} is no directory but was put there by user {found.st_uid}")
    _check_owner(path, folder, found)
    if found.st_mode & _OTHERS_WRITE:
        raise _untrusted(path, f"other users can write to {folder} (mode {stat.S_IMODE(found.st_mode):04o})")
    if around.st_mode & _OTHERS_WRITE and not around.st_mode & stat.S_ISVTX:
        raise _untrusted(path, f"other users can replace {folder}, as they can write to the directory around it")
    try:
        found = path.lstat()
    except FileNotFoundError:  # only this user can make it
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise _untrusted(path, f"{path} is no socket")
    _check_owner(path, path, found)


def _check_owner(path: Path, checked: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.getuid()):
        raise _untrusted(path, f"{checked} belongs to user {found.st_uid}, and this process to user {os.getuid()}")


def _untrusted(path: Path, why: str) -> SocketUntrusted:
    return SocketUntrusted(
        f"the default socket {path} is not used, since it may not be your daemon's: {why}. Remove it and start the "
        "daemon again, or set XDG_RUNTIME_DIR for both; for a daemon of another user, give its address"
    )
