"""What each codec saves and costs: bytes, errors, and how fast a write encodes and a read decodes.

Parts are made up: keys with channels of very different sizes, values with such tokens (`made_up_kv.py`).
size is the share of the exact bytes that is stored, headers and all; worst_error and worst_rms_error are the
largest ones of a layer of any part, relative to the root mean square of its keys or values. encode is all that a
write does before the disk: encode, decode again, measure the errors, two checksums; decode is all that a read does
after it. GB/s are of exact bytes: *_core_gbps a second of CPU time, *_gbps a second of the clock with all threads.
raw_store_gbps and raw_load_gbps are what the disk does with plain direct I/O (`benchmarks.disk`). A codec whose
encode_gbps and decode_gbps are above them makes no write and no read slower, and with fewer bytes a faster one:
*_gain is how much faster, if the slower of codec and disk decides and both work at the same time.
zstd, scale_precision, int4_groups: what the formats were chosen by (docs/design/codecs.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.codecs_parts.choices import int4_groups, scale_precision, zstd_settings
from benchmarks.codecs_parts.raw_disk import raw_disk
from benchmarks.codecs_parts.speeds import speeds
from benchmarks.common import harness
from benchmarks.common.options import flag, option, size
from benchmarks.common.plots import bars

_CODECS = ("lossless", "int8", "k8v4")
_TOKENS = (16, 64)
_SIZES = (64 << 10, 2 << 20)
_BLOCK_BYTES = 2 << 20
_SHORT_BYTES = 8 << 20


@harness.benchmark(
    "codecs",
    __doc__,
    option("--dtype", "bfloat16", "of the numbers: bfloat16, float16 or float32", str),
    option("--threads", 2, "threads that encode or decode"),
    option("--rounds", 7, "rounds to time"),
    option("--disk-bytes", 512 << 20, "bytes a round of the raw disk", size),
    option("--folder", None, "where to measure the disk (the temporary folder)", Path),
    flag("--short", "to test the benchmark: one round, and few bytes on disk"),
    harness.PLOT,
)
def main(options: harness.Options) -> harness.Outcome:
    """Rows of codecs, and the disk beside them."""
    rounds = 1 if options.short else options.rounds
    rows = speeds(_CODECS, _TOKENS, _SIZES, options.dtype, options.threads, rounds)
    disk = raw_disk(options.folder, _BLOCK_BYTES, _SHORT_BYTES if options.short else options.disk_bytes, rounds)
    for row in rows:
        for call, what in (("store", "encode"), ("load", "decode")):
            raw = disk[f"raw_{call}_gbps"]
            row[f"{call}_gain"] = round(min(row[f"{what}_gbps"], raw / row["size"]) / raw, 3)

    def draw(axes: Any) -> None:
        groups = [f"{row['codec']}\n{row['tokens']} tokens" for row in rows if row["part_bytes"] == _SIZES[-1]]
        large = [row for row in rows if row["part_bytes"] == _SIZES[-1]]
        series = {
            "encode": [row["encode_core_gbps"] for row in large],
            "decode": [row["decode_core_gbps"] for row in large],
        }
        bars(axes, groups, series, "GB of exact bytes per second and core", "parts of 2 MiB")
        for name, style in (("load", "--"), ("store", ":")):
            axes.axhline(disk[f"raw_{name}_gbps"], color="grey", linestyle=style, label=f"raw disk, {name}")
        axes.legend(frameon=False, fontsize=8)

    choices = {"zstd": zstd_settings(), "scale_precision": scale_precision(), "int4_groups": int4_groups()}
    tables = [harness.Table(each, tuple(each[-1])) for each in (rows, *choices.values())]
    return harness.Outcome({**disk, "codecs": rows, **choices}, tables=tables, draw=draw)


if __name__ == "__main__":
    harness.run(main)
