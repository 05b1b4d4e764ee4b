"""The memory that a process may use: the machine's, or the least that its control groups allow.

When a group exceeds its limit, the kernel kills a process of it without a message. Both versions of control groups are
read: the process's own group and all visible groups above it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NONE = 1 << 60  # without a limit, version 1 reports a larger number
_HIERARCHICAL = re.compile(r"^hierarchical_memory_limit (\d+)$", re.MULTILINE)
_MOUNT = re.compile(r"\S+ \S+ \S+ (?P<root>\S+) (?P<at>\S+) .* - (?P<kind>cgroup2?) \S+ (?P<options>\S+)")
_OCTAL = re.compile(r"\\(\d{3})")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit in bytes, the bytes that the group uses now, and the file that sets the limit."""

    nbytes: int
    used_bytes: int
    source: Path


def cgroup_limit(pid: int | str = "self", root: Path = Path("/")) -> MemoryLimit | None:
    """The least limit of the memory groups of process `pid`; None if there is no limit or it cannot be read.

    `memory.high` counts like `memory.max`: above it the kernel slows the group down to a crawl.

    Args:
        root: the folder of `proc` and the mounts; tests pass another one.
    """
    found = [limit for group in _groups(pid, root) for limit in _limits(group)]
    return min(found, key=lambda limit: limit.nbytes, default=None)


def memory_bytes(root: Path = Path("/")) -> int:
    """The most memory that this process may use: the machine's, or less where a group allows less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit(root=root)
    return machine if limit is None else min(machine, limit.nbytes)


def _groups(pid: int | str, root: Path) -> Iterator[Path]:
    """Folders of the process's memory groups, each followed by the groups above it."""
    try:
        own = (root / f"proc/{pid}/cgroup").read_text(errors="replace").splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in own:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        for mount in filter(None, map(_MOUNT.match, mounts)):
            version_2 = mount["kind"] == "cgroup2"
            if version_2 == bool(controllers) or not (version_2 or "memory" in mount["options"].split(",")):
                continue
            top = root / _unescaped(mount["at"]).lstrip("/")
            # In a container the mount's root is the group itself, or lies above what its path begins with.
            inside = path.removeprefix(mount["root"]) if mount["root"] != "/" else path
            if ".." in inside.split("/") or not (group := top / inside.strip("/")).is_dir():
                group = top
            yield group
            while group != top:
                group = group.parent
                yield group


def _limits(group: Path) -> Iterator[MemoryLimit]:
    for limit, used in (("memory.max", "memory.current"), ("memory.high", "memory.current")):
        if (nbytes := _number(group / limit)) is not None:
            yield MemoryLimit(nbytes, _number(group / used) or 0, group / limit)
    if (nbytes := _number(group / "memory.limit_in_bytes")) is not None:
        yield MemoryLimit(nbytes, _number(group / "memory.usage_in_bytes") or 0, group / "memory.limit_in_bytes")
    try:
        above = _HIERARCHICAL.search((group / "memory.stat").read_text())
    except OSError:
        return
    if above is not None and int(above[1]) < _NONE:
        used_bytes = _number(group / "memory.usage_in_bytes") or 0
        yield MemoryLimit(int(above[1]), used_bytes, group / "memory.stat")


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) < _NONE else None


def _unescaped(path: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), path)
