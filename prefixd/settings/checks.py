"""Checks before the daemon starts that the directories, sockets and sizes of the settings work on this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from prefixd.base.codec_names import CODECS_EXTRA
from prefixd.base.errors import ConfigError
from prefixd.base.extras import require
from prefixd.settings import Settings
from prefixd.settings.model_folder import why_not_a_model
from prefixd_swap.memory_limit import cgroup_limit

_DAEMON_BYTES = 96 << 20  # a sidecar without blocks has 90 MiB
_WORKER_BYTES = 384 << 20  # torch and its threads, without weights


def check_start(settings: Settings, root: Path = Path("/")) -> None:
    """Checks the settings on this machine; changes nothing.

    Args:
        settings: the settings.
        root: the directory that has `proc` and the control groups; tests pass another one.

    Raises:
        ConfigError: a setting cannot work; the message names the first one.
    """
    _check_directory("data_dir", settings.data_dir)
    if settings.disk.bytes:
        for name, path in settings.disk_paths.items():
            _check_directory(name, path)
    _check_socket(settings.server.socket)
    worker = settings.worker
    named = [("model", worker.model), ("draft_model", worker.draft_model)]
    for name, folder in [*named, *(("more_models", each) for each in worker.more_models)]:
        if folder is not None and (why := why_not_a_model(folder)):
            raise ConfigError(f"worker.{name} = {folder} {why}")
    check_codecs(settings)
    _check_memory(settings, root)


def check_codecs(settings: Settings) -> None:
    """Raises MissingExtraError, which names the setting, if a codec's packages are not installed."""
    tiers = {"disk.codec": settings.disk.codec, "remote.codec": settings.remote.codec}
    tenants = {f"tenants.{name}.codec": codec for name, codec in settings.codecs.items()}
    for name, codec in (tiers | tenants).items():
        if codec not in (None, "exact"):
            require(CODECS_EXTRA, f"{name} = {codec}")


def _check_memory(settings: Settings, root: Path) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if settings.cpu.bytes > memory:
        raise ConfigError(f"cpu.bytes = {settings.cpu.bytes}: this machine has {memory} bytes of memory; choose less")
    limit = cgroup_limit(root=root)
    needed, parts = memory_needed(settings)
    if limit is not None and needed > limit.nbytes:
        raise ConfigError(
            f"the daemon needs {needed} bytes of memory ({parts}), and its control group allows {limit.nbytes} "
            f"({limit.source}): the kernel would kill it; lower cpu.bytes, set cpu.bytes = auto, or raise the limit to "
            f"{needed} (resources.limits.memory of Kubernetes, --memory of docker, MemoryMax= of systemd)"
        )


def memory_needed(settings: Settings) -> tuple[int, str]:
    """Returns the least host memory, in bytes, that the daemon needs with full tiers, and a list of its parts as text.

    A GPU tier in host memory counts if `gpu.device` is "cpu" and `gpu.bytes` a number; "auto" adapts to free memory. Of
    a tier that grows its least counts.
    """
    parts = {"the CPU tier": settings.cpu.bytes, "the daemon": _DAEMON_BYTES}
    if settings.worker.enabled:
        parts["its worker"] = _WORKER_BYTES
        gpu = settings.gpu
        nbytes = gpu.least_bytes or 0 if gpu.elastic else gpu.bytes
        if gpu.device == "cpu" and nbytes != "auto":
            parts["the GPU tier"] = nbytes
    return sum(parts.values()), ", ".join(f"{nbytes} for {name}" for name, nbytes in parts.items() if nbytes)


def _check_directory(name: str, path: Path) -> None:
    """Raises ConfigError unless `path` is a directory that this user can write to, or can be created."""
    nearest = path
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"{name} = {path}: {nearest} is not a directory; remove it or choose another path")
    if not os.access(nearest, os.W_OK | os.X_OK):
        other = "set XDG_RUNTIME_DIR, or " if name == "server.socket" and nearest.is_relative_to("/tmp") else ""
        raise ConfigError(f"{name} = {path}: {nearest} cannot be written to; {other}choose another path")


def _check_socket(path: Path) -> None:
    _check_directory("server.socket", path.parent)
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"server.socket = {path} exists and is not a socket; remove it or choose another path")
