from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so the benchmark would run")
def test_without_a_gpu_it_says_so_and_ends_well(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "benchmarks.gpu_copy", "--json", str(file)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 and "no CUDA GPU" in done.stdout
    assert "no CUDA GPU" in json.loads(file.read_text())["skipped"]
