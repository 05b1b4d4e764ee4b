"""Everything about the KV memory that only a GPU can tell, in one run.

Measures on one GPU what decides how prefixd keeps KV there:

    python -m benchmarks.gpu --json benchmarks/results/h200.json --plot-dir benchmarks/results

  machine         plain copies on the device and from pinned memory, plain reads of the disk
  virtual_memory  create, map, give access to and unmap chunks of 2 MiB, by the length of a run
  attach          a cached prefix of 1K to 64K tokens by mapping, by reuse of what is mapped, by a copy, by a table
  memory_held     bytes that batches of 1 to 64 requests hold, against preallocating
  swap            copies between the GPU and the pinned arena, against one large copy
  pages           an engine's pages by one kernel, by strided copies, by a batch of copies; alone and beside reading
  coded_pages     an engine's pages as int8 tiles that are made on the GPU, against as they are
  daemon_copies   the pages by the daemon's transfers in a running event loop, by the size of a piece
  attention       decoding, and a prompt behind a prefix: contiguous, paged, a kernel a request
  decode          tokens a second of an 8B-sized random model: eager, with CUDA graphs, with fewer operators, read late
  mapping_beside  steps of that model beside a thread that maps
  first_token     time to the first token of that model, prefix on GPU, CPU, disk, nowhere; by the tokens of a step
  daemon_8b       tokens a second of the 8B-sized model behind gRPC, with the daemon's own settings
  daemon          a daemon with a 1B-sized model over gRPC: first tokens by tier, text analysis with a cache and without
  padded_tokens   decoding where tokens are padded for short blocks, and where they are not
  flex_attention  as attention, by FlexAttention
  decode_16k      as decode, behind 16,384 tokens

Without --json the result goes to <device>.json in --plot-dir or benchmarks/results. Each part has a time budget, and
lists under "skipped" the points for which it had no time or memory. With --seconds all parts together have so much
time: the last ones are left out when it is over. A part that fails is recorded with its error and the others run on;
the exit status is then 1. The result is written after each part.

Parts have predictions, written down before: each is CONFIRMED or REFUTED when the part ends, and stands in the result.
A tree with uncommitted changes is refused (but for --with-changes), since nobody could repeat its figures.

--device stand-in and cpu run a tiny configuration to test the benchmark itself: its times mean nothing, and the result
says so. Without a GPU (and without --device) nothing is measured, and the exit status is 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import harness
from benchmarks.common.options import only
from benchmarks.gpu_parts import (
    attach,
    attention,
    coded_pages,
    daemon,
    daemon_copies,
    decode,
    first_token,
    machine,
    mapping_beside,
    memory_held,
    page_ways,
    swap,
    virtual_memory,
)
from benchmarks.gpu_parts.rig import prediction
from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.model import random_model
from benchmarks.gpu_parts.rig.part import Budget, Draw, Part, Unavailable, one_line
from prefixd.workloads.circumstances import circumstances

# The last ones are those that matter least, should there be no time for them.
PARTS = (
    machine.PART,
    virtual_memory.PART,
    attach.PART,
    memory_held.PART,
    swap.PART,
    page_ways.PART,
    coded_pages.PART,
    daemon_copies.PART,
    attention.PART,
    decode.PART,
    mapping_beside.PART,
    first_token.PART,
    daemon.PART_8B,
    daemon.PART,
    attention.PADDED_PART,
    attention.FLEX_PART,
    decode.LONG_PART,
)
_WITH_ONE_MODEL = (decode.PART, mapping_beside.PART)
"""The part behind each of these computes with the same model."""
_RESULTS = Path(__file__).resolve().parent / "results"


def measure(device: Device, part: Part, left_s: float = math.inf) -> dict[str, Any]:
    """What came of a part: its status ("measured", "unavailable", "failed"), its seconds, and its answer.

    left_s: the time that all parts have left; the part gets no more, and none if it is over. Where nothing is measured
    a part has no budget of its own.
    """
    budget = Budget(min(part.budget_s if device.measures else math.inf, left_s))
    begin = time.monotonic()
    result: dict[str, Any]
    try:
        if left_s <= 0:
            raise Unavailable("the parts before it took all the time that --seconds gives")
        answer = part.measure(device, budget)
        status = "failed" if budget.errors else "measured"
        result = {"status": status, **answer, "skipped": budget.skipped, "errors": budget.errors}
    except Unavailable as reason:
        result = {"status": "unavailable", "reason": str(reason)}
    except Exception as error:  # whatever breaks in one part, the others are worth having
        traceback.print_exc()
        result = {"status": "failed", "skipped": budget.skipped, "errors": {**budget.errors, "all": one_line(error)}}
    if device.measures:  # elsewhere times mean nothing
        result["predictions"] = [prediction.judge(result) for prediction in part.predictions]
    gc.collect()
    return {**result, "seconds": round(time.monotonic() - begin, 1)}


def draw(of_part: Draw, result: Mapping[str, Any], title: str, file: Path) -> None:
    """The part's plot; says so when matplotlib is missing."""

    def fill(axes: Any) -> None:
        of_part(axes, result)
        axes.set_title(title)

    harness.plot(file, fill)


def run(
    device: Device, parts: Sequence[Part], file: Path, plot_dir: Path | None, seconds: float = math.inf
) -> dict[str, Any]:
    """Measure parts and write what came of them, after each; returns it. seconds: the time for all of them."""
    end = time.monotonic() + seconds
    results: dict[str, Any] = {}
    figures = "measured" if device.measures else f"{device.kind}, no figures: times mean nothing here"
    content: dict[str, Any] = {
        "benchmark": "gpu",
        "device": device.name,
        "figures": figures,
        "parts": results,
        "circumstances": circumstances(),
    }
    for part in parts:
        print(f"{part.name:>16}  ...", file=sys.stderr, flush=True)
        result = results[part.name] = measure(device, part, end - time.monotonic())
        said = result.get("reason") or f"{len(result['skipped'])} points skipped, {len(result['errors'])} errors"
        print(f"{part.name:>16}  {result['status']} in {result['seconds']} s, {said}", flush=True)
        for judged in result.get("predictions", ()):
            print(f"{'':>16}  {prediction.line(judged)}", flush=True)
        file.write_text(json.dumps(content, indent=1) + "\n")
        if part.files is not None and result["status"] == "measured":
            for name, text in part.files(device, result).items():
                file.with_suffix(f".{name}").write_text(text)
        if plot_dir is not None and part.draw is not None and "all" not in result.get("errors", {"all"}):
            title = f"{part.name} on {device.name} ({figures})"
            draw(part.draw, result, title, plot_dir / f"{file.stem}_{part.name}.png")
        if part not in _WITH_ONE_MODEL:
            random_model.cache_clear()
    return content


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    names = [part.name for part in PARTS]
    parser = harness.parser("gpu", __doc__)
    parser.add_argument("--plot-dir", type=Path, metavar="FOLDER", help="for plots, and a result without --json")
    only(names).add_to(parser)
    parser.add_argument("--device", choices=("cuda", "stand-in", "cpu"), default="cuda", help="see above (cuda)")
    parser.add_argument("--ordinal", type=int, default=0, help="which GPU (0)")
    parser.add_argument("--dry-run", action="store_true", help="list the parts with their times, and measure nothing")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time for all parts together (no limit)")
    parser.add_argument(
        "--with-changes",
        action="store_true",
        help="measure a tree with uncommitted changes, too: the result says so, and is not published",
    )
    return parser


def main() -> None:
    """The command."""
    options = make_parser().parse_args()
    device = Device(options.device, options.ordinal)
    if device.kind == "cuda" and not torch.cuda.is_available():
        harness.finish("gpu", {"skipped": "torch sees no CUDA GPU on this machine"}, options.json)
        return
    if device.measures:
        commit = circumstances()["commit"]
        if not options.with_changes and (commit is None or commit.endswith("+changes")):
            raise harness.BenchmarkError(
                f"no commit has this tree ({commit or 'no repository'}), so nobody could repeat its figures; commit "
                "first, or measure for yourself with --with-changes"
            )
        torch.cuda.set_device(options.ordinal)
    if options.plot_dir is not None:
        options.plot_dir.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "_", device.name.lower()).strip("_")
    file = options.json or harness.committed((options.plot_dir or _RESULTS) / f"{name}.json")
    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    if options.dry_run:
        times = ", ".join(f"{part.name} {part.budget_s:g}" for part in parts)
        total_s = sum(part.budget_s for part in parts)
        print(f"gpu: would measure {device.name}, in seconds at most: {times}; together {total_s:g}")
        return
    content = run(device, parts, file, options.plot_dir, options.seconds)
    failed = [name for name, result in content["parts"].items() if result["status"] == "failed"]
    print(f"written to {file}; {'failed: ' + ', '.join(failed) if failed else 'no part failed'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    harness.run(main)
