"""What a plan is told of models and machines, and what it says of what it cannot use."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from prefixd.base.errors import ConfigError
from prefixd.planner.machine.calibrate import measure_machine
from prefixd.planner.machine.calibration import Calibration, read_calibration
from prefixd.planner.machine.hardware import HARDWARE, Hardware, find_hardware
from prefixd.planner.machine.pass_costs import MeasuredCosts, PeakCosts
from prefixd.planner.planned_models import MODELS, LayerGroup, PlannedModel, find_model
from prefixd.serving.models.embedded_model import ensure_embedded_model

MEASURED = Calibration(
    machine="a test",
    disk_read_bytes_per_s=1e9,
    disk_write_bytes_per_s=5e8,
    disk_latency_s=1e-4,
    copy_bytes_per_s=1e10,
    copy_latency_s=0.0,
)


def test_known_models_take_what_is_published() -> None:
    assert find_model("Llama-3-8B").token_bytes == 128 << 10
    assert find_model("qwen2.5-7b").token_bytes == 56 << 10
    assert all(model.source and model.groups for model in MODELS.values())
    kv, frame_bytes = find_model("gemma-3-27b").kv(512, 2048)
    assert [group.frames for group in kv.groups] == [5, 26] and kv.block_frames * frame_bytes == 512 * 507904


def test_padding_is_planned_in_gpu_memory_alone() -> None:
    small = find_model("qwen2.5-0.5b")
    assert small.strides(2 << 20) == (32 << 10,) and small.strides(2 << 20, "none") == (12 << 10,)
    kv, frame_bytes = small.kv(512, 2048, small.strides(2 << 20))
    assert kv.block_frames * frame_bytes == 512 * (32 << 10)
    assert sum(part.nbytes for part in kv.parts(frame_bytes)) == 512 * (12 << 10)


@pytest.mark.slow
def test_a_model_directory_is_read_as_the_worker_reads_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = ensure_embedded_model(tmp_path_factory.mktemp("models"))
    read, known = find_model(str(directory)), MODELS["embedded"]
    assert (read.groups, read.query_heads, read.element_bytes) == (known.groups, known.query_heads, known.element_bytes)
    assert read.parameters == pytest.approx(known.parameters, rel=0.01)
    (directory / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be planned with"):
        find_model(str(directory))


@pytest.mark.parametrize(
    ("find", "name", "what"),
    [
        (find_model, "lama-3-8b", "did you mean llama-3-8b?"),
        (find_model, "xyz", "known are llama-3-8b"),
        (find_hardware, "h10", "did you mean h100?"),
        (find_hardware, "xyz", "known are a100"),
    ],
)
def test_an_unknown_name_says_what_is_known(find: object, name: str, what: str) -> None:
    assert callable(find)
    with pytest.raises(ConfigError) as caught:
        find(name)
    assert what in str(caught.value) and name in str(caught.value)


def test_a_pass_takes_as_long_as_its_operations_or_its_bytes() -> None:
    machine = Hardware(
        name="round", flops_per_s=1e12, memory_bytes_per_s=1e9, memory_bytes=1e12, link_bytes_per_s=1e9,
        flops_reached=1.0, memory_reached=1.0, pass_s=0.5,
    )  # fmt: skip
    model = PlannedModel("m", (LayerGroup(1, 1, 128), LayerGroup(1, 1, 128, 4)), 1e6, 1e6, 1, 1024, "a test")
    costs = PeakCosts(machine, model)
    assert costs.pass_s([(1, 0)]) == pytest.approx(0.5 + (2e6 + 2 * 512) / 1e9), "weights and one token's keys"
    long = costs.pass_s([(1, 1000)]) - 0.5
    assert long == pytest.approx((2e6 + 512 * 1001 + 512 * 5) / 1e9), "a window reads no more than it sees"
    many = costs.pass_s([(100_000, 0)]) - 0.5
    assert many == pytest.approx((2e6 * 1e5 + 512 * 1e5 * 5e4 + 512 * 1e5 * 4) / 1e12)
    assert any("200 TFLOP/s" in line or "1 TFLOP/s" in line for line in costs.assumptions())


def test_weights_that_do_not_fit_are_told() -> None:
    lines = PeakCosts(HARDWARE["h100"], MODELS["llama-3-70b"]).assumptions()
    assert "a machine that does not exist" in lines[-1]


def test_measured_costs_are_linear() -> None:
    costs = MeasuredCosts(1.0, 0.1, 0.2, 0.01, 5.0, where="a test")
    assert costs.pass_s([(10, 0), (1, 100)], 1) == pytest.approx(1 + 5 + 1 + 0.01 * 50 + 0.2 + 0.01 * 100.5)


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(MEASURED.to_json())
    assert read_calibration(file) == MEASURED and MEASURED.costs is None
    whole = replace(MEASURED, pass_s=1.0, token_s=1.0, decoded_s=1.0, attended_s=0.0, begun_s=0.0)
    file.write_text(whole.to_json())
    assert read_calibration(file) == whole and whole.costs is not None


def vars_of(calibration: Calibration) -> dict[str, float]:
    plain: dict[str, float] = json.loads(calibration.to_json())
    return plain


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"disk_latency": 1}, "did you mean disk_latency_s?"),
        ({"copy_bytes_per_s": 0}, "a number above 0"),
        ({"copy_bytes_per_s": "fast"}, "a number above 0"),
        ({"copy_latency_s": -1}, "at least 0"),
        ({"copy_latency_s": 1e300}, "at most 1e+30"),
        ({"copy_bytes_per_s": 10**400}, "at most 1e+30"),
        ({"disk_read_bytes_per_s": 1e-300}, "at least 1e-09"),
        ({"machine": 3}, "a text"),
    ],
)
def test_a_wrong_figure_is_named(tmp_path: Path, change: dict[str, object], what: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({**vars_of(MEASURED), **change}))
    with pytest.raises(ConfigError) as caught:
        read_calibration(file)
    assert what in str(caught.value) and next(iter(change)) in str(caught.value)


def peaks() -> dict[str, object]:
    return {name: value for name, value in asdict(HARDWARE["h100"]).items() if value is not None}


def test_a_missing_figure_and_a_missing_file_are_named(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text('{"name": "mine"}')
    with pytest.raises(ConfigError, match="flops_per_s is missing"):
        find_hardware(str(file))
    for text in ("[", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read as JSON"):
            find_hardware(str(file))
    file.write_text(json.dumps(peaks() | {"flops_reached": 50}))
    with pytest.raises(ConfigError, match="flops_reached = 50; give a number above 0, at least 1e-09 and at most 1"):
        find_hardware(str(file))
    with pytest.raises(ConfigError, match="doctor --calibrate"):
        read_calibration(tmp_path / "none.json")


async def test_this_machine_can_be_measured(tmp_path: Path) -> None:
    told: list[str] = []
    measured = await measure_machine(tmp_path, "cpu", told.append)
    assert told == ["the disk", "the codec lossless", "the codec int8", "the codec k8v4", "copies"]
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert all(measured.codec_speed(codec) for codec in ("lossless", "int8", "k8v4"))
    assert min(measured.disk_read_bytes_per_s, measured.disk_write_bytes_per_s, measured.copy_bytes_per_s) > 1e6
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name another directory"):
        await measure_machine(tmp_path / "file", "cpu")
