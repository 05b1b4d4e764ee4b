"""The worker benchmark in short, and that it sees what it looks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import worker
from benchmarks.kv import designs, step_tail
from benchmarks.kv import memory_by_design as memory_held
from benchmarks.kv.rig import PAGED, VIRTUAL, EngineRig, Frames, Request, load_embedded_model
from prefixd.worker.model import CausalModel

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "requests": 2,
    "repetitions": 1,
    "prompt-tokens": 24,
    "output-tokens": 3,
    "prefix-tokens": 64,
    "question-tokens": 6,
    "answer-tokens": 2,
    "rounds": 1,
    "steps": 8,
    "largest-batch": 2,
    "longest-prompt-tokens": 40,
}


@pytest.fixture(scope="module")
def model() -> CausalModel:
    torch.set_num_threads(1)
    return load_embedded_model()


def good_result(**changes: Any) -> dict[str, Any]:
    kinds = {"idle": 0, "boundary": 2, "attach": 9}
    return {
        "same_tokens": True,
        "workloads": [{"name": "single_generation", "same_tokens": changes.get("same_tokens", True)}],
        "virtual_over_paged": {"single_generation": 1.0, "prefix_sharing": 1.2},
        "attention_calls": [calls(1, mixed_passes=0), calls(2)],
        "step_p99_ratio": 1.1,
        "idle_halves_p99_ratio": 1.0,
        "step_times": [{"steps": {kind: {"blocks_mapped": blocks} for kind, blocks in kinds.items()}}],
        "memory_ratio": {"1": 0.1},
        **changes,
    }


def calls(batch: int, **changes: Any) -> dict[str, Any]:
    return {"batch": batch, "largest_pass": batch, "mixed_passes": 3, "attention_calls_per_layer": 1.0, **changes}


@pytest.mark.slow
def test_one_run_measures_all_four(tmp_path: Path) -> None:
    file, picture = tmp_path / "result.json", tmp_path / "result.svg"
    sizes = [word for name, value in SHORT.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.worker", *sizes, f"--json={file}", f"--plot={picture}"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert file.exists(), done.stderr
    result = json.loads(file.read_text())
    # A run this short says nothing of time, and may well fail for that; of nothing else.
    late = [each for each in worker.violations(result) if "virtual_over_paged" in each or "step_p99_ratio" in each]
    assert worker.violations(result) == late
    assert (done.returncode, done.stderr) == ((2, f"error: {'; '.join(late)}\n") if late else (0, "")), done.stdout
    assert result["same_tokens"] and set(result["virtual_over_paged"]) == set(worker.LEAST_RATIO)
    assert result["attention_calls_per_layer"] == {"1": 1, "2": 1}
    steps = result["step_times"][0]["steps"]
    assert [steps[kind]["steps"] for kind in ("idle", "boundary", "attach")] == [4, 2, 2]
    assert [steps[kind]["blocks_mapped"] for kind in ("idle", "boundary", "attach")] == [0, 2 * 2, 2 * 64 // 16]
    assert set(result["memory_ratio"]) == {"1", "2"} and max(result["memory_ratio"].values()) < 0.01
    assert result["circumstances"]["commit"] and picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({}, ""),
        ({"same_tokens": False}, "different tokens in single_generation"),
        ({"virtual_over_paged": {"single_generation": 0.999, "prefix_sharing": 1.2}}, "0.999 in single_generation"),
        ({"virtual_over_paged": {"single_generation": 1.0, "prefix_sharing": 1.199}}, "1.199 in prefix_sharing"),
        ({"attention_calls": [calls(8, attention_calls_per_layer=8.0)]}, "8.0 attention calls a layer in batch 8"),
        ({"attention_calls": [calls(2, mixed_passes=0)]}, "no pass of batch 2"),
        ({"attention_calls": [calls(8, largest_pass=7)]}, "no pass of batch 8"),
        ({"step_p99_ratio": 1.101}, "step_p99_ratio is 1.101, above 1.1"),
        ({"memory_ratio": {"4": 1.0}}, "the KV of batch 4 held 1.0"),
    ],
)
def test_what_must_not_be_is_said(broken: dict[str, Any], words: str) -> None:
    found = "; ".join(worker.violations(good_result(**broken)))
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize("kind", ["idle", "boundary", "attach"])
def test_steps_that_map_something_else_than_they_should_are_said(kind: str) -> None:
    result = good_result()
    steps = result["step_times"][0]["steps"]
    steps[kind]["blocks_mapped"] = 0 if steps[kind]["blocks_mapped"] else 1
    assert len(worker.violations(result)) == 1


def test_other_tokens_of_one_design_are_seen(model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    work = designs.Workload("mine", 2, 16, 4, 8, 3, 2)
    assert designs.compare(model, work, 1, 64, lambda: None)["same_tokens"]
    step = EngineRig.step

    def change_a_token(rig: EngineRig) -> None:
        step(rig)
        if type(rig.kv).__name__ == "PagedKv":
            for output in rig.outputs.values():
                output[-1] ^= 1

    monkeypatch.setattr(EngineRig, "step", change_a_token)
    assert not designs.compare(model, work, 1, 64, lambda: None)["same_tokens"]


def test_the_ratio_is_the_median_of_the_repetitions() -> None:
    times = [{VIRTUAL: 1.0, PAGED: paged} for paged in (9.0, 1.5, 1.0)]
    summary = designs._summary(4, times)
    assert summary["virtual_over_paged"] == 1.5
    assert summary["paged_requests_per_s"] == {"least": 0.444, "median": 2.667, "most": 4.0}


def test_the_steps_ratio_is_the_median_of_the_rounds() -> None:
    def one(boundary: float) -> step_tail.Round:
        return step_tail.Round(seconds={"idle": [1.0, 1.0], "boundary": [boundary], "attach": [boundary]})

    result = step_tail.summary([one(1.0), one(1.3), one(9.0)])
    assert result["step_p99_ratio"] == 1.3 and result["idle_halves_p99_ratio"] == 1.0
    assert result["steps"]["boundary"]["p50_ms"] == 1300


def test_a_request_has_a_block_ahead_at_most_and_gives_all_back(model: CausalModel) -> None:
    frames = Frames(model.spec, 1, most=64)
    rig = EngineRig(model, frames.kv(VIRTUAL, 2), frames, concurrent=2, max_step_tokens=64)
    block = model.spec.geometry.block_tokens
    used: list[int] = []
    outputs = rig.run([Request([65] * block, 2 * block)], lambda: used.append(frames.pool.used_count))
    assert [len(output) for output in outputs] == [2 * block]
    assert used[0] <= 3 and max(used) == 3 and used[-1] == 0
    rig.close()
    frames.close()


def test_memory_is_counted_in_frames_and_resident_in_the_file(model: CausalModel) -> None:
    plan = memory_held.MemoryPlan((1, 2), 20, 20, 2)
    one, two = memory_held.measure(model, plan, lambda: None)
    block_bytes = model.spec.geometry.block_bytes
    assert one["held_bytes"] == 2 * block_bytes and two["held_bytes"] == 4 * block_bytes
    assert one["resident_bytes"] == one["held_bytes"] and two["resident_bytes"] == two["held_bytes"]
    assert two["preallocated_bytes"] == 2 * model.spec.sequence_capacity * model.spec.geometry.token_bytes
