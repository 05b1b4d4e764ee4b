"""A batch of requests with a third of the GPU memory that it wants: the same tokens, and what the pressure costs.

Sends a batch of requests at once to a daemon with the small model that comes with prefixd:

    python -m benchmarks.pressure --json pressure.json

Every second request begins with the same prefix, the others share nothing; half of each kind are greedy, half sampled
with a seed of their own; every fourth has a lower priority. The batch wants memory for all its blocks at once, shared
ones counted once. It runs in that much GPU memory (unpressed), then in one --share of it with each setting of
scheduler.preemption: swap, recompute, auto. Each run is a daemon of its own with an empty cache and a CPU tier that
takes everything.

same_tokens: every request got the same tokens in all runs. swapped and recomputed: preempted requests of the runs with
these settings whose KV went down the tiers, or was dropped and computed again. swap_ratio, recompute_ratio and
auto_ratio: requests a second, divided by those of the unpressed run. The benchmark fails when tokens differ, or when a
run preempted nobody in the way that it was set to.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import from_options, option, seed
from benchmarks.workloads.asking import generated_tokens
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncClient, Sampling
from prefixd.workloads.latency_figures import digest
from prefixd.workloads.text_analysis import BLOCK_BYTES, BLOCK_TOKENS, FIRST_TOKEN, LAST_TOKEN

MODES = ("swap", "recompute", "auto")
_TOP_P = 0.9
_LOW_PRIORITY = 5


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests: the same arguments give the same ones. Lengths are in tokens."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    share: int
    """Under pressure the GPU tier has one of so many parts of the memory that the batch wants."""
    seed: int = 0

    @property
    def prefix_tokens(self) -> int:
        """Of the prefix that every second request begins with: whole blocks, about two thirds of its prompt."""
        return 2 * self.prompt_tokens // 3 // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def wanted_blocks(self) -> int:
        """Blocks of all requests at their full length, those of the shared prefix once."""
        shared_by = -(-self.requests // 2)
        return self.requests * self._longest_blocks - (shared_by - 1) * (self.prefix_tokens // BLOCK_TOKENS)

    @property
    def pressed_blocks(self) -> int:
        """Blocks of the GPU tier under pressure: the share, but never less than one request needs."""
        return max(self.wanted_blocks // self.share, self._longest_blocks)

    @property
    def _longest_blocks(self) -> int:
        return -(-(self.prompt_tokens + self.output_tokens + 1) // BLOCK_TOKENS)

    def prompts(self) -> list[list[int]]:
        source = random.Random(f"pressure {self.seed}")
        prefix = _tokens(source, self.prefix_tokens)
        bodies = [_tokens(source, self.prompt_tokens) for _ in range(self.requests)]
        return [prefix + body[self.prefix_tokens :] if number % 2 == 0 else body for number, body in enumerate(bodies)]

    def options(self, number: int) -> dict[str, Any]:
        """How the tokens of a request are chosen, and its priority; arguments of `AsyncClient.generate`."""
        sampled = number // 2 % 2 == 1
        sampling = Sampling(
            max_tokens=self.output_tokens,
            ignore_eos=True,
            temperature=1.0 if sampled else 0.0,
            top_p=_TOP_P if sampled else 1.0,
            seed=number,
        )
        return {"sampling": sampling, "priority": _LOW_PRIORITY if number % 4 == 3 else 0}

    def settings(self, mode: str) -> dict[str, object]:
        """Of the daemon for a run: "unpressed", or one of MODES."""
        pressed = mode != "unpressed"
        return {
            "worker.embedded": True,
            # With several threads the bits of a matrix product may depend on how many rows it has, and with them,
            # rarely, a token; recomputing computes more rows at once.
            "worker.threads": 1,
            "worker.block_tokens": BLOCK_TOKENS,
            "worker.max_running": self.requests,
            "gpu.bytes": (self.pressed_blocks if pressed else self.wanted_blocks) * BLOCK_BYTES,
            "cpu.bytes": 2 * self.wanted_blocks * BLOCK_BYTES,
            "disk.bytes": 0,
            "scheduler.preemption": mode if pressed else "auto",
        }


@dataclass(frozen=True, slots=True)
class Run:
    """What a run came to; the counts are those of `SchedulerStats`."""

    name: str
    gpu_blocks: int
    elapsed_s: float
    requests_per_s: float
    preempted: int
    swapped: int
    recomputed: int
    swapped_blocks: int
    recomputed_tokens: int
    resumed: int
    output_digest: str


def measure(batch: Batch, step: Callable[[], None] = lambda: None) -> list[Run]:
    """The runs, one daemon after the other; `step` is called after each request. Raises DaemonFailed, ClientError."""
    return [_run(name, batch, step) for name in ("unpressed", *MODES)]


def _run(name: str, batch: Batch, step: Callable[[], None]) -> Run:
    settings = batch.settings(name)
    with DaemonProcess(settings) as daemon:
        outputs, elapsed_s, stats = asyncio.run(_send_all(daemon.address, batch, step))
    return Run(
        name,
        int(str(settings["gpu.bytes"])) // BLOCK_BYTES,
        elapsed_s,
        batch.requests / elapsed_s,
        stats.preempted_requests,
        stats.swapped_requests,
        stats.recomputed_requests,
        stats.swapped_blocks,
        stats.recomputed_tokens,
        stats.resumed_requests,
        digest(outputs),
    )


async def _send_all(address: str, batch: Batch, step: Callable[[], None]) -> tuple[list[list[int]], float, Any]:
    """The output of each request, the seconds that all took together, and the scheduler's figures."""
    async with AsyncClient(address, name="benchmark pressure", memory="streamed") as client:

        async def send(number: int, prompt: Sequence[int]) -> list[int]:
            output = await generated_tokens(client, prompt, **batch.options(number))
            step()
            return output

        await generated_tokens(client, [FIRST_TOKEN], Sampling(max_tokens=1))  # loads the model
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(number, prompt)) for number, prompt in enumerate(batch.prompts())]
        elapsed_s = time.monotonic() - began
        return [task.result() for task in tasks], elapsed_s, (await client.stats()).scheduler


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The result of the runs."""
    unpressed, *pressed = runs
    of = {run.name: run for run in pressed}
    return {
        "same_tokens": len({run.output_digest for run in runs}) == 1,
        "swapped": of["swap"].swapped,
        "recomputed": of["recompute"].recomputed,
        **{f"{run.name}_ratio": round(run.requests_per_s / unpressed.requests_per_s, 3) for run in pressed},
        "runs": [asdict(run) for run in runs],
    }


def violations(result: Mapping[str, Any]) -> list[str]:
    """What a result breaks of what must hold, in words."""
    unpressed, swap, recompute, auto = result["runs"]
    found = []
    if not result["same_tokens"]:
        others = [run["name"] for run in (swap, recompute, auto) if run["output_digest"] != unpressed["output_digest"]]
        found.append(f"with {', '.join(others)} the tokens differ from those of the unpressed run: see output_digest")
    if unpressed["preempted"]:
        found.append(f"the run with all the memory that the batch wants preempted {unpressed['preempted']} requests")
    for run, way in ((swap, "swapped"), (recompute, "recomputed")):
        if not run[way]:
            found.append(f"no request was {way} with scheduler.preemption = {run['name']}; use a larger batch")
    if not auto["swapped"] + auto["recomputed"]:
        found.append("no request was preempted with scheduler.preemption = auto; use a larger batch")
    return found


@harness.benchmark(
    "pressure",
    __doc__,
    option("--requests", 12, "requests of the batch"),
    option("--prompt-tokens", 96, "length of a prompt"),
    option("--output-tokens", 64, "tokens generated for a request"),
    option("--share", 3, "under pressure there is one of so many parts of the memory that the batch wants"),
    seed("of the prompts"),
)
def main(options: harness.Options) -> harness.Outcome:
    """The runs, and what must hold of them."""
    batch = from_options(Batch, options)
    with harness.progress("requests", (1 + len(MODES)) * batch.requests) as step:
        runs = measure(batch, step)
    result = {"wanted_blocks": batch.wanted_blocks, **summary(runs)}
    columns = ("name", "gpu_blocks", "requests_per_s", "preempted", "swapped", "recomputed", "recomputed_tokens")
    return harness.Outcome(result, violations(result), [harness.Table(result["runs"], columns)])


if __name__ == "__main__":
    harness.run(main)
