"""The first token behind a prefix in CPU memory, which comes layer by layer or in whole blocks over a slow link.

Two daemons with the embedded model (8 layers) differ in worker.layerwise_loads alone: always, never. GPU tier and CPU
tier are host memory, and copies between them have the rate of a slow link. A prompt is a cached prefix and new tokens;
its prefix is in the CPU tier alone, or on the GPU tier still. All are asked in turn, and medians are compared.

ratio: the first token layer by layer over the one in whole blocks. expected_ratio: what 4 slabs allow if the load takes
as long as whole blocks take beyond a prefix on the GPU tier, and computing as long as that. Fails when the ratio is not
below 1. On a GPU the link is not slowed down: see `benchmarks.gpu`.

    python -m benchmarks.layerwise --mb-per-s 200
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import harness
from benchmarks.common.options import option
from benchmarks.ways_of_serving.ttft import first_token, gpu_bytes, in_turn, settings, start
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, Tier
from prefixd.workloads.text_analysis import BLOCK_BYTES, BLOCK_TOKENS
from prefixd_swap.block_layers import MOST_SLABS

WAYS = ("layers", "whole", "gpu")
MODES = {"layers": "always", "whole": "never"}


class Subject:
    """A daemon, and the prefix of its prompts."""

    def __init__(self, client: Client, prefix: list[int], gpu_tier_bytes: int) -> None:
        self._client = client
        self._prefix = prefix
        self._gpu_bytes = gpu_tier_bytes

    def first_token_s(self, tokens: int, seed: int, tier: Tier | None) -> float:
        """Seconds to the first token behind the prefix and `tokens` new ones. Raises BenchmarkError if the prefix was
        not found in `tier`."""
        new = np.random.default_rng([tokens, seed]).integers(0, 256, tokens).tolist()
        first_s, ended = first_token(self._client, [*self._prefix, *new])
        if tier is not None and ended.hit_tokens[tier] != len(self._prefix):
            raise harness.BenchmarkError(f"{ended.hit_tokens} tokens were found, and all {len(self._prefix)} should be")
        return first_s

    def leave_in_cpu_memory(self) -> None:
        """Has all that is cached be in the CPU tier only: the smallest GPU tier has two blocks, which another prompt
        takes."""
        self._client.resize_tier(Tier.GPU, 2 * BLOCK_BYTES)
        first_token(self._client, [0] * BLOCK_TOKENS)
        self._client.resize_tier(Tier.GPU, self._gpu_bytes)


def expected(whole_s: float, computed_s: float, slabs: int = MOST_SLABS) -> float:
    """The least ratio: each slab is computed when it is there and the one before it is computed."""
    load_s, done_s = max(0.0, whole_s - computed_s), 0.0
    for slab in range(1, slabs + 1):
        done_s = max(done_s, load_s * slab / slabs) + computed_s / slabs
    return done_s / whole_s


def measure(prefix_tokens: int, new_tokens: int, bytes_per_s: float, repeats: int, folder: Path) -> dict[str, Any]:
    """The result."""
    tokens = prefix_tokens + new_tokens
    shared = settings(tokens) | {"cpu.bytes": 2 * gpu_bytes(tokens), "scheduler.load": "always"}
    daemons = {
        way: DaemonProcess(
            shared | {"worker.layerwise_loads": mode},
            directory=folder / way,
            program=("-m", "benchmarks.stand_ins.slow_copies", str(bytes_per_s)),
        )
        for way, mode in MODES.items()
    }
    prefix = np.random.default_rng(prefix_tokens).integers(0, 256, prefix_tokens).tolist()
    with ExitStack() as stack:
        clients = start(daemons, stack)
        subjects = {way: Subject(client, prefix, gpu_bytes(tokens)) for way, client in clients.items()}
        for subject in subjects.values():
            subject.first_token_s(new_tokens, 10_000, None)  # computed

        def ask(way: str, repeat: int) -> float:
            subject = subjects.get(way, subjects["whole"])
            if way != "gpu":
                subject.leave_in_cpu_memory()
            seed = WAYS.index(way) * repeats + repeat
            return subject.first_token_s(new_tokens, seed, Tier.GPU if way == "gpu" else Tier.CPU)

        for way in WAYS[:2]:
            ask(way, repeats)
        times = in_turn(("layers", "whole"), repeats, ask)
        times["gpu"] = [ask("gpu", repeat) for repeat in range(repeats)]
        loads = clients["layers"].stats().scheduler.layerwise_loads
    if loads < repeats:
        raise harness.BenchmarkError(f"{loads} of {repeats} prefixes were loaded layer by layer")
    medians = {way: statistics.median(each) for way, each in times.items()}
    return {
        "ratio": round(medians["layers"] / medians["whole"], 3),
        "expected_ratio": round(expected(medians["whole"], medians["gpu"]), 3),
        **{f"{way}_ms": round(1e3 * seconds, 1) for way, seconds in medians.items()},
    }


@harness.benchmark(
    "layerwise",
    __doc__,
    option("--prefix-tokens", 4096, "cached"),
    option("--new-tokens", 512, "computed"),
    option("--mb-per-s", 200, "of the link"),
    option("--repeats", 7, "of each"),
)
def main(options: harness.Options) -> harness.Outcome:
    """Measures both ways."""
    with tempfile.TemporaryDirectory(prefix="prefixd-") as folder:
        rate = 1e6 * options.mb_per_s
        result = measure(options.prefix_tokens, options.new_tokens, rate, options.repeats, Path(folder))
    return harness.Outcome(result, harness.missed(result, most={"ratio": 1.0}))


if __name__ == "__main__":
    harness.run(main)
