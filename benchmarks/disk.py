"""The disk tier against raw file I/O."""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import _harness, _slabs

DESCRIPTION = """\
Stores and loads blocks through the disk tier's store (checksums, durable index and all) and through plain
files of the same size, with the same bytes a call and as many calls at a time: past the page cache
(direct, the store's default), and through it (buffered), emptied before each load. Each way takes its turn
in every round; figures are medians in GB/s; store_ratio and load_ratio are against plain direct I/O. Both
wait for the device after each batch. With --blocks N also: the time to open a store of N records, and what
stays in memory."""


def main() -> None:
    """The command."""
    parser = _harness.parser("disk", DESCRIPTION)
    parser.add_argument("--block-bytes", type=_harness.size, default=2 << 20, help="bytes of a block (2MiB)")
    parser.add_argument("--round-blocks", type=_harness.positive, default=128, help="blocks a round (128)")
    parser.add_argument("--batch", type=_harness.positive, default=64, help="blocks a durable batch (64)")
    parser.add_argument("--depth", type=_harness.positive, default=4, help="calls at a time (4)")
    parser.add_argument("--rounds", type=_harness.positive, default=15, help="rounds to time (15)")
    parser.add_argument("--blocks", type=_harness.positive, help="records of the store to open again")
    parser.add_argument("--folder", type=Path, help="where to work, on the disk to measure (the temporary folder)")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "block_bytes": options.block_bytes,
        "round_blocks": options.round_blocks,
        "batch": options.batch,
        "depth": options.depth,
        "rounds": options.rounds,
    }
    with tempfile.TemporaryDirectory(prefix="prefixd-disk-", dir=options.folder) as name:
        folder = Path(name)
        result |= _slabs.throughput(
            folder, options.block_bytes, options.round_blocks, options.batch, options.depth, options.rounds
        )
        if options.blocks:
            _slabs.fill(folder / "large", options.blocks)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                result |= pool.submit(_slabs.reopen, folder / "large", options.blocks).result()
    _harness.finish("disk", result, options.json)


if __name__ == "__main__":
    _harness.run(main)
