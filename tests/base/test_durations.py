"""Times for people are read, and what is none is refused."""

from __future__ import annotations

import pytest

from prefixd.base.durations import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5 h", 5400), ("1D", 86_400), ("0.1s", 0.1)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "-1h", "1w", "h", "1h30m", "nan", "1e3"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="write one such as 90s"):
        parse_duration(text)
