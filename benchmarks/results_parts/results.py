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


def read_results(folder: Path) -> list[Result]:
    """Every result in `folder`, by name of its file. Raises BenchmarkError for a file that is no result."""
    return [_read(file) for file in sorted(folder.glob("*.json"))]


def _read(file: Path) -> Result:
    try:
        content = json.loads(file.read_bytes())
        return Result(content["benchmark"], content, file.name)
    except (ValueError, LookupError, TypeError) as error:
        raise BenchmarkError(f"{file} is no result of a benchmark ({error!r}); take it out of the folder") from error
