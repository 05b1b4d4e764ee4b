"""Results of benchmarks and plans, as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.harness import BenchmarkError


@dataclass(frozen=True, slots=True)
class Result:
    """What one file holds."""

    benchmark: str
    content: Mapping[str, Any]
    file: str

    @property
    def source(self) -> str:
        """Where and of what it was taken, in one line."""
        known = self.content.get("circumstances", {})
        commit = str(known.get("commit") or "")
        taken = commit[:9] + ("+changes" if commit.endswith("+changes") else "")
        cores = f"{known['cpus']} cores" if "cpus" in known else ""
        parts = (self.file, known.get("processor"), cores, taken, str(known.get("date", ""))[:10])
        return " · ".join(str(part) for part in parts if part)


def read_results(folder: Path) -> list[Result]:
    """Every result in `folder`, by name of its file.

    Raises:
        BenchmarkError: there is none, or a file is no result; the message names it.
    """
    if not folder.is_dir():
        raise BenchmarkError(f"{folder} is no folder; name one with results, such as benchmarks/results")
    found = [_read(file) for file in sorted(folder.glob("*.json"))]
    if not found:
        raise BenchmarkError(f"{folder} has no *.json; write results there with the benchmarks' option --json")
    return found


def _read(file: Path) -> Result:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BenchmarkError(f"{file} is not JSON ({error}); write it again or take it out of the folder") from error
    if not isinstance(content, dict) or not isinstance(content.get("benchmark"), str):
        raise BenchmarkError(f'{file} has no "benchmark": it is no result of a benchmark; take it out of the folder')
    if not isinstance(content.get("circumstances", {}), dict):
        raise BenchmarkError(f'{file}: "circumstances" is no object; take the file out of the folder')
    return Result(content["benchmark"], content, file.name)
