"""Which releases of the engines prefixd works with: runs a few of the engines' tests with each, and writes the table.

    .venv/bin/python -m benchmarks.checks.compatibility vllm 0.31.0 --engine-python .venv-vllm/bin/python \\
        --path .venv-vllm-releases/0.31.0

`make test-vllm-matrix` does that for every release. Without an engine only the table is written anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.common import harness
from prefixd.workloads.circumstances import circumstances

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/compatibility.json"
TABLE = ROOT / "docs/compatibility.md"

FEATURES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "vllm": {
        "names": ["test_contract.py"],
        "hits": ["test_hits.py::test_cold_then_warm"],
        "engine restarted": ["test_hits.py::test_after_the_engine_was_restarted"],
        "daemon restarted": ["test_hits.py::test_after_the_daemon_was_restarted_prefixes_come_from_disk"],
        "sliding windows": [
            "test_windows.py::test_what_windows_need_is_saved_and_loaded",
            "test_failures.py::test_daemon_killed_in_the_middle_of_a_hybrid_models_load",
        ],
        "images": ["test_media.py::test_images_by_hash"],
        "scheduler": [
            "test_scheduler.py::test_nearest_first_with_what_the_connector_says",
            "test_scheduler.py::test_every_request_is_served_once_whatever_comes_and_goes",
        ],
    },
    "sglang": {
        "names": ["test_contract.py"],
        "pages": ["test_controller.py"],
        "windows and states": ["test_pools.py"],
        "whole engine": ["engine/test_engine.py"],
    },
}
"""Of each engine the features, and the tests below tests/ENGINE that show them."""

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}

_PASSED, _FAILED, _SKIPPED = "passed", "failed", "skipped"

_INTRODUCTION = """# What works with what

Written by `python -m benchmarks.checks.compatibility` from the last run of `make test-vllm-matrix` and
`make test-sglang-matrix` ([`compatibility.json`](../benchmarks/results/compatibility.json)). A release that is not here
was not tried. At its start prefixd looks for the names that it uses of an engine; one line says what a release lacks,
one which methods a release calls that prefixd does not know.

**Clients and daemons**: a client works with a daemon of the version before or after its own, and a daemon opens the
data of either (`tests/client/test_previous_version.py`, against the last commit's wheel).
"""


def run(engine: str, features: Mapping[str, Sequence[str]], python: Path, path: Sequence[Path]) -> dict[str, str]:
    """What became of features of an engine's release.

    Args:
        engine: "vllm" or "sglang".
        features: names, and the tests that show them.
        python: of the environment that has the engine, or most of it.
        path: folders that come before that environment's packages.
    """
    here = [str(ROOT), str(ROOT / "swap"), str(ROOT / "scheduler")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *here]), "OMP_NUM_THREADS": "1"}
    tests = [f"tests/{engine}/{test}" for tests in features.values() for test in tests]
    with tempfile.TemporaryDirectory(prefix="prefixd-") as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-o", "junit_family=xunit1", f"--junitxml={report}", *tests]
        subprocess.run(list(map(str, command)), cwd=ROOT, env=variables, check=False)
        if not report.exists():
            raise harness.BenchmarkError(f"pytest has written no report of {', '.join(tests)}")
        outcomes = _outcomes(ElementTree.parse(report))
    return {feature: _worst(tests, outcomes) for feature, tests in features.items()}


def _outcomes(report: Any) -> dict[tuple[str, str], list[str]]:
    """Of each test function, by its file and name, what became of it with each of its parameters."""
    outcomes: dict[tuple[str, str], list[str]] = {}
    for case in report.iter("testcase"):
        tags = {child.tag for child in case}
        outcome = _FAILED if tags & {"failure", "error"} else _SKIPPED if "skipped" in tags else _PASSED
        file = Path(case.get("file") or case.get("classname").replace(".", "/")).name.removesuffix(".py")
        outcomes.setdefault((file, case.get("name").partition("[")[0]), []).append(outcome)
    return outcomes


def _worst(tests: Sequence[str], outcomes: Mapping[tuple[str, str], list[str]]) -> str:
    found: list[str] = []
    for test in tests:
        file, _, name = test.partition("::")
        stem = Path(file).name.removesuffix(".py")
        of_test = [
            each for (of, called), all in outcomes.items() if of == stem and name in ("", called) for each in all
        ]
        found += of_test or [_FAILED]  # it was not collected
    return next((outcome for outcome in (_FAILED, _PASSED) if outcome in found), _SKIPPED)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """docs/compatibility.md: a table for each engine, the latest release first."""
    text = _INTRODUCTION
    for engine, features in FEATURES.items():
        mine = sorted((row for row in rows if row["engine"] == engine), key=_release, reverse=True)
        text += f"\n## {NAMES[engine]}\n\n| release | {' | '.join(features)} | tested | commit |\n"
        text += "|---" * (len(features) + 3) + "|\n"
        for row in mine:
            signs = [_sign(row["features"].get(feature)) for feature in features]
            text += f"| {row['release']} | {' | '.join(signs)} | {row['date'][:10]} | {_commit(row)} |\n"
    return text


def _commit(row: Mapping[str, Any]) -> str:
    commit, changed, _ = str(row["commit"]).partition("+")
    return commit[:7] + (" and changes" if changed else "")


def _sign(outcome: str | None) -> str:
    return {_PASSED: "yes", _FAILED: "**no**", None: "not tried"}.get(outcome, "not tried")


def _release(row: Mapping[str, Any]) -> list[int]:
    return [int(part) for part in str(row["release"]).split(".")]


def main() -> None:
    """See the module."""
    made = harness.parser("checks.compatibility", __doc__ or "")
    made.add_argument("engine", nargs="?", choices=sorted(FEATURES), help="whose release is to be tried")
    made.add_argument("release", nargs="?", help="the release, as 0.31.0")
    made.add_argument("--engine-python", type=Path, metavar="FILE", help="Python of the engine's environment")
    made.add_argument("--path", type=Path, action="append", default=[], metavar="DIR", help="before its packages")
    made.add_argument("--only", action="append", metavar="FEATURE", help="try these features alone")
    options = made.parse_args()
    file = options.json or (RESULTS if options.engine is None else harness.committed(RESULTS))
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    if options.engine is not None:
        if options.release is None or options.engine_python is None:
            made.error("name the release and --engine-python beside the engine")
        began_s = time.monotonic()
        tried = {name: tests for name, tests in FEATURES[options.engine].items() if name in (options.only or [name])}
        features = run(options.engine, tried, options.engine_python, [path.resolve() for path in options.path])
        seen = circumstances()
        row = {
            **{"engine": options.engine, "release": options.release, "features": features},
            **{name: seen[name] for name in ("date", "commit", "cpus", "processor", "python")},
            "seconds": round(time.monotonic() - began_s),
        }
        rows = [each for each in rows if (each["engine"], each["release"]) != (options.engine, options.release)]
        rows = sorted([*rows, row], key=lambda each: (each["engine"], _release(each)))
        harness.write("compatibility", {"rows": rows}, file)
        print(f"{NAMES[options.engine]} {options.release}: " + ", ".join(f"{k}: {v}" for k, v in features.items()))
    if file == RESULTS:
        TABLE.write_text(table(rows))
    if options.engine is not None and _FAILED in features.values():
        sys.exit(1)


if __name__ == "__main__":
    harness.run(main)
