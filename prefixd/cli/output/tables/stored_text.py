"""Says how blocks are stored on disk, and how far they are from the exact ones."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from prefixd.base.sizes import as_size
from prefixd.cli.output.tables.grid import table
from prefixd.v1 import admin_pb2


def stored_line(stored: admin_pb2.StoredStats) -> str | None:
    """Returns what codecs save on disk: `disk: 412.0 GiB stored of 803.0 GiB, saved 49% (disk.codec = int8), largest
    error 0.9% (RMS 0.4%)`; None where no codec is chosen and none was."""
    if not _uses_codecs(stored):
        return None
    line = f"disk: {as_size(stored.stored_bytes)} stored of {as_size(stored.exact_bytes)}"
    line += f", saved {_saved(stored):.0%} (disk.codec = {stored.codec})"
    if stored.altered_blocks:
        line += f", {errors_text(*_errors(stored))}"
    if refused := sum(stored.refused_parts.values()):
        reasons = ", ".join(f"{name} {count:,}" for name, count in sorted(stored.refused_parts.items()))
        line += f"; {refused:,} parts not taken by their codec ({reasons})"
    return line


def stored_words(stored: admin_pb2.StoredStats) -> list[str]:
    """Returns the same in a few words: `disk saves 49%`, `error 1.62%`; nothing where `stored_line` says nothing."""
    if not _uses_codecs(stored):
        return []
    altered = [f"error {percent(_errors(stored)[0])}"] if stored.altered_blocks else []
    return [f"disk saves {_saved(stored):.0%}", *altered]


def _uses_codecs(stored: admin_pb2.StoredStats) -> bool:
    return stored.codec not in ("", "exact") or bool(stored.blocks.get("coded", 0) or stored.altered_blocks)


def _saved(stored: admin_pb2.StoredStats) -> float:
    return max(1 - stored.stored_bytes / stored.exact_bytes, 0.0) if stored.exact_bytes else 0.0


def _errors(stored: admin_pb2.StoredStats) -> tuple[float, float]:
    """The largest error of all tenants and models, and the largest RMS."""
    largest, rms = (max((one.value for one in each), default=0.0) for each in (stored.largest_error, stored.rms_error))
    return largest, rms


def errors_text(largest: float, rms: float) -> str:
    """Returns `largest error 0.9% (RMS 0.4%)`; both are relative to the RMS of a layer."""
    return f"largest error {percent(largest)} (RMS {percent(rms)})"


def percent(error: float) -> str:
    """Returns an error for people: `1.62%`."""
    return f"{error * 100:.3g}%"


def layer_table(blocks: Iterable[admin_pb2.BlockInfo]) -> Table | None:
    """Returns the largest errors of each layer of all blocks that were read for that; None if none was."""
    worst: dict[tuple[int, int], tuple[float, float]] = {}
    codecs: dict[int, set[str]] = {}
    for part in (part for block in blocks for part in block.storage.parts):
        codecs.setdefault(part.part, set()).add(part.codec)
        for layer, errors in enumerate(zip(part.largest_errors, part.rms_errors, strict=False)):
            before = worst.get((part.part, layer), (0.0, 0.0))
            worst[part.part, layer] = max(errors[0], before[0]), max(errors[1], before[1])
    if not worst:
        return None
    parts = ("part",) if len(codecs) > 1 else ()
    columns = (*parts, "layer", "codec", "largest error", "RMS error")
    made = table(*columns, right=(*parts, "layer", "largest error", "RMS error"))
    for (at, layer), (largest, rms) in sorted(worst.items()):
        number = [str(at)] if parts else []
        made.add_row(*number, str(layer), Text(", ".join(sorted(codecs[at]))), percent(largest), percent(rms))
    return made
