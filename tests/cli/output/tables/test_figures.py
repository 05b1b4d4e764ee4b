"""Figures of `prefixd stats` in their units."""

from __future__ import annotations

import pytest

from prefixd.cli.output.tables.figures import figure


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("held_bytes", 3 << 30, "3.0 GiB"),
        ("pause_s", 0.0042, "0.0042 s"),
        ("blocks", 5000, "5,000"),
        ("trouble", "no space left on the device", "no space left on the device"),
    ],
)
def test_a_figure_has_the_unit_of_its_name(name: str, value: float | str, text: str) -> None:
    assert figure(name, value) == text
