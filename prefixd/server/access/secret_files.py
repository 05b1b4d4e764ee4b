"""Reads files with secrets, which only the daemon's user may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from prefixd.base.errors import ConfigError
from prefixd.server.access.socket_access import is_secret

_MOST_SECRET_BYTES = 4096


def read_secret(name: str, path: Path, least_bytes: int) -> bytes:
    """Returns the content of a secret file, without white space at its ends.

    Raises:
        ConfigError: the file cannot be read, other users can read it, or it is too short or too long.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            secret = file.read(_MOST_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"{name} = {path}: {error.strerror}; give a file that the daemon can read") from error
    mode = stat.S_IMODE(found.st_mode)
    if not is_secret(found):
        raise ConfigError(
            f"{name} = {path} (mode {mode:04o}, of user {found.st_uid}) must be the daemon's alone; chmod 600 {path}"
        )
    if not least_bytes <= len(secret) <= _MOST_SECRET_BYTES:
        raise ConfigError(
            f"{name} = {path} has {len(secret)} bytes; it needs {least_bytes} to {_MOST_SECRET_BYTES}: "
            f"openssl rand -hex 32 > {path}"
        )
    return secret
