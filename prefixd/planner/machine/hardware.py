"""A machine by its published figures, and the ways between its tiers."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from prefixd.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Way:
    """Bandwidth and latency of transfers between two tiers, in one direction."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways between the tiers of a machine: copies to and from the GPU, reads and writes of the disk."""

    to_gpu: Way
    from_gpu: Way
    disk_read: Way
    disk_write: Way


class DiskFigures(Protocol):
    """What is known of a disk."""

    @property
    def disk_read_bytes_per_s(self) -> float:
        """Bytes a second that are read."""

    @property
    def disk_write_bytes_per_s(self) -> float:
        """Bytes a second that are written."""

    @property
    def disk_latency_s(self) -> float:
        """Seconds of a read or a write of nothing."""


def ways_between(copies: Way, disk: DiskFigures) -> Ways:
    """The ways of a machine with `copies` each way to and from the GPU, and a disk."""
    read, write = (Way(rate, disk.disk_latency_s) for rate in (disk.disk_read_bytes_per_s, disk.disk_write_bytes_per_s))
    return Ways(copies, copies, read, write)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine by its published figures.

    Attributes:
        name: by which a user chooses it.
        flops_per_s: dense matrix products in 16 bits, peak.
        memory_bytes_per_s: of the GPU's memory, peak.
        memory_bytes: of the GPU.
        link_bytes_per_s: between GPU and CPU memory, one direction, peak.
        disk_read_bytes_per_s, disk_write_bytes_per_s, disk_latency_s: of the disk.
        flops_reached, memory_reached, link_reached: the share of the peaks that passes and copies reach.
        pass_s: further seconds of each pass: launching kernels, sampling, the scheduler.
        source: the publication of the figures.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    disk_read_bytes_per_s: float = 6.5e9
    disk_write_bytes_per_s: float = 3.5e9
    disk_latency_s: float = 100e-6
    flops_reached: float = 0.5
    memory_reached: float = 0.7
    link_reached: float = 0.8
    link_latency_s: float = 20e-6
    pass_s: float = 2e-3
    source: str = "given"

    @property
    def ways(self) -> Ways:
        """The ways between its tiers."""
        return ways_between(Way(self.link_bytes_per_s * self.link_reached, self.link_latency_s), self)

    def assumptions(self) -> list[str]:
        """A plan's assumptions about passes on this machine, a line each."""
        return [
            f"{self.name}: {self.flops_per_s / 1e12:,.0f} TFLOP/s of which {self.flops_reached:.0%} are reached, "
            f"{self.memory_bytes_per_s / 1e9:,.0f} GB/s of which {self.memory_reached:.0%} are reached, "
            f"{1e3 * self.pass_s:g} ms a pass besides ({self.source})"
        ]

    def way_assumptions(self) -> list[str]:
        """A plan's assumptions about the ways between the tiers, a line each."""
        return [
            f"GPU to CPU memory: {self.link_bytes_per_s / 1e9:,.0f} GB/s each way of which {self.link_reached:.0%} are "
            "reached",
            f"disk: {self.disk_read_bytes_per_s / 1e9:g} GB/s read, {self.disk_write_bytes_per_s / 1e9:g} GB/s "
            f"written, {1e6 * self.disk_latency_s:g} us latency",
        ]


_LEAST, _MOST = 1e-9, 1e30  # of a figure: products of several figures are finite floats
_NVIDIA = "NVIDIA's data sheet; the disk: Samsung PM9A3 3.84 TB's data sheet"
HARDWARE = {
    machine.name: machine
    for machine in (
        Hardware(
            name="a100",
            flops_per_s=312e12,
            memory_bytes_per_s=2.039e12,
            memory_bytes=80e9,
            link_bytes_per_s=32e9,
            source=_NVIDIA,
        ),
        Hardware(
            name="h100",
            flops_per_s=989e12,
            memory_bytes_per_s=3.35e12,
            memory_bytes=80e9,
            link_bytes_per_s=64e9,
            source=_NVIDIA,
        ),
        Hardware(
            name="h200",
            flops_per_s=989e12,
            memory_bytes_per_s=4.8e12,
            memory_bytes=141e9,
            link_bytes_per_s=64e9,
            source=_NVIDIA,
        ),
    )
}


def find_hardware(name: str) -> Hardware:
    """A machine by its name here, or by a JSON file with the fields of `Hardware`.

    Raises:
        ConfigError: there is no such machine, or the file does not describe one.
    """
    if name.lower() in HARDWARE:
        return HARDWARE[name.lower()]
    path = Path(name).expanduser()
    if path.is_file():
        return Hardware(**read_figures(path, Hardware))
    near = difflib.get_close_matches(name.lower(), HARDWARE, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    names = ", ".join(field.name for field in fields(Hardware))
    raise ConfigError(
        f"there is no hardware {name!r}; {hint}known are {', '.join(HARDWARE)}, or name a JSON file with {names}"
    )


def read_figures(path: Path, kind: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass of numbers and texts from a JSON file.

    Raises:
        ConfigError: it is no JSON object, or a field is unknown, missing or no positive number.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object with the figures of a machine")
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(content.keys() - known.keys()):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        raise ConfigError(
            f"{path}: there is no figure {unknown[0]!r}; " + (f"did you mean {near[0]}?" if near else "remove it")
        )
    needed = [name for name, field in known.items() if field.default is field.default_factory]
    if missing := sorted(set(needed) - content.keys()):
        raise ConfigError(f"{path}: {missing[0]} is missing; give a number")
    for name, value in content.items():
        text = str(known[name].type).startswith("str")
        if text != isinstance(value, str) or not (text or _is_figure(name, value)):
            least = "of at least 0" if _is_time(name) else f"above 0, at least {_LEAST:g}"
            wanted = "a text" if text else f"a number {least} and at most {_most(name):g}"
            raise ConfigError(f"{path}: {name} = {value!r}; give {wanted}")
    return content


def _is_time(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def _most(name: str) -> float:
    """The largest value of a figure: 1 for a share of a peak."""
    return 1.0 if name.endswith("_reached") else _MOST


def _is_figure(name: str, value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return _LEAST <= value <= _most(name) or (_is_time(name) and 0 <= value < _LEAST)
