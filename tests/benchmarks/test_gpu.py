"""The GPU benchmark as a user runs it, on a driver that is not one; and what it makes of failures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.common.harness import BenchmarkError
from benchmarks.gpu_parts.decode import MODES
from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.part import Budget, Part, Unavailable
from prefixd.worker.attention.choice.cost_table import read_costs

ROOT = Path(__file__).parents[2]
WAYS = ("map", "remap", "reuse", "copy", "table")  # to attach a prefix
SOURCES = ("gpu", "gpu_eager", "gpu_one_call", "gpu_split", "gpu_unmapped", "gpu_dirty", "cpu", "disk", "recomputed")
FOR_GPUS_ALONE = {"coded_pages", "flex_attention", "daemon_8b", "decode_16k"}
SIZES = (4, 16, 32, 64)  # MiB of a piece of the daemon's copies
DRIVER = ROOT / "tests" / "swap" / "stand_in" / "libcuda.c"


def run(folder: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    file = folder / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--json", str(file), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done, json.loads(file.read_text())


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process whose CUDA driver is the stand-in."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in driver with")
    folder = tmp_path_factory.mktemp("stand_in")
    flags = ["-O2", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, "-o", str(folder / "libcuda.so.1"), str(DRIVER)], check=True)
    return {"LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so the benchmark would run")
def test_without_a_gpu_it_says_so_and_ends_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--json", str(file)])
    gpu.main()
    said = capsys.readouterr().out
    assert len(said.splitlines()) == 1 and "no CUDA GPU" in said
    assert "no CUDA GPU" in json.loads(file.read_text())["skipped"]


@pytest.mark.parametrize("commit", ["0123abc+changes", None])
def test_a_tree_that_no_commit_has_is_refused_before_anything_runs(
    commit: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "circumstances", lambda: {"commit": commit})
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry-run", "--json", str(tmp_path / "result.json")])
    with pytest.raises(BenchmarkError, match=r"no commit has this tree .* --with-changes"):
        gpu.main()


def test_a_dry_run_lists_the_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--device", "cpu", "--dry-run", "--plot-dir", str(tmp_path), "--only", "machine", "--only", "swap"]
    monkeypatch.setattr(sys, "argv", ["gpu", *options])
    gpu.main()
    assert "machine 12, swap 12; together 24" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_part_runs_on_the_stand_in_and_its_times_are_no_figures(stand_in: dict[str, str], tmp_path: Path) -> None:
    done, result = run(tmp_path, "--device", "stand-in", "--plot-dir", str(tmp_path / "plots"), **stand_in)
    assert result["figures"].startswith("stand-in, no figures")
    parts = result["parts"]
    assert list(parts) == [part.name for part in gpu.PARTS]
    assert {name for name, part in parts.items() if part["status"] != "measured"} == FOR_GPUS_ALONE
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"result_attach.png", "result_first_token.png"}

    assert [point["chunks"] for point in parts["virtual_memory"]["points"]] == [1, 8]
    assert [point["chunks"] for point in parts["virtual_memory"]["sizes"]] == [8, 4]
    assert [(point["threads"], point["chunk_us"] > 0) for point in parts["virtual_memory"]["threads"]] == [
        (threads, True) for threads in (1, 2, 4)
    ]
    assert all(point[f"{name}_us"] > 0 for point in parts["attach"]["points"] for name in WAYS)
    assert [point["chunk_bytes"] >> 20 for point in parts["attach"]["sizes"] if point["extents_us"] > 0] == [2, 4]
    assert {point["layout"] for point in parts["attach"]["points"]} == {"token", "layer"}
    assert all(point[f"{way}_gbps"] > 0 for point in parts["machine"]["points"] for way in ("d2d", "h2d", "d2h"))
    alone, beside = parts["mapping_beside"]["points"]
    assert alone["mapped_chunks"] == 0 < beside["mapped_chunks"]
    swap = parts["swap"]
    assert swap["h2d_engine_one_ratio"] == pytest.approx(swap["h2d_engine_one_gbps"] / swap["h2d_peak_gbps"], abs=1e-3)
    assert {"d2h_engine_run_ratio", "h2d_engine_scattered_ratio"} <= set(swap)
    pages = parts["pages"]
    assert len(pages["points"]) == 2 * (2 * 4 + 3) and len(pages["beside"]) == 2 * 2
    copies = parts["daemon_copies"]
    assert {(p["way"], p["piece_mib"]) for p in copies["points"]} == {(w, m) for w in ("h2d", "d2h") for m in SIZES}
    assert all(point["gbps"] > 0 and point["loop_ms_per_gib"] > 0 for point in copies["points"])
    assert [point["width_kib"] for point in copies["points"] if "width_kib" in point] == [12, 12, 56, 56]
    attention = parts["attention"]
    measured = {(p["shape"], p["layout"], p["phase"], p["batch"]) for p in attention["points"]}
    assert len(measured) == 2 * 2 * 2, "two shapes, phases and batches"
    assert all({"contiguous_us", "alone_us", "split8_us", "paged_us"} <= set(point) for point in attention["points"])
    baselines = {"stride_us", "request_us", "triton_us", "extents_us", "gathered_us", "split4_us", "split16_us"}
    assert baselines <= set(attention["points"][0])
    costs = read_costs("", str(tmp_path / "result.attention_costs"))
    assert sum(len(heads.points) for heads in costs.heads) == len(measured)
    assert max(attention["relative_errors"].values()) < 0.02
    (first,) = parts["first_token"]["points"]
    assert all(first[f"{source}_ms"] > 0 for source in SOURCES)
    assert [point["step_tokens"] for point in parts["first_token"]["steps"]] == [64, 256]
    assert parts["first_token"]["pinned_bytes"] == parts["first_token"]["arena_bytes"]
    decode = parts["decode"]
    assert [(point["mode"], point["batch"]) for point in decode["points"]] == [
        (mode.name, batch) for mode in MODES for batch in (1, 2)
    ]
    assert (decode["graphs"], decode["operators"]) == ("captured", "merged")
    daemon = parts["daemon"]
    assert [point["tier"] for point in daemon["points"]] == ["none", "gpu", "cpu", "disk"]
    assert sum(point["samples"] for point in daemon["points"]) == 3 * 12 and daemon["other_first_tokens"] == 0
    assert len(daemon["layerwise_loads"]) == 1, "of one daemon; how many there are is chance"
    assert min(daemon["text_analysis"].values()) > 0
    for point in parts["memory_held"]["points"]:
        assert point["driver_bytes"] == point["held_bytes"] <= point["private_bytes"] <= point["preallocated_bytes"]
    assert "no part failed" in done.stdout


def part(name: str, measure: Any) -> Part:
    return Part(name, 1.0, measure, lambda figure, result: None)


@pytest.mark.slow
def test_a_part_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    def breaks(device: Device, budget: Budget) -> Mapping[str, Any]:
        raise ValueError("no such\nkernel")

    def breaks_in_a_point(device: Device, budget: Budget) -> Mapping[str, Any]:
        with budget.attempt("second point"):
            raise ValueError("too large")
        return {"points": [1]}

    def lacks(device: Device, budget: Budget) -> Mapping[str, Any]:
        raise Unavailable("no Triton")

    parts = [
        part("broken", breaks),
        part("half", breaks_in_a_point),
        part("lacking", lacks),
        part("good", lambda device, budget: {"points": [2]}),
    ]
    file = tmp_path / "result.json"
    gpu.run(Device("cpu"), parts, file, tmp_path)
    results = json.loads(file.read_text())["parts"]
    assert [results[name]["status"] for name in ("broken", "half", "lacking", "good")] == [
        "failed",
        "failed",
        "unavailable",
        "measured",
    ]
    assert results["broken"]["errors"] == {"all": "ValueError: no such kernel"}
    assert (results["half"]["points"], results["half"]["errors"]) == ([1], {"second point": "ValueError: too large"})
    assert results["lacking"]["reason"] == "no Triton"
    assert sorted(plot.name for plot in tmp_path.glob("*.png")) == ["result_good.png", "result_half.png"]


def test_parts_without_time_are_left_out(tmp_path: Path) -> None:
    parts = [part("late", lambda device, budget: {}), part("later", lambda device, budget: {})]
    results = gpu.run(Device("cpu"), parts, tmp_path / "result.json", None, seconds=0.0)["parts"]
    assert [(each["status"], "--seconds" in each["reason"]) for each in results.values()] == [("unavailable", True)] * 2
    assert (
        gpu.measure(Device("cpu"), part("short", lambda device, budget: {"over": budget.over}), 60.0)["over"] is False
    )


def test_a_part_leaves_out_what_its_time_does_not_suffice_for() -> None:
    now = [0.0]
    budget = Budget(2.0, lambda: now[0])
    assert budget.allows("first")
    now[0] = 2.0
    assert not budget.allows("second") and not budget.allows("third")
    assert budget.skipped == ["second", "third"]
