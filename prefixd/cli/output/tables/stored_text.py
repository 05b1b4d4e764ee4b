"""Says how blocks are stored on disk, and how far they are from the exact ones."""

from __future__ import annotations

from prefixd.base.sizes import as_size
from prefixd.v1 import admin_pb2


def stored_line(stored: admin_pb2.StoredStats) -> str | None:
    """Returns what codecs save on disk: `disk: 412.0 GiB stored of 803.0 GiB (int8, saved 49%), largest error 0.9% (RMS
    0.4%)`; None where no codec is chosen and none was."""
    if stored.codec in ("", "exact") and not (stored.blocks.get("coded", 0) or stored.altered_blocks):
        return None
    saved = max(1 - stored.stored_bytes / stored.exact_bytes, 0.0) if stored.exact_bytes else 0.0
    line = f"disk: {as_size(stored.stored_bytes)} stored of {as_size(stored.exact_bytes)}"
    line += f" ({stored.codec}, saved {saved:.0%})"
    largest = max((each.value for each in stored.largest_error), default=0.0)
    rms = max((each.value for each in stored.rms_error), default=0.0)
    if largest:
        line += f", {errors_text(largest, rms)}"
    if refused := sum(stored.refused_parts.values()):
        reasons = ", ".join(f"{name} {count:,}" for name, count in sorted(stored.refused_parts.items()))
        line += f"; {refused:,} parts stayed as they are ({reasons})"
    return line


def errors_text(largest: float, rms: float) -> str:
    """Returns `largest error 0.9% (RMS 0.4%)`; both are relative to the RMS of a layer."""
    return f"largest error {largest * 100:.3g}% (RMS {rms * 100:.3g}%)"
