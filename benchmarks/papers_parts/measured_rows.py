"""The measured figures in a file, `benchmarks/results/papers.json`: a row each, so that each can be measured anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.harness import BenchmarkError
from benchmarks.papers_parts.figure import Measured
from prefixd.workloads.circumstances import circumstances

BENCHMARK = "papers"
_OF_A_ROW = ("date", "commit", "machine", "processor", "cpus", "versions")


def read_rows(file: Path) -> dict[str, Any]:
    """The rows of a file by name of the figure; none if there is no file. Raises BenchmarkError for another file."""
    try:
        content = json.loads(file.read_bytes())
        if content["benchmark"] != BENCHMARK:
            raise ValueError(f"it is of {content['benchmark']!r}")
        return dict(content["rows"])
    except FileNotFoundError:
        return {}
    except (ValueError, LookupError, TypeError) as error:
        raise BenchmarkError(f"{file} is no result of benchmarks.papers ({error!r}); give another file") from error


def row_of(measured: Measured, seconds: float, short: bool) -> dict[str, Any]:
    """A row, with where and when it was measured. short: its values mean nothing."""
    where = circumstances()
    return {
        "values": {name: _rounded(value) for name, value in measured.values.items()},
        "seconds": round(seconds, 1),
        **({"short": True} if short else {}),
        **({"details": measured.details} if measured.details else {}),
        **({"curve": asdict(measured.curve)} if measured.curve else {}),
        "circumstances": {name: where[name] for name in _OF_A_ROW},
    }


def write_rows(file: Path, rows: Mapping[str, Any]) -> None:
    """Writes all rows, with the circumstances of this run: those of a row are in the row."""
    content = {"benchmark": BENCHMARK, "rows": dict(sorted(rows.items())), "circumstances": circumstances()}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
