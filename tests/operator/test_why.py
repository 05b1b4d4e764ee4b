"""`prefixd why` names causes that are planted on a daemon with a disk (`benchmarks.checks.why`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_causes_on_disk_are_named(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.checks.why", "--each", "2", "--only", "disk", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["planted"] == result["named"] == 8 and len(result["kinds"]) == 4
