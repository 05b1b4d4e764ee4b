"""Every plot says what its axes are, and what it shows."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common.plots import bars, lines

figures = pytest.importorskip("matplotlib.figure")


def labels(axes: Any) -> tuple[str, str, str]:
    return axes.get_title(), axes.get_xlabel(), axes.get_ylabel()


def test_bars_and_lines_have_a_title_and_both_axes() -> None:
    barred, lined = figures.Figure().subplots(1, 2)
    bars(barred, ["a", "b"], {"alone": [1.0, 2.0]}, "Requests a second", "load")
    assert labels(barred) == ("Requests a second", "load", "Requests a second")
    lines(lined, {"cpu": ([1, 2], [3.0, 4.0])}, "tokens", "ms", "First tokens")
    assert labels(lined) == ("First tokens", "tokens", "ms")
