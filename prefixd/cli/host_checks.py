"""Checks of a host before a daemon's first start: would it start with these settings, and work well?

It starts nothing and changes nothing; in the disk tier's folder it makes a file for a moment.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prefixd.base.errors import ConfigError
from prefixd.base.extras import require
from prefixd.base.sizes import as_size
from prefixd.base.tiers import Tier
from prefixd.cli.machine_checks import Check, check_process, read_meminfo
from prefixd.server.access.disk_keys import read_disk_keys
from prefixd.settings import Settings
from prefixd.settings.checks import check_start, memory_needed
from prefixd.v1 import admin_pb2
from prefixd_swap.memory_limit import cgroup_limit

_POPULATE = (5, 14)
_PIDFD = (5, 3)
_PEER_PIDFD = (6, 5)
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.sshfs", "9p", "lustre", "glusterfs"}
_NVIDIA = Path("/proc/driver/nvidia/version")


def check_host(settings: Settings, file: Path | None, root: Path = Path("/")) -> list[Check]:
    """Returns the findings.

    Args:
        settings: those of the daemon that is to start.
        file: their file; None: there is none.
        root: the directory that has `proc`, `sys` and the control groups; tests pass another one.
    """
    cpu = admin_pb2.TierStats(tier=Tier.CPU.wire, capacity_bytes=settings.cpu.bytes)
    checks = [
        _check_settings(settings, file, root),
        *_check_packages(settings),
        _check_memory(settings),
        _check_group(settings, root),
        *check_process({Tier.CPU.wire: cpu} if settings.cpu.bytes else {}),
        _check_kernel(),
    ]
    if settings.disk.bytes:
        checks += _check_disk(settings, root)
    return checks


def _check_settings(settings: Settings, file: Path | None, root: Path) -> Check:
    found = str(file) if file is not None else "no file, the defaults are used"
    try:
        check_start(settings, root)
        if settings.disk.bytes:
            read_disk_keys(settings)
    except ConfigError as error:
        return Check("configuration", f"{found}; a daemon would not start: {error}", "change this setting")
    return Check("configuration", f"{found}; a daemon would start with it")


def _check_packages(settings: Settings) -> Iterator[Check]:
    found = f"{platform.python_implementation()} {platform.python_version()}, prefixd {_version('prefixd')}"
    try:
        require("daemon", "prefixd serve")
        if settings.worker.enabled:
            require("worker", "a daemon with a model")
    except ConfigError as error:
        yield Check("packages", found, str(error))
    else:
        yield Check("packages", found)
    if not settings.worker.enabled:
        return
    torch, cuda = _version("torch"), _NVIDIA.exists()
    if not cuda:
        yield Check("GPU", f"torch {torch}; there is no NVIDIA driver: models run on the CPU")
    elif torch.endswith("+cpu"):
        yield Check("GPU", f"there is an NVIDIA driver, but torch {torch} cannot use it", "install torch for CUDA")
    else:
        driver = re.search(r"Kernel Module\D*([\d.]+)", _NVIDIA.read_text())
        yield Check("GPU", f"torch {torch}, NVIDIA driver {driver[1] if driver else 'of unknown version'}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _check_memory(settings: Settings) -> Check:
    needed, parts = memory_needed(settings)
    available = read_meminfo("MemAvailable")
    found = f"the daemon needs {as_size(needed)}; {as_size(available)} of {as_size(read_meminfo('MemTotal'))} are free"
    if needed > available:
        return Check("memory", found, f"lower cpu.bytes ({parts}), or end other programs")
    return Check("memory", found)


def _check_group(settings: Settings, root: Path) -> Check:
    limit = cgroup_limit("self", root)
    if limit is None:
        return Check("control group", "it limits no memory")
    found = f"it allows {as_size(limit.nbytes)} of memory and has {as_size(limit.used_bytes)} ({limit.source})"
    needed, _ = memory_needed(settings)
    if needed > limit.nbytes:
        return Check("control group", found, f"raise the limit to {as_size(needed)}, or set cpu.bytes = auto")
    return Check("control group", found)


def _check_kernel() -> Check:
    release = platform.release()
    parts = re.match(r"(\d+)\.(\d+)", release)
    now = (int(parts[1]), int(parts[2])) if parts else (0, 0)
    lacks = [
        name
        for name, there in (
            ("memfd_create, for memory that engines map", hasattr(os, "memfd_create")),
            ("pidfd_open, by which the daemon sees that an engine has died (Linux 5.3)", now >= _PIDFD),
            ("Unix sockets with SO_PEERCRED", hasattr(socket, "SO_PEERCRED")),
        )
        if not there
    ]
    found = f"{sys.platform} {release}"
    if lacks:
        return Check("kernel", f"{found} lacks {'; '.join(lacks)}", "use Linux 5.14 or later")
    slower = [
        *(["disk.io = mmap needs Linux 5.14"] if now < _POPULATE else []),
        *(["engines in other containers map memory from Linux 6.5 on"] if now < _PEER_PIDFD else []),
    ]
    return Check("kernel", "; ".join([f"{found} has all that is needed", *slower]))


def _check_disk(settings: Settings, root: Path) -> Iterator[Check]:
    """Findings about each directory, and about the room of all: `disk.bytes` counts them together."""
    paths = list(settings.disk_paths.values())
    folders = [_nearest_folder(path) for path in paths]
    free: dict[int, int] = {}
    for path, folder in zip(paths, folders, strict=True):
        try:
            left, device = shutil.disk_usage(folder).free, folder.stat().st_dev
        except OSError as error:
            yield Check("disk", f"{folder} cannot be read ({error.strerror})", "choose another directory")
            return
        if device in free:
            yield Check("disk", f"{path} is on the same device as another directory of the tier", "use another drive")
        free[device] = left
        yield _check_device(path, left, device, root)
    total = sum(free.values())
    allocated = sum(slab.stat().st_blocks * 512 for path in paths for slab in path.glob("slabs/*.slab"))
    found = f"{as_size(total)} are free; the disk tier may take {as_size(settings.disk.bytes)}"
    lacking = settings.disk.bytes - allocated - total
    remedy = f"free space there, lower disk.bytes by {as_size(lacking)}, or choose another disk.path"
    yield Check("disk space", found, remedy if lacking > 0 else "")
    yield from (_check_direct_io(settings, folder) for folder in folders)


def _nearest_folder(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _check_device(path: Path, free: int, device: int, root: Path) -> Check:
    kind, what = _file_system(device, root), _device(device, root)
    found = f"{path}: {kind}{what}, {as_size(free)} free"
    remedy = ""
    if kind == "tmpfs":
        remedy = "this is memory, and lost at a restart of the host; choose another directory"
    elif kind in _NETWORK:
        remedy = "choose a local disk: loading over the network may take longer than computing"
    elif "spinning" in what:
        remedy = "choose a solid-state disk: loading from this one may take longer than computing"
    return Check("disk", found, remedy)


def _check_direct_io(settings: Settings, folder: Path) -> Check:
    wanted = settings.disk.io
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".prefixd-doctor-") as file:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        remedy = "it uses the page cache instead, which takes memory from others" if wanted == "direct" else ""
        return Check("direct I/O", f"a file in {folder} cannot be opened with O_DIRECT ({error.strerror})", remedy)
    return Check("direct I/O", f"works in {folder}; disk.io = {wanted}")


def _file_system(device: int, root: Path) -> str:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "a file system of unknown kind"
    kinds = (line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == wanted)
    return next(kinds, "a file system of unknown kind")


def _device(device: int, root: Path) -> str:
    """Returns ` on sda, a spinning disk`; empty if there is no such block device."""
    try:
        folder = (root / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
        whole = folder if (folder / "queue").is_dir() else folder.parent  # a partition is in its disk's folder
        spinning = (whole / "queue" / "rotational").read_text().strip() == "1"
    except OSError:
        return ""
    if whole.name.startswith(("vd", "xvd")):
        return f" on {whole.name}, a virtual disk"  # hypervisors do not say what is behind it
    return f" on {whole.name}, a {'spinning' if spinning else 'solid-state'} disk"
