"""Costs of passes and of transfers on a machine: published peaks times the share that is reached, or measurements of
`prefixd doctor --calibrate`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from prefixd.base.errors import ConfigError
from prefixd.planner.planned_models import PlannedModel


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
        return _ways(Way(self.link_bytes_per_s * self.link_reached, self.link_latency_s), self)

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


class ComputeCosts(Protocol):
    """Costs of a pass of the model."""

    def pass_s(self, parts: Sequence[tuple[int, int]], begun: int = 0, /) -> float:
        """Seconds of one pass.

        Args:
            parts: (computed tokens, tokens before them) of each request in the pass.
            begun: how many of these requests are in a pass for the first time.
        """

    def assumptions(self) -> list[str]:
        """The assumptions, a line each."""


class PeakCosts:
    """Costs by the roofline model: a pass takes as long as its operations or its bytes, whichever is longer.

    Operations: 2 for each weight and token, and those of attention. Bytes: all weights once, and the keys and values of
    each request once.

    Args:
        hardware: the machine.
        model: the model.
    """

    def __init__(self, hardware: Hardware, model: PlannedModel) -> None:
        self._pass_s = hardware.pass_s
        self._flops_per_s = hardware.flops_per_s * hardware.flops_reached
        self._bytes_per_s = hardware.memory_bytes_per_s * hardware.memory_reached
        self._token_flops = 2.0 * model.active_parameters
        self._attention = model.attention
        self._weight_bytes = model.weight_bytes
        self._hardware, self._model = hardware, model

    def pass_s(self, parts: Sequence[tuple[int, int]], begun: int = 0, /) -> float:
        """As in `ComputeCosts`; the constant part of a pass covers the beginning of requests."""
        del begun
        flops, moved = self._token_flops * sum(count for count, _ in parts), self._weight_bytes
        for window, token_flops, token_bytes in self._attention:
            for count, before in parts:
                seen = before + 0.5 * count
                reach = float(before + count)
                if window is not None:
                    seen, reach = min(seen, window), min(reach, float(window + count))
                flops += token_flops * count * seen
                moved += token_bytes * reach
        return self._pass_s + max(flops / self._flops_per_s, moved / self._bytes_per_s)

    def assumptions(self) -> list[str]:
        """The assumptions, a line each."""
        model, lines = self._model, self._hardware.assumptions()
        lines.insert(
            0,
            f"{model.name}: {model.parameters / 1e9:g} billion parameters, {model.token_bytes / 1024:g} KiB of keys "
            f"and values a token ({model.source})",
        )
        if model.weight_bytes > self._hardware.memory_bytes:
            lines.append(
                f"the weights, {model.weight_bytes / 1e9:.0f} GB, are more than the {self._hardware.name}'s "
                f"{self._hardware.memory_bytes / 1e9:.0f} GB: the plan is of a machine that does not exist"
            )
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurements of `prefixd doctor --calibrate` on a machine. None: not measured.

    Attributes:
        machine: in words.
        disk_read_bytes_per_s, disk_write_bytes_per_s, disk_latency_s: of the data directory.
        copy_bytes_per_s: of copies between the CPU tier and where the worker computes.
        copy_latency_s: of such a copy.
        model: the model of the passes.
        pass_s: constant seconds of a pass.
        token_s: further seconds for each token of a prompt.
        decoded_s: further seconds for each token that a request decodes.
        attended_s: further seconds of a token for each token before it.
        begun_s: further seconds of the worker for each request, once: its message, its memory.
        request_s: seconds of a request outside the worker: through the daemon and back.
    """

    machine: str
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    disk_latency_s: float
    copy_bytes_per_s: float
    copy_latency_s: float
    model: str | None = None
    pass_s: float | None = None
    token_s: float | None = None
    decoded_s: float | None = None
    attended_s: float | None = None
    begun_s: float | None = None
    request_s: float = 0.0

    @property
    def ways(self) -> Ways:
        """The ways between the machine's tiers."""
        return _ways(Way(self.copy_bytes_per_s, self.copy_latency_s), self)

    @property
    def costs(self) -> MeasuredCosts | None:
        """The costs of passes; None if they were not measured."""
        figures = (self.pass_s, self.token_s, self.decoded_s, self.attended_s, self.begun_s)
        known = [figure for figure in figures if figure is not None]
        return MeasuredCosts(*known, where=f"{self.model} on {self.machine}") if len(known) == len(figures) else None

    def to_json(self) -> str:
        """As JSON that `read_calibration` reads."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None}, indent=2) + "\n"


def _ways(copies: Way, disk: Hardware | Calibration) -> Ways:
    read, write = (Way(rate, disk.disk_latency_s) for rate in (disk.disk_read_bytes_per_s, disk.disk_write_bytes_per_s))
    return Ways(copies, copies, read, write)


def read_calibration(path: Path) -> Calibration:
    """Reads a file of `prefixd doctor --calibrate`. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"there is no calibration at {path}; make one with `prefixd doctor --calibrate {path}`")
    return Calibration(**read_figures(path, Calibration))


class MeasuredCosts:
    """Costs that are linear in the measured figures. Arguments as in `Calibration`."""

    def __init__(
        self, pass_s: float, token_s: float, decoded_s: float, attended_s: float, begun_s: float, *, where: str
    ) -> None:
        self._pass_s = pass_s
        self._token_s = token_s
        self._decoded_s = decoded_s
        self._attended_s = attended_s
        self._begun_s = begun_s
        self._where = where

    def pass_s(self, parts: Sequence[tuple[int, int]], begun: int = 0, /) -> float:
        """Seconds of one pass; arguments as in `ComputeCosts`."""
        total = self._pass_s + begun * self._begun_s
        for count, before in parts:
            total += count * (self._token_s if count > 1 else self._decoded_s)
            total += self._attended_s * count * (before + 0.5 * count)
        return total

    def assumptions(self) -> list[str]:
        """The assumptions, a line each."""
        return [
            f"measured, {self._where}: {_figure(1e3 * self._pass_s)} ms a pass, {_figure(1e6 * self._token_s)} us a "
            f"token of a prompt, {_figure(1e6 * self._decoded_s)} us a token decoded, "
            f"{_figure(1e9 * self._attended_s)} ns for each token attended to, "
            f"{_figure(1e3 * self._begun_s)} ms to begin a request"
        ]


def _figure(value: float) -> str:
    """Three digits, never as a power of ten: 1203.2 is "1,203"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
