"""Parses times such as `1h`."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_duration(text: str) -> float:
    """Returns the seconds of `90s`, `10m`, `1.5h`, `1d` or a plain number of seconds.

    Raises:
        ValueError: the text is none of these, or 0.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not seconds:
        raise ValueError(f"{text} is no time; write one such as 90s, 10m, 1h or 1d, above 0")
    return seconds
