"""The first token behind a prefix on a throttled disk, whose blocks are stored exactly or by a codec.

A daemon with the embedded model in bfloat16 for each codec, with a worker of its own; they differ in disk.codec alone,
and each loads or computes again as it finds best. Two more, exact and int8, always load: there the disk decides, if it
is slow. All disks are throttled alike. A prompt's prefix is on disk only, and the daemons are asked in turn
(`load_or_recompute.measure_disk`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from benchmarks.load_or_recompute import Point, Subject, measure_disk
from benchmarks.stand_ins.throttled import DiskRate, ThrottledDaemon
from benchmarks.ways_of_serving.ttft import gpu_bytes, settings, start
from prefixd.workloads.text_analysis import BLOCK_BYTES, BLOCK_TOKENS

CODECS: Final = ("exact", "lossless", "int8", "k8v4")
LOADING: Final = {"exact": "exact_loaded", "int8": "int8_loaded"}
"""Names of those that always load, by codec."""
LEAST_GAIN: Final = 1.7
COLUMNS: Final = (
    *("mb_per_s", "tokens", *(f"ttft_ms.{name}" for name in (*CODECS, *LOADING.values()))),
    *(f"gain.{name}" for name in (*CODECS[1:], LOADING["int8"])),
    "disk_decides",
)
_DECIDES: Final = 0.9
"""The disk decides where reading takes this share of the first token at least, when all is exact."""
_HALF: Final = 2  # bfloat16 beside the float32 of `BLOCK_BYTES`


def measure_first_tokens(
    folder: Path,
    disks: Sequence[DiskRate],
    lengths: Sequence[int],
    repeats: int,
    warm_up: int,
    step: Callable[[], None] = lambda: None,
) -> list[Point]:
    """A point for each disk and length.

    Args:
        folder: for the daemons; a short path.
        disks: how fast they are.
        lengths: tokens of prefixes, whole blocks each.
        repeats: of each measurement, and three times as many of short ones.
        warm_up: rounds before.
        step: called after each point.
    """
    points: list[Point] = []
    for number, rate in enumerate(disks, 1):
        with _running(folder, lengths) as subjects:
            points += measure_disk(subjects, rate, lengths, repeats, warm_up, number, step)
    return points


@contextmanager
def _running(folder: Path, lengths: Sequence[int]) -> Iterator[dict[str, Subject]]:
    """A fresh daemon for each codec; what they have on disk stays for the next ones."""
    longest, block_bytes = max(lengths), BLOCK_BYTES // _HALF
    shared = settings(longest) | {
        "worker.dtype": "bfloat16",
        "gpu.bytes": gpu_bytes(longest) // _HALF,
        "disk.bytes": max(1 << 30, 4 * len(lengths) * longest // BLOCK_TOKENS * block_bytes),
        "disk.scrub_bytes_per_s": 0,
    }
    ways = {name: {"disk.codec": name} for name in CODECS}
    ways |= {name: {"disk.codec": codec, "scheduler.load": "always"} for codec, name in LOADING.items()}
    daemons = {name: ThrottledDaemon(shared | own, directory=folder / name) for name, own in ways.items()}
    for daemon in daemons.values():
        daemon.throttle(DiskRate())
    with ExitStack() as stack:
        clients = start(daemons, stack)
        yield {
            name: Subject(client, daemons[name], gpu_bytes(longest) // _HALF, block_bytes)
            for name, client in clients.items()
        }


def disk_decides(point: Point) -> bool:
    """Whether an exact prefix that is loaded takes about as long as the disk needs for its bytes."""
    read_ms = point.tokens // BLOCK_TOKENS * BLOCK_BYTES // _HALF / (1e3 * point.mb_per_s) + point.latency_ms
    return read_ms >= _DECIDES * point.ttft_ms[LOADING["exact"]]


def summary(points: Sequence[Point]) -> dict[str, Any]:
    """The figures of a result.

    int8_gain: how many times sooner the first token comes with int8 than with exact blocks, if both are loaded, at the
    worst point at which the disk decides; 0 without such a point. later: points at which int8 is later than exact
    blocks by more than the noise, its lower quartile above their upper one, if each loads or computes as it finds best.
    """
    gains = [_gains(point)[LOADING["int8"]] for point in points if disk_decides(point)]
    return {
        "int8_gain": round(min(gains, default=0.0), 3),
        "later": sum(point.lower_ms["int8"] > point.upper_ms["exact"] for point in points),
        "first_tokens": [
            {
                **asdict(point),
                "disk_decides": disk_decides(point),
                "gain": {name: round(gain, 3) for name, gain in _gains(point).items()},
            }
            for point in points
        ],
    }


def _gains(point: Point) -> dict[str, float]:
    """How many times sooner than exact blocks, of each daemon; of those that always load, than exact ones there."""
    loaded = set(LOADING.values())
    exact = {name: point.ttft_ms[LOADING["exact"] if name in loaded else "exact"] for name in point.ttft_ms}
    return {name: exact[name] / ms for name, ms in point.ttft_ms.items()}


def draw_gains(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws how many times sooner the longest prefix's first token comes than with exact blocks."""
    longest = max(row["tokens"] for row in rows)
    of_longest = sorted((row for row in rows if row["tokens"] == longest), key=lambda row: row["mb_per_s"])
    for name in (*CODECS[1:], LOADING["int8"]):
        axes.plot(
            [row["mb_per_s"] for row in of_longest], [row["gain"][name] for row in of_longest], marker="o", label=name
        )
    axes.axhline(1.0, color="grey", linestyle="--")
    axes.set_xscale("log")
    axes.set_xlabel("MB/s of the disk")
    axes.set_ylabel("times sooner than with exact blocks")
    axes.set_title(f"first token behind {longest:,} tokens", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
