"""The disk tier against raw file I/O, and its three ways to read and write files against each other.

Stores and loads blocks through a daemon's disk tier and through plain files of the same size, past the page
cache (direct), with the same bytes a call and as many calls at a time. Both wait for the device after each
batch. A client of the daemon stores from its own memory, over shared memory, durably, and acquires what is
nowhere but on disk, two batches at a time. Also: the disk tier's store alone (slabs: durable index and all;
checksums come with the blocks, as in a daemon, and are compared by loads), with each way to read and write
files (disk.io: mmap, direct, buffered), and a daemon with each.
Each way takes its turn in every round; figures are medians in GB/s. store_ratio and load_ratio are the
daemon's against plain direct I/O, slabs_* the store's alone.
modes: for blocks of 64 KiB to 8 MiB, the store alone with each disk.io in the same rounds: durable stores in
four batches a round (--mode-bytes; the index's transaction counts more in smaller ones),
loads in the order of storing and in random order, each against direct in the same run (*_ratio), and the CPU
time that a gigabyte takes. best_io has the highest geometric mean of these ratios over all sizes. raw_direct:
plain direct I/O in the same rounds, a block a call, on the same places of the same files: equal files differ
by a tenth and more. of_raw is the store's ratio to it with direct, and of_raw_store and of_raw_load are the least
over all sizes.
drives: a store over two directories against one over one, each directory as fast as --drive-rate allows and all
else as it is, the index's syncs included: durable stores and loads of one prompt (two_drives_*_ratio is the least
over all sizes).
Every load is cold: what was stored is durable and therefore clean; it is dropped from the page cache
(posix_fadvise, DONTNEED), and the run fails if the kernel says that some of it is still there (mincore).
What the device itself or a host beneath it caches, nobody here can drop.
With --blocks N also what a daemon on a store of N records costs: start_s until its process takes calls, of
which reopen_s from opening the store; its resident memory a block, all of the process counted, and at the
highest; and of such a daemon with an empty store. The store alone again: store_reopen_s and
store_bytes_per_block. Medians of five starts each; first_reopen_s and first_store_reopen_s are of the first ones,
right after the index was written.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from benchmarks.common import harness
from benchmarks.common.options import flag, option, size
from benchmarks.storage import disk_daemon, slow_drives
from benchmarks.storage import slabs as _slabs
from prefixd_swap.slab.files.io import DiskIo

_SIZES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 8 << 20)
_IOS: tuple[DiskIo, ...] = get_args(DiskIo)
_BATCHES = 4  # durable batches a round of modes
_STARTS = 5  # of a store with many records, each in a process of its own
_DRIVE_BYTES, _DRIVE_ROUNDS = 64 << 20, 5  # of a prompt on one drive and on two
_COMPARED = ("store", "load", "scattered_load")
_DECIMALS = 6  # of GB/s: of a small round on a busy disk three would leave nothing


def throughput(folder: Path, block_bytes: int, blocks: int, batch: int, depth: int, rounds: int) -> dict[str, float]:
    """Every way's throughput, and against plain files those of the daemon and of the store alone."""

    def daemon(name: str, io: DiskIo | None) -> Callable[[ThreadPoolExecutor], _slabs.Way]:
        return lambda pool: disk_daemon.DaemonDisk(folder / name, blocks, block_bytes, batch, io)

    ways = {
        "raw_direct": _plain(folder / "file-direct", blocks, block_bytes, direct=True),
        "daemon": daemon("daemon", None),
        **{f"daemon_{io}": daemon(f"daemon-{io}", io) for io in _IOS if io != "direct"},
        "raw_buffered": _plain(folder / "file-buffered", blocks, block_bytes, direct=False),
        **_stores(folder, blocks, block_bytes, depth),
    }
    measured = _slabs.throughput(ways, block_bytes, blocks, batch, depth, rounds)
    gbps = {f"{way}_{what}": measured[way][f"{what}_gbps"] for way in measured for what in ("store", "load")}
    compared = {"": "daemon", "slabs_": "slabs_direct"}
    compared |= {f"{way}_": way for way in ways if way.endswith(("_mmap", "_buffered")) and not way.startswith("raw")}
    ratios = {
        f"{kind}{what}_ratio": gbps[f"{way}_{what}"] / gbps[f"raw_direct_{what}"]
        for kind, way in compared.items()
        for what in ("store", "load")
    }
    rounded = {f"{name}_gbps": value for name, value in gbps.items()} | ratios
    return _rounded(rounded)


def modes(folder: Path, sizes: Sequence[int], nbytes: int, depth: int, rounds: int) -> dict[str, Any]:
    """The store alone with each `disk.io`, for blocks of each of `sizes`, `nbytes` bytes of them a round."""
    rows: list[dict[str, Any]] = []
    raw: list[dict[str, Any]] = []
    for block_bytes in sizes:
        blocks = max(1, nbytes // block_bytes)
        place = folder / f"blocks-of-{block_bytes}"
        place.mkdir(parents=True)
        measured = _slabs.throughput(
            _modes(place, blocks, block_bytes, depth),
            *(block_bytes, blocks, max(1, blocks // _BATCHES), depth, rounds),
            scattered=True,
        )
        plain = measured["raw"]
        of_raw = {
            f"{what}_of_raw": measured["slabs_direct"][f"{what}_gbps"] / plain[f"{what}_gbps"] for what in _COMPARED
        }
        raw.append({"block_bytes": block_bytes, **_rounded(plain | of_raw)})
        for io in _IOS:
            figures = measured[f"slabs_{io}"]
            direct = measured["slabs_direct"]
            ratios = {f"{what}_ratio": figures[f"{what}_gbps"] / direct[f"{what}_gbps"] for what in _COMPARED}
            rows.append({"block_bytes": block_bytes, "io": io, **_rounded(figures | ratios)})
    means = {
        io: statistics.geometric_mean(row[f"{what}_ratio"] for row in rows if row["io"] == io for what in _COMPARED)
        for io in _IOS
    }
    named = {f"modes_{io}_ratio": round(mean, 3) for io, mean in means.items()}
    least = {f"of_raw_{what}": min(row[f"{what}_of_raw"] for row in raw) for what in ("store", "load")}
    best = max(means, key=means.__getitem__)
    return {**named, **least, "best_io": best, "modes": rows, "raw_direct": raw}


def _modes(
    folder: Path, blocks: int, block_bytes: int, depth: int
) -> dict[str, Callable[[ThreadPoolExecutor], _slabs.Way]]:
    """A store with each `disk.io`, and plain calls on the files of the one with direct, after it in the first round."""
    direct = _slabs.Store(folder / "slabs-direct", blocks, block_bytes, depth, "direct")
    stores = _stores(folder, blocks, block_bytes, depth) | {"slabs_direct": lambda pool: direct}
    return stores | {"raw": lambda pool: _slabs.SamePlaces(direct, block_bytes, pool)}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, _DECIMALS) for name, value in figures.items()}


def _plain(path: Path, blocks: int, block_bytes: int, *, direct: bool) -> Callable[[ThreadPoolExecutor], _slabs.Way]:
    return lambda pool: _slabs.PlainFile(path, blocks, block_bytes, pool, direct)


def _stores(
    folder: Path, blocks: int, block_bytes: int, depth: int
) -> dict[str, Callable[[ThreadPoolExecutor], _slabs.Way]]:
    """A store with each `disk.io`, in a folder of its own."""

    def store(io: DiskIo) -> Callable[[ThreadPoolExecutor], _slabs.Way]:
        return lambda pool: _slabs.Store(folder / f"slabs-{io}", blocks, block_bytes, depth, io)

    return {f"slabs_{io}": store(io) for io in _IOS}


def reopen(folder: Path, blocks: int) -> dict[str, Any]:
    """What a store of so many blocks costs alone, and a daemon on it."""
    data = folder / "large"
    data.mkdir(mode=0o700)
    store = data / "blocks"  # where a daemon has it in its data_dir
    _slabs.fill(store, blocks)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        alone = [pool.submit(_slabs.reopen, store, blocks).result() for _ in range(_STARTS)]
    daemons = [disk_daemon.reopen(data, blocks) for _ in range(_STARTS)]
    first = {f"first_{name}": row[name] for row, name in ((alone[0], "store_reopen_s"), (daemons[0], "reopen_s"))}
    return _medians(daemons) | _medians(alone) | first


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


@harness.benchmark(
    "disk",
    __doc__,
    option("--block-bytes", 2 << 20, "bytes of a block", size),
    option("--round-blocks", 256, "blocks a round"),
    option("--batch", 64, "blocks a durable batch"),
    option("--depth", 4, "calls at a time"),
    option("--rounds", 15, "rounds to time"),
    option("--mode-bytes", 512 << 20, "bytes a round of modes, in four durable batches", size),
    flag("--modes-only", "compare the values of disk.io alone"),
    option("--drive-rate", 50 << 20, "bytes a second of each of the two drives", size),
    flag("--drives-only", "compare two drives with one alone"),
    option("--blocks", None, "records of the store to open again"),
    option("--folder", None, "where to work, on the disk to measure (the temporary folder)", Path),
)
def main(options: harness.Options) -> harness.Outcome:
    """Throughput, modes, and a large store that is opened again."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="prefixd-disk-", dir=options.folder) as name:
        folder = Path(name)
        if options.drives_only:
            result |= _drives(folder, options)
            return harness.Outcome(result, tables=[_drives_table(result)])
        if not options.modes_only:
            result |= throughput(
                folder, options.block_bytes, options.round_blocks, options.batch, options.depth, options.rounds
            )
        result |= modes(folder, _SIZES, options.mode_bytes, options.depth, options.rounds)
        if not options.modes_only:
            result |= _drives(folder, options)
        if options.blocks:
            result |= reopen(folder, options.blocks)
    columns = ("block_bytes", "io", *(f"{what}_gbps" for what in _COMPARED), "store_cpu_s_per_gb", "load_cpu_s_per_gb")
    tables = [harness.Table(result["modes"], columns)]
    tables.append(harness.Table(result["raw_direct"], ("block_bytes", *(f"{what}_of_raw" for what in _COMPARED))))
    return harness.Outcome(result, tables=tables if options.modes_only else [*tables, _drives_table(result)])


def _drives(folder: Path, options: harness.Options) -> dict[str, Any]:
    rate = options.drive_rate
    return slow_drives.compare(folder, _SIZES, _DRIVE_BYTES, options.depth, min(options.rounds, _DRIVE_ROUNDS), rate)


def _drives_table(result: dict[str, Any]) -> harness.Table:
    rates = [f"{way}_{what}_gbps" for what in ("store", "load") for way in ("one", "two")]
    return harness.Table(result["drives"], ("block_bytes", *rates, "store_ratio", "load_ratio"))


if __name__ == "__main__":
    harness.run(main)
