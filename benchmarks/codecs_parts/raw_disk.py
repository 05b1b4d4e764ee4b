"""The disk that codecs have to keep up with: plain direct I/O, as `benchmarks.disk` measures it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.storage import slabs

_DEPTH = 4  # calls at a time
_BATCHES = 4  # durable batches a round


def raw_disk(folder: Path | None, block_bytes: int, nbytes: int, rounds: int) -> dict[str, float]:
    """GB/s of durable stores and cold loads of a file: `raw_store_gbps`, `raw_load_gbps`."""
    blocks = max(_BATCHES, nbytes // block_bytes)
    with tempfile.TemporaryDirectory(prefix="prefixd-codecs-", dir=folder) as name:
        file = Path(name) / "file"
        measured = slabs.throughput(
            {"raw": lambda pool: slabs.PlainFile(file, blocks, block_bytes, pool, direct=True)},
            block_bytes,
            blocks,
            blocks // _BATCHES,
            _DEPTH,
            rounds,
        )
    return {f"raw_{what}_gbps": round(measured["raw"][f"{what}_gbps"], 3) for what in ("store", "load")}
