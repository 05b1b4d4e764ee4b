"""A store that hosts share: what a second host finds there, when it helps, what it costs."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.sharing import copies, first_token, second_host, store_down
from benchmarks.sharing.requests import requests_of
from prefixd.workloads.circumstances import circumstances
from prefixd.workloads.mooncake import HASH_TOKENS

DESCRIPTION = """\
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

Example: python -m benchmarks.remote --json benchmarks/results/remote.json"""

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
    return copies.measure(options.copied_bytes, folder)


def _store_down(options: argparse.Namespace, folder: Path, step: Callable[[], None]) -> dict[str, Any]:
    plan = store_down.Plan(options.sessions, options.rounds)
    return store_down.measure(plan, folder, step)


SUITES: Mapping[str, tuple[Suite, Callable[[dict[str, Any]], list[str]]]] = {
    "trace": (_trace, second_host.violations),
    "first_token": (_first_token, first_token.violations),
    "copies": (_copies, copies.violations),
    "store_down": (_store_down, store_down.violations),
}
BOUNDS = {
    "trace": {"hit_rate": "achievable_hit_rate", "wrong_bytes": 0},
    "first_token": {"worst_ratio": first_token.WORST_RATIO},
    "copies": {"bytes_copied_per_byte": copies.MOST_COPIES},
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
        print(f"{name}:")
        harness.finish("remote", result[name], None)
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
    parse = harness.number(1e-3, 1e3)
    return [parse(each) for each in text.split(",")]


def _lengths(text: str) -> list[int]:
    lengths = [harness.positive(each) for each in text.split(",")]
    if wrong := [each for each in lengths if each % first_token.BLOCK_TOKENS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]} tokens are not whole blocks of {first_token.BLOCK_TOKENS}")
    return lengths


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    plan, down = first_token.Plan(), store_down.Plan()
    parser = harness.parser("remote", DESCRIPTION)
    parser.add_argument("--suites", type=_suites, default=list(SUITES), help=f"which ({','.join(SUITES)})")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="in Mooncake's format; by default one is made up")
    parser.add_argument("--requests", type=harness.positive, default=400, help="its first N requests (400)")
    parser.add_argument("--trace-bytes", type=harness.size, default=1 << 30, help="different blocks' bytes (1GiB)")
    parser.add_argument(
        "--bytes-per-token", type=_multiple_of_8, default=1024, help="KV bytes of a token, a multiple of 8 (1024)"
    )
    parser.add_argument("--rates", type=_rates, default=list(plan.gbit_per_s), help="Gbit/s (0.1,1,10)")
    parser.add_argument("--tokens", type=_lengths, default=list(plan.tokens), help="of prompts (64,256,1024)")
    parser.add_argument(
        "--repeats", type=harness.positive, default=plan.repeats, help=f"prompts ({plan.repeats}), more of short ones"
    )
    parser.add_argument("--copied-bytes", type=harness.size, default=256 << 20, help="each way (256MiB)")
    parser.add_argument("--sessions", type=harness.positive, default=down.sessions, help=f"({down.sessions})")
    parser.add_argument("--rounds", type=harness.positive, default=down.rounds, help=f"of a session ({down.rounds})")
    return parser


def _multiple_of_8(text: str) -> int:
    value = harness.positive(text)
    if value % 8:
        raise argparse.ArgumentTypeError(f"{value} is no multiple of 8")
    return value


def main() -> None:
    """The command. Raises BenchmarkError when a bound is missed, after the result is written."""
    options = make_parser().parse_args()
    result, missed = run(options)
    if options.json is not None:
        harness.write("remote", earlier(options.json) | result, options.json)
    if "first_token" in result:
        harness.plot(options.plot, lambda axes: first_token.draw(axes, result["first_token"]))
    if missed:
        raise harness.BenchmarkError("; ".join(missed))


if __name__ == "__main__":
    harness.run(main)
