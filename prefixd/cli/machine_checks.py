"""What of this machine can stand in the daemon's way: limits of the process, memory maps, shared memory, disk space."""

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
from prefixd_swap.memory_limit import cgroup_limit

_DESCRIPTORS = 4096  # 256 slabs, 256 sessions and their connections, and as much again for a worker and its files
_MAPPINGS = 65_530  # the kernel's default
_DAEMON_BYTES = 96 << 20  # beside its tiers
_NO_LIMIT = "unlimited"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was looked at, what was found, and what to do about it (nothing when all is well)."""

    name: str
    found: str
    remedy: str = ""


def check_environment(address: str, stats: admin_pb2.StatsResponse) -> list[Check]:
    """Findings about this machine, and about the daemon's process where `address` is a unix socket of ours."""
    pid = _peer(address)
    limits = _limits(pid)
    tiers: dict[int, admin_pb2.TierStats] = {tier.tier: tier for tier in stats.tiers}
    checks = [_descriptors(limits.get("Max open files", "")), _mappings(), _memlock(limits, tiers)]
    cpu, disk = tiers.get(Tier.CPU.wire), tiers.get(Tier.DISK.wire)
    if cpu is not None:
        checks.append(_shared_memory(cpu))
        checks.append(_control_group(pid, tiers))
    path = _disk_path(pid)
    if disk is not None and path is not None:
        checks.append(_disk_space(path, disk))
    return checks


def _peer(address: str) -> int:
    """The process that listens at a unix socket; 0 for a daemon elsewhere."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("unix:"))
            return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])
        except OSError:
            return 0


def _disk_path(pid: int) -> Path | None:
    """The disk tier's directory: the one with the daemon's lock and slabs. None when we may not look."""
    held: list[Path] = []
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has been closed meanwhile
                held.append(entry.readlink())
    except OSError:
        return None
    return next((path.parent for path in held if path.name == "LOCK" and (path.parent / "slabs").is_dir()), None)


def _limits(pid: int) -> dict[str, str]:
    """Soft limits by name, of the daemon's process or else of this one, which its user starts alike."""
    try:
        lines = Path(f"/proc/{pid or 'self'}/limits").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {line[:26].strip(): line[26:].split()[0] for line in lines}


def _descriptors(limit: str) -> Check:
    if limit.isdecimal() and int(limit) < _DESCRIPTORS:
        return Check(
            "file descriptors",
            f"a process may have {limit}",
            f"raise it to {_DESCRIPTORS} or more: `ulimit -n {_DESCRIPTORS}`, or LimitNOFILE= in a systemd unit",
        )
    return Check("file descriptors", f"a process may have {limit or 'as many as it likes'}")


def _mappings() -> Check:
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return Check("memory mappings", "the limit cannot be read here")
    found = f"a process may have {limit:,} (vm.max_map_count)"
    if limit < _MAPPINGS:
        return Check("memory mappings", found, f"raise it: `sysctl -w vm.max_map_count={_MAPPINGS}`")
    return Check("memory mappings", found)


def _memlock(limits: dict[str, str], tiers: dict[int, admin_pb2.TierStats]) -> Check:
    limit = limits.get("Max locked memory", "")
    wanted = tiers[Tier.CPU.wire].capacity_bytes if Tier.CPU.wire in tiers else 0
    if not limit.isdecimal():
        return Check("locked memory", f"a process may lock {limit or _NO_LIMIT}")
    found = f"a process may lock {as_size(int(limit))}"
    if int(limit) < wanted and os.path.exists("/dev/nvidiactl"):  # only CUDA wants the CPU tier pinned
        return Check(
            "locked memory",
            f"{found}, the CPU tier has {as_size(wanted)}",
            "raise it: `ulimit -l unlimited`, or LimitMEMLOCK=infinity in a systemd unit",
        )
    return Check("locked memory", found)


def _shared_memory(cpu: admin_pb2.TierStats) -> Check:
    """The CPU tier is a memfd: it counts as shared memory, but is bounded by memory, not by /dev/shm's size."""
    memory = _meminfo("MemTotal")
    found = f"the CPU tier may take {as_size(cpu.capacity_bytes)} of {as_size(memory)} memory"
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError:
        return Check("shared memory", f"{found}; there is no /dev/shm", "mount a tmpfs there: PyTorch needs it")
    found += f"; /dev/shm has {as_size(shm.free)} left"
    if memory and cpu.capacity_bytes > memory * 9 // 10:
        return Check("shared memory", found, "lower cpu.bytes: the machine swaps or kills processes before it is full")
    return Check("shared memory", found)


def _control_group(pid: int, tiers: dict[int, admin_pb2.TierStats], root: Path = Path("/")) -> Check:
    """The daemon's group pays for the whole CPU tier, whichever engine fills it: the daemon touches its pages first."""
    limit = cgroup_limit(pid or "self", root)
    if limit is None:
        return Check("control group", "it limits no memory")
    cpu = tiers[Tier.CPU.wire].capacity_bytes
    found = f"the daemon's may have {as_size(limit.nbytes)} of memory, has {as_size(limit.used_bytes)} ({limit.source})"
    if cpu + _DAEMON_BYTES > limit.nbytes:
        return Check(
            "control group",
            f"{found}; the CPU tier takes {as_size(cpu)}",
            f"raise the limit to {as_size(cpu + _DAEMON_BYTES)} or more, or set cpu.bytes = auto: the daemon is killed "
            "before the tier is full",
        )
    return Check("control group", found)


def _disk_space(path: Path, disk: admin_pb2.TierStats) -> Check:
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Check("disk space", f"{path} cannot be read from here ({error.strerror})")
    allocated = sum(slab.stat().st_blocks * 512 for slab in path.glob("slabs/*.slab"))
    wanted = max(disk.capacity_bytes - allocated, 0)
    found = f"{path} has {as_size(free)} left; the disk tier may grow by {as_size(wanted)}"
    if free < wanted:
        return Check("disk space", found, f"free space there, or lower disk.bytes by {as_size(wanted - free)}")
    return Check("disk space", found)


def _meminfo(name: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
