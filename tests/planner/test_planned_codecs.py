"""A plan's codecs store what the daemon's own codecs do, and say what is assumed of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefixd.base.errors import ConfigError
from prefixd.planner.machine.calibration import Calibration
from prefixd.planner.machine.codec_speeds import AXES, measure_codec, sample_part
from prefixd.planner.machine.planned_codecs import EXACT, plan_codec
from prefixd.planner.planned_models import MODELS
from prefixd_swap.codecs.part_shape import PartShape

MEASURED = Calibration(
    machine="a test",
    disk_read_bytes_per_s=1e9,
    disk_write_bytes_per_s=5e8,
    disk_latency_s=1e-4,
    copy_bytes_per_s=1e10,
    copy_latency_s=0.0,
)


@pytest.mark.parametrize(
    ("model", "codec", "stored"),
    [
        ("llama-3-8b", "lossless", 0.70),
        ("llama-3-8b", "int8", 0.53),
        ("llama-3-8b", "k8v4", 0.41),
        ("gemma-2-9b", "int8", 0.54),
        ("embedded", "int8", 0.27),  # of numbers of 32 bits
        ("embedded", "lossless", 0.86),
    ],
)
def test_bytes_are_those_of_the_codec(model: str, codec: str, stored: float) -> None:
    planned = plan_codec(codec, MODELS[model], 4)
    assert planned.stored == pytest.approx(stored, abs=0.03)
    assert f"{codec}: a block takes {planned.stored:.3f} of its bytes on disk" in planned.assumption
    assert ("what it does to answers" in planned.assumption) is (codec != "lossless")


def test_exact_blocks_are_as_they_are() -> None:
    assert plan_codec("exact", MODELS["llama-3-8b"], 4) is EXACT
    assert (EXACT.up.stored, EXACT.down.stored) == (1.0, 1.0)


def test_speeds_are_measured_or_those_of_threads() -> None:
    two, four = (plan_codec("int8", MODELS["embedded"], threads) for threads in (2, 4))
    assert four.encode_bytes_per_s == 2 * two.encode_bytes_per_s and "(4 threads each)" in four.assumption
    assert plan_codec("int8", MODELS["embedded"], 4, MEASURED) == four, "a calibration from before codecs"
    told = replace(MEASURED, int8_encode_bytes_per_s=1e9, int8_decode_bytes_per_s=3e9)
    here = plan_codec("int8", MODELS["embedded"], 4, told)
    assert (here.down.bytes_per_s, here.up.bytes_per_s) == (1e9, 3e9) and "measured on a test" in here.assumption
    assert plan_codec("k8v4", MODELS["embedded"], 4, told).source == "4 threads each"


def test_an_unknown_codec_names_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="no codec 'int4'; use one of exact, lossless, int8, k8v4"):
        plan_codec("int4", MODELS["embedded"], 4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_sampled_part_has_the_shapes_bytes_and_is_repeatable(dtype: str) -> None:
    shape = PartShape(dtype, 2, 16, 2, 64, AXES)
    part = sample_part(shape)
    assert part.size == shape.nbytes and (part == sample_part(shape)).all() and (part != sample_part(shape, 1)).any()


def test_a_codec_can_be_measured_here() -> None:
    speed = measure_codec("int8", 1, 2)
    assert min(speed.encode_bytes_per_s, speed.decode_bytes_per_s) > 1e6
