"""Who gets in on this host: private directories, and sockets for the daemon's user and those it names."""

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

# What the kernel keeps in system.posix_acl_access: a version, then (tag, permissions, id) by tag and id.
_ACL = "system.posix_acl_access"
_ACL_VERSION = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NO_ID = 0xFFFFFFFF
_READ_WRITE, _SEARCH = 6, 1


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """Who may connect to the daemon's unix sockets.

    Args:
        mode: permissions of the socket files, of the bits 0o666.
        uids: users that are let in beside those, by an access control list on the socket and its directory.
    """

    mode: int = 0o600
    uids: tuple[int, ...] = ()

    def make_directory(self, directory: Path) -> None:
        """The directory of the sockets: made private, or checked when it is there.

        One that is made lets in exactly those who may use the sockets. One that is there must be this user's or root's,
        and nobody else may be able to replace what is in it; a directory such as /tmp, where only the owner of a file
        can remove it, is fine.

        Raises:
            ConfigError: it cannot be made, others can write to it, or it keeps out those who are to be let in.
        """
        search = self.mode >> 2 & 0o011 | self.mode >> 1 & 0o011
        _refuse_links(directory)
        made = not os.path.lexists(directory)
        _make(directory)
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
            self._allow(directory, _SEARCH)

    def open(self, path: Path) -> None:
        """Lets those in who may use the socket file at `path`, which was bound by this process, and nobody else.

        Raises:
            ConfigError: the file system has no access control lists, and `uids` need one.
        """
        path.chmod(self.mode)
        if self.uids or _has_acl(path):
            self._allow(path, _READ_WRITE, nobody_else=True)

    def _allow(self, path: Path, permissions: int, *, nobody_else: bool = False) -> None:
        try:
            entries = _read_acl(path)
            if nobody_else:
                entries = {(tag, who): given for (tag, who), given in entries.items() if tag != _USER}
                entries |= {(_OTHER, _NO_ID): self.mode & 7, (_GROUP_OBJ, _NO_ID): self.mode >> 3 & 7}
            entries |= {(_USER, uid): permissions for uid in self.uids}
            of_groups = (given for (tag, _), given in entries.items() if tag in (_USER, _GROUP_OBJ, _GROUP))
            entries[_MASK, _NO_ID] = functools.reduce(operator.or_, of_groups)
            packed = (_ACL_ENTRY.pack(tag, given, who) for (tag, who), given in sorted(entries.items()))
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
    """Permissions by (tag, id); those of the mode where there is no list."""
    try:
        found = os.getxattr(path, _ACL)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        mode = path.stat().st_mode
        return {(_USER_OBJ, _NO_ID): mode >> 6 & 7, (_GROUP_OBJ, _NO_ID): mode >> 3 & 7, (_OTHER, _NO_ID): mode & 7}
    return {(tag, who): given for tag, given, who in _ACL_ENTRY.iter_unpack(found[_ACL_VERSION.size :])}


def private_umask() -> Callable[[], None]:
    """From here on nothing that this process makes is open to others, not for a moment; returns how to undo it."""
    before = os.umask(_OTHERS)

    def undo() -> None:
        os.umask(before)

    return undo


def make_private(name: str, directory: Path) -> None:
    """The directory that the setting `name` gives, this user's alone.

    One that others can read is closed to them. One that others can write to is refused: what is in it may not be ours.

    Raises:
        ConfigError: it cannot be made, belongs to another user, or others can write to it.
    """
    _refuse_links(directory)
    _make(directory)
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
    if mode & _OTHERS_READ:  # to be let through, towards a socket, shows nothing
        directory.chmod(0o700)
        log.warning("%s = %s was open to other users (mode %04o) and is private now", name, directory, mode)


def check_folder(name: str, folder: Path) -> None:
    """The folder of the file that the setting `name` gives: nobody but root, this user and its own group may replace
    what is in it. A directory such as /tmp, where only the owner of a file can remove it, is fine.

    Raises:
        ConfigError: it belongs to another user, everybody can write to it, or a link of another user leads there.
        OSError: it is not there.
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
    """Raises ConfigError where a symbolic link of another user is on the way: that user can make it lead elsewhere."""
    for step in (*reversed(directory.absolute().parents), directory.absolute()):
        try:
            found = step.lstat()
        except OSError:  # what is not there is made later, and what cannot be looked at fails then
            return
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"{step}, on the way to {directory}, is a symbolic link of user {found.st_uid}, who could make it lead "
                "elsewhere; remove it or choose another path"
            )


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = "it is there and no directory" if error.errno == errno.EEXIST else error.strerror
        raise ConfigError(f"directory {directory} cannot be made ({why}); choose another path") from error
