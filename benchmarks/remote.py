"""A store that hosts share: what a second host finds there, when it helps, what it costs.

Hosts are daemons on this machine, each with a data directory of its own; the store is a real Valkey server.

trace        host A stores the prompts of a trace in Mooncake's format; host B starts cold, is asked for them, and
             every byte is compared. hit_rate is B's, in tokens; it has to be achievable_hit_rate, that of all full
             blocks. wrong_bytes has to be 0.
first_token  both with the embedded model. The link to the store has 0.1, 1 and 10 Gbit/s. A prompt that A has computed
             is sent to three hosts that have never seen it: one with the store and scheduler.load = auto, one that
             always loads, one without a store. worst_ratio is the median time to first token of the first over the
             better of the others, at the worst rate and length; at most 1.1. A host learns from other prompts first.
copies       bytes_copied_per_byte: copies of a byte in memory on its way to Valkey or from it, one between process and
             kernel among them; the larger of writing and reading, and of a fast and a slow link; at most 2. Beside it
             what the client allocates, and the CPU seconds of client, plain socket and one copy.
store_down   engines' calls to daemons whose store is down (port closed; frozen) against one without a remote tier,
             call by call in turn. worst_ratio of their medians and of whole rounds is at most 1.02. none_again is a
             second daemon without a remote tier: what it differs is noise.

Suites that are not run keep the results that the file has; each names its commit.

Example: python -m benchmarks.remote --json benchmarks/results/remote.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import number, option, size
from benchmarks.sharing import byte_copies, second_host, store_down
from benchmarks.sharing import first_token_by_rate as first_token
from benchmarks.ways_of_serving.ttft import whole_blocks
from benchmarks.workloads.trace_requests import requests_of
from prefixd.workloads.circumstances import circumstances
from prefixd.workloads.mooncake import HASH_TOKENS

Suite = Callable[[argparse.Namespace, Path, Callable[[], None]], dict[str, Any]]


def _trace(options: argparse.Namespace, folder: Path, step: Callable[[], None]) -> dict[str, Any]:
    most = options.trace_bytes // (HASH_TOKENS * options.bytes_per_token)
    requests = requests_of(options.trace, options.requests, most)
    if not any(request.hash_ids for request in requests):
        raise harness.BenchmarkError(
            f"no request of the trace fits into --trace-bytes {options.trace_bytes}, which is {most} blocks"
        )
    name = "made up" if options.trace is None else options.trace.name
    return {"trace": name, **second_host.measure(requests, options.bytes_per_token, folder, step)}


def _first_token(options: argparse.Namespace, folder: Path, step: Callable[[], None]) -> dict[str, Any]:
    plan = first_token.Plan(options.rates, options.tokens, options.repeats)
    return first_token.summary(first_token.measure(plan, folder, step))


def _copies(options: argparse.Namespace, folder: Path, step: Callable[[], None]) -> dict[str, Any]:
    return byte_copies.measure(options.copied_bytes, folder)


def _store_down(options: argparse.Namespace, folder: Path, step: Callable[[], None]) -> dict[str, Any]:
    plan = store_down.Plan(options.sessions, options.rounds)
    return store_down.measure(plan, folder, step)


SUITES: Mapping[str, tuple[Suite, Callable[[dict[str, Any]], list[str]]]] = {
    "trace": (_trace, second_host.violations),
    "first_token": (_first_token, first_token.violations),
    "copies": (_copies, byte_copies.violations),
    "store_down": (_store_down, store_down.violations),
}
BOUNDS = {
    "trace": {"hit_rate": "achievable_hit_rate", "wrong_bytes": 0},
    "first_token": {"worst_ratio": first_token.WORST_RATIO},
    "copies": {"bytes_copied_per_byte": byte_copies.MOST_COPIES},
    "store_down": {"worst_ratio": store_down.MOST_RATIO},
}


def run(options: argparse.Namespace, step: Callable[[], None] = lambda: None) -> tuple[dict[str, Any], list[str]]:
    """The results of the chosen suites, each with its bounds, and what they missed."""
    result: dict[str, Any] = {}
    missed: list[str] = []
    for name in options.suites:
        measure, violations = SUITES[name]
        began_s = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="prefixd-") as folder:
            found = measure(options, Path(folder), step)
        result[name] = {
            **found,
            "bounds": BOUNDS[name],
            "missed": violations(found),
            "seconds": round(time.perf_counter() - began_s, 1),
            "commit": circumstances()["commit"],
        }
        missed += [f"{name}: {each}" for each in violations(found)]
    return result, missed


def earlier(file: Path) -> dict[str, Any]:
    """The suites' results that a file has from an earlier run; none where there is no such file."""
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return {name: content[name] for name in SUITES if name in content} if isinstance(content, dict) else {}


def _suites(text: str) -> list[str]:
    names = text.split(",")
    if wrong := [name for name in names if name not in SUITES]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no suite; choose from {', '.join(SUITES)}")
    return names


def _rates(text: str) -> list[float]:
    parse = number(1e-3, 1e3)
    return [parse(each) for each in text.split(",")]


_FIRST_TOKEN, _DOWN = first_token.Plan(), store_down.Plan()


@harness.benchmark(
    "remote",
    __doc__,
    option("--suites", list(SUITES), f"which ({','.join(SUITES)})", _suites, shown=False),
    option("--trace", None, "in Mooncake's format; by default one is made up", Path, metavar="FILE"),
    option("--requests", 400, "its first N requests"),
    option("--trace-bytes", 1 << 30, "different blocks' bytes", size),
    option("--bytes-per-token", 1024, "KV bytes of a token"),
    option("--rates", list(_FIRST_TOKEN.gbit_per_s), "Gbit/s (0.1,1,10)", _rates, shown=False),
    option("--tokens", list(_FIRST_TOKEN.tokens), "of prompts (64,256,1024)", whole_blocks, shown=False),
    option("--repeats", _FIRST_TOKEN.repeats, "prompts; more of short ones"),
    option("--copied-bytes", 256 << 20, "each way", size),
    option("--sessions", _DOWN.sessions, "sessions with a store that is down"),
    option("--rounds", _DOWN.rounds, "of a session"),
    harness.PLOT,
    unrecorded=(
        *("suites", "requests", "trace_bytes", "bytes_per_token", "rates"),
        *("tokens", "repeats", "copied_bytes", "sessions", "rounds"),
    ),
)
def main(options: harness.Options) -> harness.Outcome:
    """The suites; those that are not run keep their results of the file."""
    result, missed = run(options)
    times = result.get("first_token")
    kept = earlier(options.json) if options.json is not None else {}
    if times is None:
        return harness.Outcome(kept | result, missed)
    arms = (f"ttft_ms.{arm}" for arm in first_token.ARMS)
    table = harness.Table(times["points"], ("gbit_per_s", "tokens", *arms, "ratio", "loaded_share"))
    return harness.Outcome(kept | result, missed, [table], lambda axes: first_token.draw(axes, times))


if __name__ == "__main__":
    harness.run(main)
