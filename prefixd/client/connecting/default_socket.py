"""Whether the default socket can be this user's daemon: else somebody could collect prompts and hand out bytes.

The default path can be guessed, and lies in /tmp where XDG_RUNTIME_DIR is not set: whoever makes the directory first
has it. So a client goes there only where the directory and the socket are this user's or root's, and nobody else can
put others in their place. A path that was given, as an argument or by PREFIXD_SERVER__SOCKET, is not checked: the
daemon may be another user's, and who gives the path knows whose.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from prefixd.client.errors import ServerUnavailable, SocketUntrusted

_OTHERS_WRITE = 0o022


def check_default_socket(path: Path) -> None:
    """Raises an error unless this user can trust the socket at the default `path`.

    Raises:
        ServerUnavailable: there is no such directory.
        SocketUntrusted: it, or the socket in it, is or may become another user's.
    """
    folder = path.parent
    try:
        around, found = folder.parent.stat(), folder.lstat()
    except OSError as error:  # it must not be reached later either, when somebody may have made it
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
    except FileNotFoundError:  # in a directory that is ours
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise _untrusted(path, f"{path} is no socket")
    _check_owner(path, path, found)


def _check_owner(path: Path, what: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.getuid()):
        raise _untrusted(path, f"{what} belongs to user {found.st_uid}, and this process to user {os.getuid()}")


def _untrusted(path: Path, why: str) -> SocketUntrusted:
    return SocketUntrusted(
        f"the default socket {path} is not used, since it may not be your daemon's: {why}. Remove it and start the "
        "daemon again, or set XDG_RUNTIME_DIR for both; for a daemon of another user, give its address"
    )
