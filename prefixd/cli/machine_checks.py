"""Checks that this machine allows what the daemon needs: process limits, memory maps, shared memory, disk space."""

from __future__ import annotations

import os
import shutil
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefixd.base.sizes import as_size
from prefixd.base.tiers import Tier
from prefixd.v1 import admin_pb2
from prefixd_swap import FormatError
from prefixd_swap.memory_limit import cgroup_limit
from prefixd_swap.slab.drives import list_drives

_DESCRIPTORS = 4096  # 256 slabs, 256 sessions and their connections, and as many again for a worker and its files
_MAPPINGS = 65_530  # the kernel's default
_DAEMON_BYTES = 96 << 20  # memory of a daemon without its tiers
_NO_LIMIT = "unlimited"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; the remedy is empty if all is well."""

    name: str
    found: str
    remedy: str = ""


def check_environment(address: str, stats: admin_pb2.StatsResponse) -> list[Check]:
    """Returns findings about this machine, and about the daemon's process if `address` is a unix socket here."""
    pid = _find_listener(address)
    tiers: dict[int, admin_pb2.TierStats] = {tier.tier: tier for tier in stats.tiers}
    checks = check_process(tiers, pid)
    if Tier.CPU.wire in tiers:
        checks.append(_check_control_group(pid, tiers))
    disk = tiers.get(Tier.DISK.wire)
    path = _find_disk_path(pid)
    if disk is not None and path is not None:
        checks.append(_check_disk_space(path, disk))
    return checks


def check_process(tiers: dict[int, admin_pb2.TierStats], pid: int = 0) -> list[Check]:
    """Returns findings about the limits of a process (0: this one) that is to have these tiers, and about memory."""
    limits = _read_limits(pid)
    checks = [
        _check_descriptors(limits.get("Max open files", "")),
        _check_mappings(),
        _check_locked_memory(limits, tiers),
    ]
    if (cpu := tiers.get(Tier.CPU.wire)) is not None:
        checks.append(_check_shared_memory(cpu))
    return checks


def _find_listener(address: str) -> int:
    """Returns the pid of the process that listens at a unix socket; 0 if the daemon is on another host."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("unix:"))
            return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
        except OSError:
            return 0


def _find_disk_path(pid: int) -> Path | None:
    """Finds the disk tier's directory by the daemon's open lock file; None if its descriptors are not readable."""
    held: list[Path] = []
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the daemon has closed it meanwhile
                held.append(entry.readlink())
    except OSError:
        return None
    return next((path.parent for path in held if path.name == "LOCK" and (path.parent / "slabs").is_dir()), None)


def _read_limits(pid: int) -> dict[str, str]:
    """Returns soft limits by name: those of the daemon, or of this process if `pid` is 0; they are usually equal."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/limits").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {line[:26].strip(): line[26:].split()[0] for line in lines}


def _check_descriptors(limit: str) -> Check:
    number = f"{int(limit):,}" if limit.isdecimal() else limit or "any number"
    found = f"a process may have {number}"
    if limit.isdecimal() and int(limit) < _DESCRIPTORS:
        return Check(
            "file descriptors",
            found,
            f"raise it to {_DESCRIPTORS} or more: `ulimit -n {_DESCRIPTORS}`, or LimitNOFILE= in a systemd unit",
        )
    return Check("file descriptors", found)


def _check_mappings() -> Check:
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return Check("memory mappings", "the limit cannot be read here")
    found = f"a process may have {limit:,} (vm.max_map_count)"
    if limit < _MAPPINGS:
        return Check("memory mappings", found, f"raise it: `sysctl -w vm.max_map_count={_MAPPINGS}`")
    return Check("memory mappings", found)


def _check_locked_memory(limits: dict[str, str], tiers: dict[int, admin_pb2.TierStats]) -> Check:
    limit = limits.get("Max locked memory", "")
    wanted = tiers[Tier.CPU.wire].capacity_bytes if Tier.CPU.wire in tiers else 0
    if not limit.isdecimal():
        return Check("locked memory", f"a process may lock {limit or _NO_LIMIT}")
    found = f"a process may lock {as_size(int(limit))}"
    if int(limit) < wanted and os.path.exists("/dev/nvidiactl"):  # only CUDA pins the CPU tier
        return Check(
            "locked memory",
            f"{found}, the CPU tier has {as_size(wanted)}",
            "raise it: `ulimit -l unlimited`, or LimitMEMLOCK=infinity in a systemd unit",
        )
    return Check("locked memory", found)


def _check_shared_memory(cpu: admin_pb2.TierStats) -> Check:
    """The CPU tier is a memfd: it counts as shared memory, but the machine's memory bounds it, not /dev/shm's size."""
    memory = read_meminfo("MemTotal")
    found = f"the CPU tier may take {as_size(cpu.capacity_bytes)} of {as_size(memory)} memory"
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError:
        return Check("shared memory", f"{found}; there is no /dev/shm", "mount a tmpfs there: PyTorch needs it")
    found += f"; /dev/shm has {as_size(shm.free)} left"
    if memory and cpu.capacity_bytes > memory * 9 // 10:
        return Check(
            "shared memory", found, "lower cpu.bytes: the machine swaps or kills processes before the tier is full"
        )
    return Check("shared memory", found)


def _check_control_group(pid: int, tiers: dict[int, admin_pb2.TierStats], root: Path = Path("/")) -> Check:
    """The whole CPU tier counts against the daemon's control group, since the daemon touches its pages first."""
    limit = cgroup_limit(pid or "self", root)
    if limit is None:
        return Check("control group", "it limits no memory")
    cpu = tiers[Tier.CPU.wire].capacity_bytes
    found = (
        f"the daemon's group may have {as_size(limit.nbytes)} of memory and has {as_size(limit.used_bytes)} "
        f"({limit.source})"
    )
    if cpu + _DAEMON_BYTES > limit.nbytes:
        return Check(
            "control group",
            f"{found}; the CPU tier takes {as_size(cpu)}",
            f"raise the limit to {as_size(cpu + _DAEMON_BYTES)} or more, or set cpu.bytes = auto: the daemon is killed "
            "before the tier is full",
        )
    return Check("control group", found)


def _check_disk_space(path: Path, disk: admin_pb2.TierStats) -> Check:
    """The space of the directories of the disk tier whose first is `path`."""
    try:
        paths = [path, *list_drives(path)]
        free = sum({each.stat().st_dev: shutil.disk_usage(each).free for each in paths}.values())
    except OSError as error:
        return Check("disk space", f"this user cannot read {error.filename} ({error.strerror})")
    except FormatError as error:
        return Check("disk space", f"{error}")
    allocated = sum(slab.stat().st_blocks * 512 for each in paths for slab in each.glob("slabs/*.slab"))
    wanted = max(disk.capacity_bytes - allocated, 0)
    names = " and ".join(map(str, paths))
    found = f"{names} have {as_size(free)} left; the disk tier may grow by {as_size(wanted)}"
    if len(paths) == 1:
        found = f"{path} has {as_size(free)} left; the disk tier may grow by {as_size(wanted)}"
    if free < wanted:
        return Check("disk space", found, f"free space there, or lower disk.bytes by {as_size(wanted - free)}")
    return Check("disk space", found)


def read_meminfo(name: str) -> int:
    """Returns a figure of /proc/meminfo in bytes; 0 if it cannot be read."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
