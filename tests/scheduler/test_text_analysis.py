"""The direction of the paper's result (sections V.F and VII.A) in a small simulator.

Text analysis: many requests, each with one of 128 template prefixes. The GPU has room for 8 of them, the CPU
for 32 and the disk for 128. The least recently used goes first. Requests come faster than they are served.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest

from prefixd_scheduler import Distance, QueuedRequest, RequestQueue, create_policy

SERVICE_S = {Distance.GPU: 1.0, Distance.CPU: 1.2, Distance.DISK: 2.0, Distance.NONE: 4.0}
SWAPS_IN = (Distance.CPU, Distance.DISK)


class LruTiers:
    """Prefixes in three tiers. A use brings one straight to the GPU; what has no room goes one tier down."""

    def __init__(self, gpu: int, cpu: int, disk: int) -> None:
        self.capacity = {Distance.GPU: gpu, Distance.CPU: cpu, Distance.DISK: disk}
        self.tiers: dict[Distance, OrderedDict[int, None]] = {tier: OrderedDict() for tier in self.capacity}

    def distance(self, prefix: int) -> Distance:
        return next((tier for tier, held in self.tiers.items() if prefix in held), Distance.NONE)

    def use(self, prefix: int) -> None:
        for held in self.tiers.values():
            held.pop(prefix, None)
        falling: int | None = prefix
        for tier, held in self.tiers.items():
            if falling is None:
                return
            held[falling] = None
            falling = held.popitem(last=False)[0] if len(held) > self.capacity[tier] else None


@dataclass
class Outcome:
    """What one run of the workload cost."""

    served_from: dict[Distance, int] = field(default_factory=lambda: dict.fromkeys(Distance, 0))
    finished_s: float = 0.0
    longest_wait_s: float = 0.0

    @property
    def swaps(self) -> int:
        return sum(self.served_from[distance] for distance in SWAPS_IN)


def run(policy: str, seed: int, requests: int = 600, limit: int = 10_000) -> Outcome:
    """Serve `requests` one at a time. One comes every half second; a full queue makes it wait outside."""
    rng = random.Random(seed)
    arrivals: list[tuple[float, int]] = []
    arrival_s = 0.0
    for _ in range(requests):
        arrival_s += rng.expovariate(2.0)
        arrivals.append((arrival_s, rng.randrange(128)))
    tiers = LruTiers(gpu=8, cpu=32, disk=128)
    queue = RequestQueue(create_policy(policy), limit)
    outcome = Outcome()
    now_s = 0.0
    queued = 0
    while queued < requests or len(queue):
        if not len(queue):
            now_s = max(now_s, arrivals[queued][0])
        while queued < requests and arrivals[queued][0] <= now_s and len(queue) < limit:
            queue.push(QueuedRequest(queued, arrivals[queued][0], 100, prefix=arrivals[queued][1]))
            queued += 1
        for r in queue:
            queue.update(r.id, tiers.distance(arrivals[r.id][1]).weight, 0, r.prefix)
        first = queue.remove(queue.window(1, now_s)[0].id)
        distance = tiers.distance(arrivals[first.id][1])
        now_s += SERVICE_S[distance]
        tiers.use(arrivals[first.id][1])
        outcome.served_from[distance] += 1
        outcome.longest_wait_s = max(outcome.longest_wait_s, now_s - first.arrival_s)
    outcome.finished_s = now_s
    queue.check_integrity()
    return outcome


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fpf_avoids_more_swaps_than_relaxed_and_relaxed_more_than_fcfs(seed: int) -> None:
    fcfs, relaxed, fpf = (run(policy, seed) for policy in ("fcfs", "relaxed-fpf", "fpf"))
    assert sum(fcfs.served_from.values()) == sum(fpf.served_from.values()) == 600
    assert fpf.swaps < relaxed.swaps < fcfs.swaps / 4
    assert fpf.served_from[Distance.GPU] > relaxed.served_from[Distance.GPU] > fcfs.served_from[Distance.GPU]
    assert fpf.finished_s < relaxed.finished_s < fcfs.finished_s


def test_a_short_queue_leaves_fpf_less_to_choose_from() -> None:
    """Requests that FPF starves fill the places of a queue that is always full, and the gain shrinks."""
    fcfs, fpf = (run(policy, seed=1, limit=32) for policy in ("fcfs", "fpf"))
    assert run("fpf", seed=1).swaps * 4 < fpf.swaps < fcfs.swaps


def test_a_run_can_be_repeated() -> None:
    assert run("relaxed-fpf", seed=3, requests=300) == run("relaxed-fpf", seed=3, requests=300)
