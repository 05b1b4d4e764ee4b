"""The README: short, and of use on PyPI, which shows it with no file of the repository beside it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
_TARGET = re.compile(r"\]\(([^)\s]+)\)")


def test_it_has_at_most_700_words() -> None:
    assert len(README.read_text().split()) <= 700


def test_no_link_or_picture_of_the_metadata_is_relative() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "metadata"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    metadata = json.loads(done.stdout)
    shown = metadata["readme"]["text"]
    links, written = _TARGET.findall(shown), _TARGET.findall(README.read_text())
    assert len(links) == len(written) > 10
    assert all(re.match(r"https://|#", link) for link in links), links
    assert [link for link in links if link.endswith(".png")] == [
        f"https://raw.githubusercontent.com/prefixd/prefixd/main/{link}" for link in written if link.endswith(".png")
    ]
    assert not re.search(r"<(?:img|a)\b", shown), "an HTML tag's link is not made absolute"
    assert all(link.startswith("https://") for link in metadata["urls"].values())


def test_its_tests_are_run_first_by_ci() -> None:
    assert "make test " in README.read_text()
    commands = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("make ")]
    assert commands[0] == "make test"
