"""How long demand loads wait for a disk that is kept busy by prefetches and write-back, against an idle disk.

A client leases prompts that are on disk only, one after the other with pauses, and waits for each: demand. It does so
three times with the same prompts, each time with a fresh daemon on the same data: alone (idle); while two other
clients write new blocks, which are written back, and prefetch thousands of blocks that are on disk only (urgency); and
the same with transfers.urgency = false, first in, first out (no urgency). New blocks come at a quarter of the disk's
bandwidth, unless the daemon has the writer wait. The CPU tier has room for three times what is prefetched at a time.
Every byte that is leased is compared.

The daemon's disk is throttled to --bandwidth and --latency, with calls served in the order in which they come, so that
the order of work decides and not the machine's disk. The scrubber is off.

demand_p50_ratio is the median wait with urgency over the median wait of the idle daemon; it must be at most 2.
demand_p50_ratio_without_urgency is the same with urgency turned off; it must be at least 5, which shows that the
benchmark can see. wrong_bytes must be 0. of_bandwidth is the share of the disk's bandwidth that was used in a phase;
it must be at least a half in those with other clients.

What is possible: a demand load of 256 blocks of 64 KiB is 16 MiB, 160 ms at 100 MiB/s. A piece of work that has
started is not interrupted, and three may be under way that nobody waits for: two reads of 1 MiB and a write of 4 MiB
are 60 ms. After 100 ms one more is let through, so that nothing starves: 40 ms. So with urgency the ratio is between 1
and 1.6. First in, first out, demand waits for up to six prefetches of 512 blocks, 192 MiB or 1.9 s: a ratio of 13.

Example: python -m benchmarks.urgency --json benchmarks/results/urgency.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import harness
from benchmarks.common.options import option, size
from benchmarks.load.disk_traffic import TIMEOUT_S, DiskTraffic, Prompts, Traffic, TrafficPlan
from benchmarks.stand_ins.throttled import DiskRate, ThrottledDaemon
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncCache, AsyncClient, Tier

WORST_RATIO = 2.0
LEAST_RATIO_WITHOUT = 5.0
LEAST_OF_BANDWIDTH = 0.5
_PAUSES_S = (0.1, 0.3)  # between two demand loads; at random, so that they meet the other work at any point of it
_POLL_S = 0.05
_WAIT_S = 300.0  # for the other clients to fill the CPU tier
_WRITTEN_BLOCKS = 64  # of a prompt that is written
_QUEUED = 2  # of these may wait to be written, so that few blocks have to go before they were written back
_SEED = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is about; every phase is the same but for the other clients and the setting."""

    loads: int
    demand: Prompts
    traffic: TrafficPlan
    cpu_bytes: int
    bytes_per_s: float
    latency_s: float

    @property
    def pool_bytes(self) -> int:
        """What is on disk before the first phase."""
        prefetched = self.traffic.prefetched
        return self.demand.block_bytes * ((self.loads + 1) * self.demand.blocks + self.traffic.pool * prefetched.blocks)

    def settings(self, data: Path, urgency: bool) -> dict[str, object]:
        return {
            "data_dir": data,
            "cpu.bytes": self.cpu_bytes,
            "disk.bytes": 2 * self.pool_bytes + (8 << 30),  # what is written never has to make room on disk
            "disk.scrub_bytes_per_s": 0,
            "disk.write_queue_bytes": _QUEUED * self.traffic.written.blocks * self.demand.block_bytes,
            "transfers.urgency": urgency,
        }


@dataclass(slots=True)
class Phase:
    """What demand waited in one phase, and what the disk did meanwhile."""

    name: str
    demand_p50_ms: float = 0.0
    demand_p95_ms: float = 0.0
    of_bandwidth: float = 0.0
    """Of the disk's bandwidth, from the first demand load to the end of the last one."""
    demand_blocks: int = 0
    prefetched_blocks: int = 0
    written_blocks: int = 0
    demoted_blocks: int = 0
    """Written because their room was wanted before they had been written back; not among `written_blocks`."""
    least_waiting_blocks: int = 0
    """Of prefetches under way, at the begin of any demand load."""
    refused_prefetches: int = 0
    lost_prefetches: int = 0
    wrong_bytes: int = 0
    samples_ms: list[float] = field(default_factory=list)


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan of a run. The prompts that are prefetched in turn are larger than the CPU tier by a third."""
    prefetched = Prompts("benchmark-urgency-prefetched", options.prefetch_blocks, options.block_bytes)
    prompt_bytes = prefetched.blocks * options.block_bytes
    cpu_bytes = options.cpu_bytes or 3 * options.prefetches * prompt_bytes
    return Plan(
        options.loads,
        Prompts("benchmark-urgency-demand", options.load_blocks, options.block_bytes),
        TrafficPlan(
            prefetched,
            max(-(-4 * cpu_bytes // (3 * prompt_bytes)), options.prefetches),
            options.prefetches,
            Prompts("benchmark-urgency-written", min(_WRITTEN_BLOCKS, options.load_blocks), options.block_bytes),
            options.bandwidth / 4,
        ),
        cpu_bytes,
        options.bandwidth,
        options.latency_ms / 1e3,
    )


def measure(plan: Plan, folder: Path, step: Callable[[], None] = lambda: None) -> list[Phase]:
    """The three phases.

    Args:
        plan: what to do.
        folder: empty; where the data goes.
        step: called after each demand load.

    Raises:
        BenchmarkError: blocks were not where the plan has them.
    """
    data = folder / "data"
    with DaemonProcess(plan.settings(data, True)) as daemon:
        asyncio.run(_fill(daemon.address, plan))
    phases = []
    for name, busy, urgency in (("idle", False, True), ("urgency", True, True), ("no urgency", True, False)):
        with ExitStack() as stack:
            throttled = ThrottledDaemon(plan.settings(data, urgency))
            throttled.throttle(DiskRate(plan.bytes_per_s, plan.latency_s, alone=True))
            daemon = stack.enter_context(throttled)
            stack.callback(daemon.kill)  # in order it would write back what is left
            asyncio.run(_clean(daemon.address, plan))
            traffic = stack.enter_context(DiskTraffic(daemon.address, plan.traffic)) if busy else None
            phases.append(asyncio.run(_run(Phase(name), daemon.address, plan, traffic, step)))
    return phases


async def _fill(address: str, plan: Plan) -> None:
    """Stores all prompts that are to be loaded or prefetched, durably."""
    async with AsyncClient(address, name="benchmark urgency", timeout_s=TIMEOUT_S) as client:
        for prompts, number in ((plan.demand, plan.loads + 1), (plan.traffic.prefetched, plan.traffic.pool)):
            blocks = await client.register(prompts.spec)
            for prompt in range(number):
                if await prompts.store(blocks, prompt, durable=True) != prompts.blocks:
                    raise harness.BenchmarkError(f"prompt {prompt} of {prompts.name} could not be stored as a whole")


async def _clean(address: str, plan: Plan) -> None:
    async with AsyncClient(address, name="benchmark urgency", timeout_s=TIMEOUT_S) as client:
        written = await client.register(plan.traffic.written.spec)
        await client.evict(namespace_id=written.namespace_id)


async def _run(phase: Phase, address: str, plan: Plan, traffic: DiskTraffic | None, step: Callable[[], None]) -> Phase:
    async with AsyncClient(address, name="benchmark urgency", memory="shared", timeout_s=TIMEOUT_S) as client:
        blocks = await client.register(plan.demand.spec)
        if traffic is not None:
            await _wait_until_busy(client, traffic)
        await _load(blocks, plan.demand, plan.loads, phase)  # the first load maps the arena and opens files
        pauses = random.Random(_SEED)
        begun, begin_s = await _moved(client), time.monotonic()
        waiting: list[int] = []
        for prompt in range(plan.loads):
            await asyncio.sleep(pauses.uniform(*_PAUSES_S))
            if traffic is not None:
                waiting.append(traffic.look().waiting_blocks)
            phase.samples_ms.append(round(1e3 * await _load(blocks, plan.demand, prompt, phase), 2))
            step()
        ended, seconds = await _moved(client), time.monotonic() - begin_s
        if traffic is not None:
            seen = traffic.look()
            phase.refused_prefetches, phase.lost_prefetches = seen.refused, seen.lost
            phase.least_waiting_blocks = min(waiting)
            phase.wrong_bytes += await _compare_others(client, plan, seen)
    moved = ended - begun
    phase.demand_blocks = plan.loads * plan.demand.blocks
    phase.prefetched_blocks = moved.read - phase.demand_blocks
    phase.written_blocks, phase.demoted_blocks = moved.written, moved.demoted
    phase.of_bandwidth = round(moved.blocks * plan.demand.block_bytes / seconds / plan.bytes_per_s, 3)
    phase.demand_p50_ms, phase.demand_p95_ms = np.percentile(phase.samples_ms, (50, 95)).round(2).tolist()
    return phase


async def _load(blocks: AsyncCache, prompts: Prompts, prompt: int, phase: Phase) -> float:
    """Leases a prompt that is on disk only and compares its bytes; the seconds until the lease was there."""
    tokens = prompts.tokens(prompt)
    on_disk = (await blocks.match(tokens)).blocks_in(Tier.DISK)
    if on_disk != prompts.blocks:
        raise harness.BenchmarkError(f"{on_disk} of {prompts.blocks} blocks of prompt {prompt} were on disk only")
    begin = time.perf_counter()
    async with await blocks.acquire(tokens) as lease:
        seconds = time.perf_counter() - begin
        if lease.blocks != prompts.blocks:
            raise harness.BenchmarkError(f"{lease.blocks} of {prompts.blocks} blocks of prompt {prompt} were leased")
        phase.wrong_bytes += prompts.wrong_bytes(lease, prompt)
    return seconds


async def _compare_others(client: AsyncClient, plan: Plan, traffic: Traffic) -> int:
    """How many bytes are wrong of what was prefetched last, and of what was written last."""
    wrong = 0
    others = ((plan.traffic.prefetched, traffic.prefetched), (plan.traffic.written, traffic.written))
    for prompts, numbers in others:
        blocks = await client.register(prompts.spec)
        for prompt in numbers[-1:]:
            async with await blocks.acquire(prompts.tokens(prompt)) as lease:
                if lease.blocks != prompts.blocks:
                    raise harness.BenchmarkError(
                        f"{lease.blocks} of {prompts.blocks} blocks of {prompts.name} are left"
                    )
                wrong += prompts.wrong_bytes(lease, prompt)
    return wrong


async def _wait_until_busy(client: AsyncClient, traffic: DiskTraffic) -> None:
    """Returns when prefetches are under way, new blocks are written, and the CPU tier is full."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        seen, moved, stats = traffic.look(), await _moved(client), await client.stats()
        evicted = sum(tier.evicted_blocks for tier in stats.tiers)
        if seen.waiting_blocks and seen.prefetched and moved.written + moved.demoted and evicted:
            return
        await asyncio.sleep(_POLL_S)
    raise harness.BenchmarkError(f"the other clients have not filled the CPU tier within {_WAIT_S:g} s: {seen}")


@dataclass(frozen=True, slots=True)
class _Moved:
    """Blocks that a daemon has moved since its start."""

    read: int
    written: int
    demoted: int

    @property
    def blocks(self) -> int:
        return self.read + self.written + self.demoted

    def __sub__(self, before: _Moved) -> _Moved:
        return _Moved(self.read - before.read, self.written - before.written, self.demoted - before.demoted)


async def _moved(client: AsyncClient) -> _Moved:
    stats = await client.stats()
    return _Moved(
        sum(tier.promoted_blocks for tier in stats.tiers),
        stats.write_back.written_blocks,
        sum(tier.demoted_blocks for tier in stats.tiers),
    )


def violations(result: Mapping[str, Any]) -> list[str]:
    """What a result breaks of what must hold, in words."""
    found = harness.missed(
        result,
        zero=["wrong_bytes"],
        most={"demand_p50_ratio": WORST_RATIO},
        least={"demand_p50_ratio_without_urgency": LEAST_RATIO_WITHOUT},  # else the benchmark cannot see
    )
    for phase in result["phases"][1:]:
        bound = {"of_bandwidth": LEAST_OF_BANDWIDTH}
        found += [f"{phase['name']}: {what}" for what in harness.missed(phase, least=bound)]
    return found


def summary(phases: Sequence[Phase]) -> dict[str, Any]:
    """The result of the three phases."""
    idle, ordered, unordered = phases
    return {
        "demand_p50_ratio": round(ordered.demand_p50_ms / idle.demand_p50_ms, 3),
        "demand_p50_ratio_without_urgency": round(unordered.demand_p50_ms / idle.demand_p50_ms, 3),
        "demand_p95_ratio": round(ordered.demand_p95_ms / idle.demand_p95_ms, 3),
        "demand_p95_ratio_without_urgency": round(unordered.demand_p95_ms / idle.demand_p95_ms, 3),
        "wrong_bytes": sum(phase.wrong_bytes for phase in phases),
        "phases": [asdict(phase) for phase in phases],
    }


def draw(axes: Any, phases: Sequence[Phase]) -> None:
    """Of each phase, the waits in ascending order."""
    for phase, colour in zip(phases, ("#bbbbbb", "#4477aa", "#cc6677"), strict=True):
        shares = np.arange(1, len(phase.samples_ms) + 1) / len(phase.samples_ms)
        axes.step(sorted(phase.samples_ms), shares, where="post", color=colour, label=phase.name)
    axes.set_xscale("log")
    axes.set_xlabel("wait of a demand load, ms")
    axes.set_ylabel("share of the loads")
    axes.set_title("Waits of demand loads, with and without urgency")
    axes.legend()


@harness.benchmark(
    "urgency",
    __doc__,
    option("--loads", 20, "demand loads a phase"),
    option("--load-blocks", 256, "blocks of a demand load"),
    option("--block-bytes", 64 << 10, "bytes of a block", size),
    option("--prefetch-blocks", 512, "blocks of a prefetch"),
    option("--prefetches", 6, "prefetches under way at a time"),
    option("--cpu-bytes", None, "CPU tier (three times the prefetches under way)", size),
    option("--bandwidth", 100 << 20, "bytes a second", size),
    option("--latency-ms", 1.0, "of each call", float, metavar="MS"),
    option("--folder", None, "where to work (the temporary folder)", Path),
    harness.PLOT,
)
def main(options: harness.Options) -> harness.Outcome:
    """The phases, and what must hold of them."""
    plan = make_plan(options)
    with (
        tempfile.TemporaryDirectory(prefix="prefixd-urgency-", dir=options.folder) as folder,
        harness.progress("demand loads", 3 * options.loads) as step,
    ):
        phases = measure(plan, Path(folder), step)
    result = {"cpu_bytes": plan.cpu_bytes, **summary(phases)}
    columns = ("name", "demand_p50_ms", "demand_p95_ms", "prefetched_blocks", "written_blocks", "demoted_blocks")
    table = harness.Table(result["phases"], (*columns, "of_bandwidth"))
    return harness.Outcome(result, violations(result), [table], draw=lambda axes: draw(axes, phases))


if __name__ == "__main__":
    harness.run(main)
