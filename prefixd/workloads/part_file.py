"""A file that gets its name only when it is whole: until then it is `NAME.part`, which only its owner may read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from prefixd.base.errors import ConfigError


def open_part(file: Path, *, force: bool) -> tuple[Path, BinaryIO]:
    """Opens `NAME.part` anew, to write and read; returns its path and the open file.

    Args:
        file: the name that it will get.
        force: a file of that name may be replaced.

    Raises:
        ConfigError: the file exists, or the part cannot be written.
    """
    if not force and file.exists():
        raise ConfigError(f"{file} exists already; give another name, or --force to replace it")
    part = file.with_name(file.name + ".part")
    try:
        part.unlink(missing_ok=True)
        return part, os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w+b")
    except OSError as error:
        raise ConfigError(f"{part} cannot be written ({error.strerror}); give another place") from error
