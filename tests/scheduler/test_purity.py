"""The scheduler runs on the standard library alone and has no clock."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import prefixd_scheduler

SOURCES = sorted(Path(prefixd_scheduler.__file__).parent.rglob("*.py"))
CLOCKS_AND_CHANCE = {"time", "datetime", "random", "secrets", "asyncio", "threading"}


def imported_packages(source: Path) -> set[str]:
    packages: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            packages.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{source.name} imports relatively"
            packages.add(node.module.partition(".")[0])
    return packages


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_a_module_imports_the_standard_library_and_no_clock(source: Path) -> None:
    foreign = imported_packages(source) - sys.stdlib_module_names - {"prefixd_scheduler"}
    assert foreign == set()
    assert imported_packages(source) & CLOCKS_AND_CHANCE == set()


def test_there_is_something_to_check() -> None:
    assert {"queue.py", "policies.py", "cost.py"} <= {source.name for source in SOURCES}
