"""The disk tier against raw file I/O."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.storage import disk_daemon
from benchmarks.storage import slabs as _slabs

DESCRIPTION = """\
Stores and loads blocks through a daemon's disk tier and through plain files of the same size, past the page
cache (direct), with the same bytes a call and as many calls at a time. Both wait for the device after each
batch. A client of the daemon stores from its own memory, over shared memory, durably, and acquires what is
nowhere but on disk, two batches at a time. Also: the disk tier's store alone (slabs: checksums, durable
index and all), direct and through the page cache (buffered), which is emptied before each load. Each way
takes its turn in every round; figures are medians in GB/s. store_ratio and load_ratio are the daemon's
against plain direct I/O, slabs_* the store's alone.
With --blocks N also what a daemon on a store of N records costs: start_s until its process takes calls, of
which reopen_s from opening the store; its resident memory a block, all of the process counted, and at the
highest; and of such a daemon with an empty store. The store alone again: store_reopen_s and
store_bytes_per_block."""


def main() -> None:
    """The command."""
    parser = harness.parser("disk", DESCRIPTION)
    parser.add_argument("--block-bytes", type=harness.size, default=2 << 20, help="bytes of a block (2MiB)")
    parser.add_argument("--round-blocks", type=harness.positive, default=256, help="blocks a round (256)")
    parser.add_argument("--batch", type=harness.positive, default=64, help="blocks a durable batch (64)")
    parser.add_argument("--depth", type=harness.positive, default=4, help="calls at a time (4)")
    parser.add_argument("--rounds", type=harness.positive, default=15, help="rounds to time (15)")
    parser.add_argument("--blocks", type=harness.positive, help="records of the store to open again")
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
        result |= throughput(
            folder, options.block_bytes, options.round_blocks, options.batch, options.depth, options.rounds
        )
        if options.blocks:
            result |= reopen(folder, options.blocks)
    harness.finish("disk", result, options.json)


def throughput(folder: Path, block_bytes: int, blocks: int, batch: int, depth: int, rounds: int) -> dict[str, float]:
    """Every way's throughput, and against plain files those of the daemon and of the store alone."""

    def plain(direct: bool) -> Callable[[ThreadPoolExecutor], _slabs.Way]:
        return lambda pool: _slabs.PlainFile(folder / f"file-{direct}", blocks, block_bytes, pool, direct)

    def slabs(direct: bool) -> Callable[[ThreadPoolExecutor], _slabs.Way]:
        return lambda pool: _slabs.Store(folder / f"slabs-{direct}", blocks, block_bytes, pool, depth, direct)

    ways = {
        "raw_direct": plain(direct=True),
        "daemon": lambda pool: disk_daemon.DaemonDisk(folder / "daemon", blocks, block_bytes, batch),
        "slabs_direct": slabs(direct=True),
        "raw_buffered": plain(direct=False),
        "slabs_buffered": slabs(direct=False),
    }
    gbps = _slabs.throughput(ways, block_bytes, blocks, batch, depth, rounds)
    compared = {"": ("daemon", "direct"), "slabs_": ("slabs_direct", "direct")}
    compared["slabs_buffered_"] = ("slabs_buffered", "buffered")
    ratios = {
        f"{kind}{what}_ratio": gbps[f"{way}_{what}"] / gbps[f"raw_{raw}_{what}"]
        for kind, (way, raw) in compared.items()
        for what in ("store", "load")
    }
    rounded = {f"{name}_gbps": value for name, value in gbps.items()} | ratios
    return {name: round(value, 3) for name, value in rounded.items()}


def reopen(folder: Path, blocks: int) -> dict[str, Any]:
    """What a store of so many blocks costs alone, and a daemon on it."""
    data = folder / "large"
    data.mkdir(mode=0o700)
    store = data / "blocks"  # where a daemon has it in its data_dir
    _slabs.fill(store, blocks)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        alone = pool.submit(_slabs.reopen, store, blocks).result()
    return disk_daemon.reopen(data, blocks) | alone


if __name__ == "__main__":
    harness.run(main)
