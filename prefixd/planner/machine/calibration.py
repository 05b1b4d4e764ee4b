"""The figures of a machine that were measured: the file of `prefixd doctor --calibrate`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from prefixd.base.errors import ConfigError
from prefixd.planner.machine.hardware import Way, Ways, read_figures, ways_between
from prefixd.planner.machine.pass_costs import MeasuredCosts


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
        lossless_encode_bytes_per_s and the others with a codec's name: exact bytes a second that all threads together
            encode and decode.
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
    lossless_encode_bytes_per_s: float | None = None
    lossless_decode_bytes_per_s: float | None = None
    int8_encode_bytes_per_s: float | None = None
    int8_decode_bytes_per_s: float | None = None
    k8v4_encode_bytes_per_s: float | None = None
    k8v4_decode_bytes_per_s: float | None = None

    @property
    def ways(self) -> Ways:
        """The ways between the machine's tiers."""
        return ways_between(Way(self.copy_bytes_per_s, self.copy_latency_s), self)

    @property
    def costs(self) -> MeasuredCosts | None:
        """The costs of passes; None if they were not measured."""
        figures = (self.pass_s, self.token_s, self.decoded_s, self.attended_s, self.begun_s)
        known = [figure for figure in figures if figure is not None]
        return MeasuredCosts(*known, where=f"{self.model} on {self.machine}") if len(known) == len(figures) else None

    def codec_speed(self, codec: str) -> tuple[float, float] | None:
        """Exact bytes a second that are encoded and decoded with "lossless", "int8" or "k8v4"; None if not measured."""
        encode: float | None = getattr(self, f"{codec}_encode_bytes_per_s")
        decode: float | None = getattr(self, f"{codec}_decode_bytes_per_s")
        return None if encode is None or decode is None else (encode, decode)

    def to_json(self) -> str:
        """As JSON that `read_calibration` reads."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None}, indent=2) + "\n"


def read_calibration(path: Path) -> Calibration:
    """Reads a file of `prefixd doctor --calibrate`. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"there is no calibration at {path}; make one with `prefixd doctor --calibrate {path}`")
    return Calibration(**read_figures(path, Calibration))
