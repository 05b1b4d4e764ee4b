"""The documentation names files that exist, and names every room."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"])
FOLDERS = ("benchmarks", "deploy", "docs", "examples", "prefixd", "proto", "scheduler", "swap", "tests")
MADE_BY_A_READER = ("NAME", "<", "DIR", "TENANT")


def named(text: str) -> Iterator[str]:
    """The paths in backticks, such as `tests/cache/rules/test_rules.py::test_x` and `prefixd/cache/{disk,moving}/`."""
    for quoted in re.findall(r"`([^`\s]+)`", text):
        path = quoted.partition("::")[0]
        if path.startswith(tuple(f"{folder}/" for folder in FOLDERS)) and not any(
            word in path for word in MADE_BY_A_READER
        ):
            yield from _without_braces(path)


def _without_braces(path: str) -> Iterator[str]:
    pieces = [piece[1:-1].split(",") if piece.startswith("{") else [piece] for piece in re.split(r"(\{[^}]*\})", path)]
    yield from ("".join(chosen) for chosen in product(*pieces))


def test_paths_are_found() -> None:
    text = "`prefixd/cache/{disk,moving}/`, `tests/a.py::test_b`, `docs/NAME.md` and `prefixd serve`"
    assert list(named(text)) == ["prefixd/cache/disk/", "prefixd/cache/moving/", "tests/a.py"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_path_that_a_page_names_exists(page: Path) -> None:
    missing = [
        path
        for path in named(page.read_text())
        if not any(ROOT.glob(path)) and not any(ROOT.glob(f"{path}.py"))  # `prefixd_swap/slab/reader`
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_benchmark_that_a_page_names_exists(page: Path) -> None:
    names = re.findall(r"\bbenchmarks\.(?!md\b)([a-z_]+(?:\.[a-z_]+)*)", page.read_text())
    if page.name == "CONTRIBUTING.md":  # the table of harnesses; those above it and below are whole commands
        names += re.findall(r"`([a-z_.]+)[^`]*`", "".join(re.findall(r"(?m)^\| (`.*?) \|", _harnesses(page))))
    assert [name for name in names if not any(ROOT.glob(f"benchmarks/{name.replace('.', '/')}*"))] == []


def _harnesses(page: Path) -> str:
    return page.read_text().partition("## Harnesses")[2].partition("## Rules")[0]


def test_the_files_of_the_drawn_flows_exist() -> None:
    drawn = "".join(re.findall(r"^```\w*\n(.*?)^```", (ROOT / "docs/architecture.md").read_text(), re.DOTALL | re.M))
    files = set(re.findall(r"\b[\w/]+/\w+\.py\b", drawn))
    assert len(files) > 20
    assert [
        file for file in sorted(files) if not any(ROOT.glob(f"{top}/{file}") for top in ("prefixd", "swap/*"))
    ] == []


def test_the_architecture_names_every_room() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rooms = [folder.name for folder in (ROOT / "prefixd").iterdir() if (folder / "__init__.py").exists()]
    assert len(rooms) > 10
    assert [room for room in rooms if f"| `{room}/` |" not in text] == []
