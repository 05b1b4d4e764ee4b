"""Sizes as people write them."""

from __future__ import annotations

import re
from decimal import Decimal

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_MOST = 1 << 60
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}


def parse_size(value: object) -> int:
    """Bytes from `8GiB` (powers of 1024), `500MB` (powers of 1000) or a plain number; else ValueError."""
    nbytes = _parse(value)
    if nbytes > _MOST:
        raise ValueError(f"{value} is more than 1 EiB; write a size of this world")
    return nbytes


def _parse(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError("write a size such as 8GiB, 512MiB or 4096 (bytes), not below 0")
    return int(Decimal(match[1]) * unit)
