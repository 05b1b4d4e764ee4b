"""A GPU tier that is too small for what runs: preemption, extension and eviction, and the same answers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefixd.v1 import admin_pb2
from tests.daemons import Remote

pytestmark = pytest.mark.slow

FRAMES = 24


@pytest.fixture(scope="module")
def remote(launch: Callable[..., Remote], with_model: dict[str, str | int]) -> Remote:
    return launch({**with_model, "gpu.bytes": FRAMES * 8192, "cpu.bytes": "256KiB", "scheduler.queue_limit": 10})


@pytest.fixture(autouse=True)
def adds_up(remote: Remote) -> Iterator[None]:
    yield
    stats = remote.settled()
    for tier in stats.tiers:
        assert tier.used_bytes <= tier.capacity_bytes


def test_long_outputs_preempt_each_other_and_stay_right(
    remote: Remote, model_daemon: Remote, prompt: Callable[..., list[int]]
) -> None:
    """Six times 40 + 200 tokens are 90 blocks for 24 frames."""
    prompts = [[*prompt(32), *prompt(8 + 3 * variant, variant)] for variant in range(1, 7)]
    before = remote.stats().scheduler
    crowded = remote.generate_all(prompts, max_tokens=200)
    after = remote.stats()
    assert after.scheduler.preempted_requests > before.preempted_requests
    assert after.scheduler.resumed_requests - before.resumed_requests == sum(a.finished.resumed for a in crowded)
    assert [len(answer.tokens) for answer in crowded] == [200] * 6
    roomy = [model_daemon.generate(tokens, max_tokens=200).tokens for tokens in prompts]
    assert [answer.tokens for answer in crowded] == roomy
    gpu = remote.tier(1)
    assert gpu.evicted_blocks > 0
    assert gpu.capacity_bytes == FRAMES * 8192


def test_sequences_preempt_each_other_and_stay_right(
    remote: Remote, model_daemon: Remote, prompt: Callable[..., list[int]]
) -> None:
    """Five times 150 tokens behind one prompt of 2 blocks are 50 blocks for 24 frames."""
    tokens = prompt(40)
    before = remote.stats().scheduler.preempted_requests
    options: dict[str, Any] = {"n": 5, "max_tokens": 150, "frequency_penalty": 0.3, "logprobs": 1}
    crowded, roomy = remote.sequences(tokens, **options), model_daemon.sequences(tokens, **options)
    assert remote.stats().scheduler.preempted_requests > before
    assert [answer.tokens for answer in crowded] == [answer.tokens for answer in roomy]
    assert [answer.text for answer in crowded] == [answer.text for answer in roomy]
    assert all(len(answer.logprobs) == 150 for answer in crowded)
    assert crowded[0].finished.resumed > 0


def test_every_sequence_takes_a_place_in_the_queue(
    remote: Remote, prompt: Callable[..., list[int]], refused: Callable[..., Any]
) -> None:
    with refused("RESOURCE_EXHAUSTED", "the queue is full", "11 sequences"):
        remote.sequences(prompt(20), n=11)
    assert len(remote.sequences(prompt(20), n=10, max_tokens=2)) == 10


def test_prefixes_go_down_and_come_up_again(
    remote: Remote, model_daemon: Remote, prompt: Callable[..., list[int]]
) -> None:
    """Ten prompts of 12 blocks in 24 frames and 32 slots, round after round: every tier takes part."""
    prompts = [prompt(200, variant) for variant in range(10)]
    right = [model_daemon.generate(tokens, max_tokens=4).tokens for tokens in prompts]
    hits = [0, 0, 0]
    for _ in range(3):
        for tokens, expected in zip(prompts, right, strict=True):
            answer = remote.generate(tokens, max_tokens=4)
            assert answer.tokens == expected
            hits = [have + new for have, new in zip(hits, answer.hits, strict=True)]
    # Three at once from all ends of the tiers.
    for first in range(0, 9, 3):
        answers = remote.generate_all(prompts[first : first + 3], max_tokens=4)
        assert [answer.tokens for answer in answers] == right[first : first + 3]
    assert hits[1] + hits[2] > 0
    assert remote.tier(1).promoted_blocks > 0
    assert remote.tier(1).demoted_blocks + remote.tier(3).blocks > 0


def test_a_prompt_that_never_fits_is_refused(
    remote: Remote, prompt: Callable[..., list[int]], refused: Callable[..., Any]
) -> None:
    most = FRAMES * 16
    for length, max_tokens in ((most + 1, 1), (most - 10, 20), (500, 1), (17, most)):
        with refused("RESOURCE_EXHAUSTED", f"{length + max_tokens} tokens", str(FRAMES * 8192), "gpu.bytes"):
            remote.generate(prompt(length), max_tokens=max_tokens)
    assert len(remote.generate(prompt(most - 8), max_tokens=8).tokens) == 8


def test_two_that_write_the_same_answer_do_not_starve_each_other(
    remote: Remote, model_daemon: Remote, prompt: Callable[..., list[int]]
) -> None:
    """Each computes blocks that the other has recorded: alone, the last one would not get through with both copies."""
    tokens = prompt(8)
    answers = remote.generate_all([tokens] * 3, max_tokens=350)
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    assert answers[0].tokens == model_daemon.generate(tokens, max_tokens=350).tokens


def test_a_full_queue_refuses(remote: Remote, prompt: Callable[..., list[int]], refused: Callable[..., Any]) -> None:
    worker = remote.until(lambda stats: stats.worker.state == admin_pb2.WorkerStats.STATE_READY).worker.pid
    os.kill(worker, signal.SIGSTOP)
    try:
        streams = []
        for variant in range(11):  # no two of them fit the tier side by side
            streams.append(remote.begin(prompt(300, variant), max_tokens=60))
            next(streams[-1])
            remote.until(lambda stats: stats.worker.running_requests == 1)
        assert remote.stats().scheduler.waiting_requests == 10
        with refused("RESOURCE_EXHAUSTED", "10"):
            remote.generate(prompt(20, 11))
        streams[-1].cancel()
        remote.until(lambda stats: stats.scheduler.waiting_requests == 9)
        streams[-1] = remote.begin(prompt(20, 11), max_tokens=60)
        next(streams[-1])
        for stream in streams[1:-1]:
            stream.cancel()
    finally:
        os.kill(worker, signal.SIGCONT)
    assert [list(stream)[-1].finished.output_tokens for stream in (streams[0], streams[-1])] == [60, 60]
