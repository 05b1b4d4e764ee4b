"""Words and look-ups that the sentences share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Figures = Mapping[str, Any]
"""What a result's file holds."""

Sentence = Callable[[Figures], str]
"""States a result with its figures, without the full stop. Raises LookupError when a figure is missing."""


def row(rows: Iterable[Figures], **wanted: object) -> Figures:
    """The first of `rows` with these values; raises LookupError when there is none."""
    for candidate in rows:
        if all(candidate.get(name) == value for name, value in wanted.items()):
            return candidate
    raise LookupError("no row with " + ", ".join(f"{name} = {value!r}" for name, value in wanted.items()))


def span(values: Iterable[float], digits: int = 2) -> str:
    """The least and the most of `values`: "0.77 to 1.13"."""
    known = list(values)
    return f"{min(known):.{digits}f} to {max(known):.{digits}f}"


def tokens(same: bool) -> str:
    """Whether the ways that are compared gave the same output tokens."""
    return "the same output tokens" if same else "OTHER output tokens"


def mib(nbytes: float) -> str:
    """Bytes in MiB."""
    return f"{nbytes / (1 << 20):,.1f} MiB"


def tier_size(nbytes: float) -> str:
    """Bytes in the unit that a tier is bought in: "64 GiB", "4 TiB"."""
    return f"{nbytes / (1 << 40):g} TiB" if nbytes >= 1 << 40 else f"{nbytes / (1 << 30):g} GiB"
