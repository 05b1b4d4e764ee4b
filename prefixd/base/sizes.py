"""Parses and writes sizes such as `8GiB`."""

from __future__ import annotations

import re
from decimal import Decimal

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_MOST = 1 << 60
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("i", 1024), ("b", 1000))
}
LEAST_ROOM = 4096
"""Fewest bytes of a tier, a quota or a queue; a smaller size above 0 lacks its unit."""


def parse_size(value: object) -> int:
    """Returns the bytes of `8GiB` or `8Gi` (powers of 1024), `500MB` (powers of 1000) or a plain number.

    Raises:
        ValueError: the value is none of these, or more than 1 EiB.
    """
    nbytes = _parse(value)
    if nbytes > _MOST:
        raise ValueError(f"{value} is more than 1 EiB; write a smaller size")
    return nbytes


def parse_room(value: object) -> int:
    """Returns the bytes of a size as `parse_size` does; it must be 0 or at least 4096, else ValueError."""
    nbytes = parse_size(value)
    if 0 < nbytes < LEAST_ROOM:
        raise ValueError(
            f"that is {nbytes} bytes, and at least {LEAST_ROOM} are needed; write a unit, such as "
            f"{_with_unit(value)}, or 0 for none"
        )
    return nbytes


def as_size(nbytes: int) -> str:
    """Returns a size for people, such as `8.0 GiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _with_unit(value: object) -> str:
    """Returns the size that the user probably meant: 200GiB for 200."""
    match = _SIZE.fullmatch(str(value))
    return f"{match[1] if match and not match[2] else 8}GiB"


def _parse(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError("write a size such as 8GiB, 64Gi, 512MiB or 4096 (bytes), not below 0")
    exact = Decimal(match[1]) * unit
    if 0 < exact < 1:
        raise ValueError(f"{value} is less than a byte; write a size such as 8GiB")
    return int(exact)
