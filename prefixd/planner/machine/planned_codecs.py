"""Codecs of the planned disk tier: how many bytes they store of a model's blocks, and how fast they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefixd.base.codec_names import CODEC_NAMES, CODECS_EXTRA, LOSSY
from prefixd.base.errors import ConfigError
from prefixd.base.extras import require
from prefixd.planner.machine.calibration import Calibration
from prefixd.planner.planned_models import PlannedModel
from prefixd.planner.simulation.link import SimulatedCoding
from prefixd.settings.inference import WorkerSettings
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.group_shape import ELEMENT_BYTES
from prefixd_swap.slots import round_to_slot

_THREAD_SPEEDS = {"lossless": (1.3e9, 2.9e9), "int8": (1.3e9, 4.7e9), "k8v4": (1.0e9, 2.5e9)}
"""Exact bytes a second that a thread encodes and decodes: `benchmarks.codecs` on a core of an EPYC."""


@dataclass(frozen=True, slots=True)
class PlannedCodec:
    """A codec of the planned disk tier.

    Attributes:
        name: as of `disk.codec`.
        stored: bytes on the disk for each byte of a block: 0.52.
        encode_bytes_per_s, decode_bytes_per_s: exact bytes a second, of all threads together.
        source: of the speeds, in words.
    """

    name: str
    stored: float = 1.0
    encode_bytes_per_s: float = math.inf
    decode_bytes_per_s: float = math.inf
    source: str = "nothing is encoded"

    @property
    def down(self) -> SimulatedCoding:
        """On the way to the disk."""
        return SimulatedCoding(self.stored, self.encode_bytes_per_s)

    @property
    def up(self) -> SimulatedCoding:
        """On the way from the disk."""
        return SimulatedCoding(self.stored, self.decode_bytes_per_s)

    @property
    def assumption(self) -> str:
        """A plan's assumption about it, a line."""
        answers = "; what it does to answers is in no figure here" if self.name in LOSSY else ""
        return (
            f"{self.name}: a block takes {self.stored:.3f} of its bytes on disk; {self.encode_bytes_per_s / 1e9:.3g} "
            f"GB/s are encoded and {self.decode_bytes_per_s / 1e9:.3g} GB/s decoded ({self.source}){answers}"
        )


EXACT = PlannedCodec("exact")


def plan_codec(
    name: str,
    model: PlannedModel,
    threads: int,
    measured: Calibration | None = None,
    *,
    block_tokens: int = WorkerSettings.model_fields["block_tokens"].default,
) -> PlannedCodec:
    """A codec for the blocks of a model.

    Its share of the bytes is that of sampled keys and values.

    Args:
        name: one of `CODEC_NAMES`.
        model: whose keys and values are stored.
        threads: of the disk tier: so many encode, and so many decode.
        measured: a machine; its speeds count if it has them.
        block_tokens: of the daemon's blocks; a plan's blocks may be longer, for speed.

    Raises:
        ConfigError: there is no such codec, or its packages are not installed.
    """
    if name == EXACT.name:
        return EXACT
    if name not in CODEC_NAMES:
        raise ConfigError(f"there is no codec {name!r}; use one of {', '.join(CODEC_NAMES)}")
    require(CODECS_EXTRA, f"the codec {name}")
    from prefixd.planner.machine.codec_speeds import AXES, stored_bytes  # needs packages of that extra

    dtype = "float32" if model.element_bytes == ELEMENT_BYTES["float32"] else "bfloat16"
    exact = stored = 0
    for group in model.groups:
        shape = PartShape(dtype, group.layers, block_tokens, group.kv_heads, group.head_dim, AXES)
        exact += shape.nbytes
        stored += round_to_slot(stored_bytes(name, shape))
    speed = None if measured is None else measured.codec_speed(name)
    if measured is None or speed is None:
        encode, decode = _THREAD_SPEEDS[name]
        return PlannedCodec(
            name, min(1.0, stored / exact), threads * encode, threads * decode, f"{threads} threads each"
        )
    return PlannedCodec(name, min(1.0, stored / exact), *speed, f"measured on {measured.machine}")
