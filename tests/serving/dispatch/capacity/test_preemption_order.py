"""Requests that give way in a GPU tier too small for them get the tokens of a run with room for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixd.server.figures.metrics import MetricsCollector
from prefixd.v1 import admin_pb2
from tests.daemons import Answer, Remote

pytestmark = pytest.mark.slow

FRAMES = 30


def ask_all(remote: Remote, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """All at once; every second one greedy."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [
            threads.submit(remote.generate, tokens, max_tokens=160, temperature=float(number % 2))
            for number, tokens in enumerate(prompts)
        ]
        return [answer.result() for answer in asked]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_who_gave_way_goes_on_with_the_same_tokens(
    launch: Callable[..., Remote],
    with_model: dict[str, str | int],
    model_daemon: Remote,
    prompt: Callable[..., list[int]],
    mode: str,
) -> None:
    """Six times 12 to 14 blocks, of which 2 or 3 are shared, for 30 frames."""
    remote = launch({**with_model, "gpu.bytes": FRAMES * 8192, "scheduler.preemption": mode})
    shared = prompt(40)
    prompts = [[*(shared if number < 3 else ()), *prompt(20 + 3 * number, number)] for number in range(6)]
    crowded = ask_all(remote, prompts)
    roomy = ask_all(model_daemon, prompts)
    assert [answer.tokens for answer in crowded] == [answer.tokens for answer in roomy]
    assert [len(answer.tokens) for answer in crowded] == [160] * 6
    figures = remote.stats().scheduler
    chosen, other = figures.swapped_requests, figures.recomputed_requests
    if mode == "recompute":
        chosen, other = other, chosen
    assert chosen == figures.preempted_requests > 0 and other == 0
    assert figures.resumed_requests == sum(answer.finished.resumed for answer in crowded)
    if mode == "swap":
        assert figures.swapped_blocks > 0
        assert figures.recomputed_tokens < 16 * figures.preempted_requests, "only what was in no full block"
    else:
        assert figures.swapped_blocks == 0
        assert figures.recomputed_tokens > 16 * figures.preempted_requests
    remote.settled()


def test_the_metrics_have_every_count() -> None:
    counts = {
        "preempted_requests": 7,
        "swapped_requests": 4,
        "recomputed_requests": 2,
        "swapped_blocks": 90,
        "recomputed_tokens": 333,
        "resumed_requests": 8,
    }
    stats = admin_pb2.StatsResponse(scheduler=admin_pb2.SchedulerStats(**counts))
    metrics = {metric.name: metric.samples[0].value for metric in MetricsCollector(stats).collect() if metric.samples}
    assert {name: metrics[f"prefixd_{name}"] for name in counts} == counts
