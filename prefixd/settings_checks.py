"""What can be refused before the daemon starts: directories, sockets and sizes that are not there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from prefixd.errors import ConfigError
from prefixd.settings import Settings


def check_start(settings: Settings) -> None:
    """Raises ConfigError for the first setting that cannot work on this machine; changes nothing."""
    _check_directory("data_dir", settings.data_dir)
    if settings.disk.bytes:
        _check_directory("disk.path", settings.disk_path)
    _check_socket(settings.server.socket)
    for name in ("model", "draft_model"):
        if (directory := getattr(settings.worker, name)) is not None:
            _check_model(f"worker.{name}", directory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if settings.cpu.bytes > memory:
        raise ConfigError(f"cpu.bytes = {settings.cpu.bytes}: this machine has {memory} bytes of memory; choose less")


def _check_directory(name: str, path: Path) -> None:
    """`path` is a directory that we can write to, or can be made into one."""
    nearest = path
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"{name} = {path}: {nearest} is not a directory; remove it or choose another path")
    if not os.access(nearest, os.W_OK | os.X_OK):
        other = "set XDG_RUNTIME_DIR, or " if nearest == Path("/tmp") else ""
        raise ConfigError(f"{name} = {path}: {nearest} cannot be written to; {other}choose another path")


def _check_socket(path: Path) -> None:
    _check_directory("server.socket", path.parent)
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"server.socket = {path} exists and is no socket; remove it or choose another path")


def _check_model(name: str, path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"{name} = {path} is not a directory; give the directory of a Hugging Face model")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{name} = {path} has no config.json; give the directory of a Hugging Face model")
