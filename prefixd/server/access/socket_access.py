"""Access on this host: private directories, and sockets for the daemon's user and the users that the settings name."""

from __future__ import annotations

import errno
import functools
import logging
import operator
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefixd.base.errors import ConfigError

log = logging.getLogger(__name__)

_OTHERS = 0o077
_OTHERS_READ = 0o044
_OTHERS_WRITE = 0o022

# The kernel's format of system.posix_acl_access: a version, then (tag, permissions, id) sorted by tag and id.
_ACL = "system.posix_acl_access"
_ACL_VERSION = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
_READ_WRITE, _SEARCH = 6, 1


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """The users that may connect to the daemon's unix sockets.

    Args:
        mode: permissions of the socket files, some of the bits 0o666.
        uids: further users, who get access by an access control list on the socket and its directory.
    """

    mode: int = 0o600
    uids: tuple[int, ...] = ()

    def make_directory(self, directory: Path) -> None:
        """Makes the directory of the sockets, or checks one that exists.

        A new directory gives access to exactly the users that may use the sockets. An existing one must belong to this
        user or root, and no other user may be able to replace files in it; a directory such as /tmp, in which only
        the owner of a file can remove it, is fine.

        Raises:
            ConfigError: the directory cannot be made, other users can write to it, or it keeps out users that may use
                the sockets.
        """
        search = self.mode >> 2 & 0o011 | self.mode >> 1 & 0o011
        _refuse_links(directory)
        made = not os.path.lexists(directory)
        _make_folder(directory, f"directory {directory}")
        found = directory.stat()
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"server.socket is in {directory}, which belongs to user {found.st_uid}, who could put another socket "
                "in its place; choose a directory of your own"
            )
        if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"server.socket is in {directory}, where other users can put another socket in its place (mode "
                f"{mode:04o}); run `chmod go-w {directory}` or choose another directory"
            )
        if made:
            directory.chmod(0o700 | search)
        elif search & ~mode:
            raise ConfigError(
                f"server.socket_mode = {self.mode:04o}, but {directory} (mode {mode:04o}) keeps those users out; "
                f"run `chmod {mode | search:04o} {directory}`"
            )
        if self.uids and found.st_uid == os.geteuid() and not mode & 0o001:
            self._grant_access(directory, _SEARCH)

    def open(self, path: Path) -> None:
        """Gives access to the socket file at `path`, which this process has bound, to exactly the users that may use
        it.

        Raises:
            ConfigError: the file system has no access control lists, and `uids` need one.
        """
        path.chmod(self.mode)
        if self.uids or _has_acl(path):
            self._grant_access(path, _READ_WRITE, replace=True)

    def _grant_access(self, path: Path, permissions: int, *, replace: bool = False) -> None:
        """Gives `permissions` to `uids`; `replace` takes them away from all other users."""
        try:
            entries = _read_acl(path)
            if replace:
                entries = {(tag, id_): given for (tag, id_), given in entries.items() if tag != _USER}
                entries |= {(_OTHER, _NO_ID): self.mode & 7, (_GROUP_OBJ, _NO_ID): self.mode >> 3 & 7}
            entries |= {(_USER, uid): permissions for uid in self.uids}
            of_groups = (given for (tag, _), given in entries.items() if tag in (_USER, _GROUP_OBJ, _GROUP))
            entries[_MASK, _NO_ID] = functools.reduce(operator.or_, of_groups)
            packed = (_ACL_ENTRY.pack(tag, given, id_) for (tag, id_), given in sorted(entries.items()))
            os.setxattr(path, _ACL, _ACL_VERSION.pack(2) + b"".join(packed))
        except OSError as error:
            raise ConfigError(
                f"server.allow_uids = {list(self.uids)}: the file system of {path} takes no access control list "
                f"({error.strerror}); use server.socket_mode = 0660 and a common group, or another directory"
            ) from error


def _has_acl(path: Path) -> bool:
    try:
        return bool(os.getxattr(path, _ACL))
    except OSError:  # none, or none is possible here
        return False


def _read_acl(path: Path) -> dict[tuple[int, int], int]:
    """Returns permissions by (tag, id); those of the file's mode if it has no list."""
    try:
        found = os.getxattr(path, _ACL)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        mode = path.stat().st_mode
        return {(_USER_OBJ, _NO_ID): mode >> 6 & 7, (_GROUP_OBJ, _NO_ID): mode >> 3 & 7, (_OTHER, _NO_ID): mode & 7}
    return {(tag, id_): given for tag, given, id_ in _ACL_ENTRY.iter_unpack(found[_ACL_VERSION.size :])}


def private_umask() -> Callable[[], None]:
    """Makes all new files of this process private from their creation on; returns a function that undoes this."""
    before = os.umask(_OTHERS)

    def undo() -> None:
        os.umask(before)

    return undo


def make_private(name: str, directory: Path) -> None:
    """Makes the directory that the setting `name` gives, or makes an existing one private to this user.

    Raises:
        ConfigError: as `make_own`.
    """
    make_own(name, directory)
    close_to_others(name, directory)


def make_own(name: str, directory: Path) -> None:
    """Makes the directory that the setting `name` gives; checks an existing one, and changes nothing of it.

    A directory that other users can write to is refused: its files may not be the daemon's.

    Raises:
        ConfigError: the directory cannot be made, belongs to another user, or other users can write to it.
    """
    _refuse_links(directory)
    _make_folder(directory, f"{name} = {directory}")
    found = directory.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{name} = {directory} belongs to user {found.st_uid}, and the daemon runs as user {os.geteuid()}; "
            f"run `chown {os.geteuid()} {directory}` or choose another directory"
        )
    if mode & _OTHERS_WRITE:
        raise ConfigError(
            f"{name} = {directory} can be written to by other users (mode {mode:04o}); "
            f"run `chmod 700 {directory}` or choose another directory"
        )


def close_to_others(name: str, directory: Path) -> None:
    """Takes from other users the right to list the directory that the setting `name` gives."""
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & _OTHERS_READ:  # search permission may stay: users need it to reach a socket, and it shows no names
        directory.chmod(0o700)
        log.warning("%s = %s was open to other users (mode %04o) and is private now", name, directory, mode)


def is_secret(found: os.stat_result) -> bool:
    """True for a file that only this user can use, beside root: it has the mode 0600, or root owns it and lets the
    daemon's own group read it (0440), as Kubernetes does with a Secret for a pod's `fsGroup`."""
    others = stat.S_IMODE(found.st_mode) & _OTHERS
    if found.st_uid == 0 and found.st_gid == os.getegid() != 0:
        others &= ~stat.S_IRGRP
    return found.st_uid in (0, os.geteuid()) and not others


def check_folder(name: str, folder: Path) -> None:
    """Checks the folder of the file that the setting `name` gives: only root, this user and its own group may be able
    to replace files in it. A directory such as /tmp, in which only the owner of a file can remove it, is fine.

    Raises:
        ConfigError: the folder belongs to another user, everybody can write to it, or another user's symbolic link
            leads there.
        OSError: the folder does not exist.
    """
    _refuse_links(folder)
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{name} is in {folder}, which belongs to user {found.st_uid}, who could put another file in its place; "
            "choose a directory of your own"
        )
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"{name} is in {folder}, where everybody can put another file in its place (mode {mode:04o}); run "
            f"`chmod o-w {folder}` or choose another directory"
        )


def _refuse_links(directory: Path) -> None:
    """Raises ConfigError if the path has a symbolic link of another user, who could make it lead elsewhere."""
    for step in (*reversed(directory.absolute().parents), directory.absolute()):
        try:
            found = step.lstat()
        except OSError:  # a missing directory is made later; one that cannot be read causes an error then
            return
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"{step}, on the way to {directory}, is a symbolic link of user {found.st_uid}, who could make it lead "
                "elsewhere; remove it or choose another path"
            )


def _make_folder(directory: Path, named: str) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = "a file of that name exists" if error.errno == errno.EEXIST else error.strerror
        raise ConfigError(f"{named} cannot be made ({why}); choose another path") from error
