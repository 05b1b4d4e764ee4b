"""Relaxed-FPF's bound on waiting, by simulation; and that FPF indeed has none."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from prefixd_scheduler import WEIGHT_CLASSES, QueuedRequest, RequestQueue, create_policy


def waits_with_a_crowd_on_the_gpu(policy: str, limit: int, services: int) -> float | None:
    """How long an uncached request waits while requests whose prefix is on the GPU take every free place.

    One request is handed over a second. None: it still waits after `services` seconds.
    """
    queue = RequestQueue(create_policy(policy), limit)
    now_s = 0.0
    for id in range(limit - 1):
        queue.push(QueuedRequest(id, now_s, 10, 10, 4.0))
    victim = QueuedRequest(limit - 1, now_s, 10)
    queue.push(victim)
    for id in range(limit, limit + services):
        now_s += 1.0
        first = queue.window(1, now_s)[0]
        queue.remove(first.id)
        if first is victim:
            return now_s
        queue.push(QueuedRequest(id, now_s, 10, 10, 4.0))
    return None


def test_fpf_starves() -> None:
    assert waits_with_a_crowd_on_the_gpu("fpf", limit=8, services=2000) is None


def test_relaxed_fpf_serves_it_within_the_bound_and_pays_for_throughput() -> None:
    limit = 32
    waited_s = waits_with_a_crowd_on_the_gpu("relaxed-fpf", limit, services=8 * limit)
    fcfs_s = waits_with_a_crowd_on_the_gpu("fcfs", limit, services=8 * limit)
    assert waited_s is not None and fcfs_s is not None
    assert fcfs_s == limit
    assert limit < waited_s <= 4 * limit


@given(
    limit=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
    near=st.floats(0.0, 1.0),
    pressure=st.integers(1, 4),
)
def test_no_wait_exceeds_four_queues_of_service(limit: int, seed: int, near: float, pressure: int) -> None:
    """With `limit` places and one handed over a second nobody waits longer than 4 * limit seconds."""
    rng = random.Random(seed)
    queue = RequestQueue(create_policy("relaxed-fpf"), limit)
    next_id = 0
    for tick in range(12 * limit):
        for moment in sorted(rng.random() for _ in range(pressure)):
            if len(queue) < limit:
                weight = 4.0 if rng.random() < near else rng.choice(WEIGHT_CLASSES)
                queue.push(QueuedRequest(next_id, tick + moment, 10, 0, weight))
                next_id += 1
        for waiting in queue:
            if rng.random() < 0.1:
                queue.update(waiting.id, rng.choice(WEIGHT_CLASSES), 0, None)
        now_s = tick + 1.0
        if len(queue):
            first = queue.window(1, now_s)[0]
            assert now_s - first.arrival_s <= 4 * limit
            queue.remove(first.id)
        assert all(now_s - r.arrival_s <= 4 * limit for r in queue)
