"""The text analysis benchmark from end to end, with as few requests as show that tiers are hit and answers agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = [sys.executable, "-m", "benchmarks.text_analysis"]
# One request after the other: with several at a time it would depend on the machine which tier serves whom.
SIZES = {
    "prefixes": 8,
    "gpu-prefixes": 2,
    "cpu-prefixes": 2,
    "disk-prefixes": 12,
    "requests": 40,
    "prefix-tokens": 64,
    "running": 1,
    "outstanding": 1,
}


def test_a_cache_gives_the_same_answers_from_all_tiers(tmp_path: Path) -> None:
    file, picture = tmp_path / "result.json", tmp_path / "result.svg"
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(
        [*BENCHMARK, *sizes, "--configs", "no-cache", "fcfs", f"--json={file}", f"--plot={picture}"],
        cwd=ROOT,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(file.read_text())
    no_cache, fcfs = result["configs"]
    assert (no_cache["name"], fcfs["name"]) == ("no-cache", "fcfs")
    assert no_cache["output_digest"] == fcfs["output_digest"] and result["same_answers"]
    assert (no_cache["hit_tokens"], no_cache["miss_rate"]) == ({"gpu": 0, "cpu": 0, "disk": 0}, 1.0)
    assert all(tokens > 0 for tokens in fcfs["hit_tokens"].values()), fcfs["hit_tokens"]
    assert fcfs["miss_rate"] < 0.5
    assert 0 < fcfs["ttft_s"]["p50"] <= fcfs["ttft_s"]["p95"]
    assert (result["requests"], result["gpu_prefixes"]) == (40, 2)
    assert picture.read_text().startswith("<?xml")


def test_sizes_below_one_are_refused() -> None:
    done = subprocess.run(
        [*BENCHMARK, "--prefixes", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "'0' is not positive" in done.stderr
