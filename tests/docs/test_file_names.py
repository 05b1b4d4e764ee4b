"""A file's name occurs once, but for those that CONTRIBUTING.md lists with the reason."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = ("prefixd", "swap", "scheduler", "benchmarks")
OF_THE_LANGUAGE = {"__init__", "__main__"}


def test_each_name_that_occurs_twice_has_a_reason() -> None:
    files = [file for tree in TREES for file in (ROOT / tree).rglob("*.py") if "v1" not in file.parts]
    counts = Counter(file.stem for file in files if file.stem not in OF_THE_LANGUAGE)
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Names that occur twice")[2]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(name for name, count in counts.items() if count > 1)
