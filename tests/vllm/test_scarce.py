"""Engines that are short of something: of KV blocks, so that they evict and preempt, and of tokens a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest
from prefixd.cli.demo.daemon_process import DaemonProcess
from tests.vllm.served import BLOCK_TOKENS, Expected, NewRequests, StartEngine, cacheable, run


@pytest.fixture(scope="module")
def short_of_blocks(llama: Path, daemon: DaemonProcess, make_engine: StartEngine) -> Iterator[EngineProcess]:
    """Room for 1,280 tokens."""
    with make_engine(llama, daemon, num_gpu_blocks_override=40, max_model_len=1024) as engine:
        yield engine


def test_what_vllm_evicts_comes_back(
    short_of_blocks: EngineProcess, expected: Expected, new_requests: NewRequests
) -> None:
    requests = new_requests(600, 800, 700, 500, 900)
    first, _ = run(short_of_blocks, requests)
    second, hits = run(short_of_blocks, requests, forget=False)
    assert first == second == expected(requests)
    assert hits > 0.8 * cacheable(requests), "vLLM itself can only have kept some of the last prompt's blocks"


def test_preempted_requests_go_on_with_the_same_tokens(
    short_of_blocks: EngineProcess, expected: Expected, new_requests: NewRequests
) -> None:
    requests = new_requests(160, 170, 180, 190, 200, 210, max_tokens=200)
    answers = expected(requests)
    before = short_of_blocks.metrics().preemptions
    first, _ = run(short_of_blocks, requests)
    between = short_of_blocks.metrics().preemptions
    second, hits = run(short_of_blocks, requests)
    assert before < between < short_of_blocks.metrics().preemptions, "nothing was preempted"
    assert first == second == answers
    assert hits >= cacheable(requests)


def test_prompts_computed_in_chunks(
    llama: Path, daemon: DaemonProcess, make_engine: StartEngine, expected: Expected, new_requests: NewRequests
) -> None:
    requests = new_requests(700, 389, 512, 1000, 129)
    longer = [
        EngineRequest([*one.prompt, *more.prompt], 12)
        for one, more in zip(requests, new_requests(*[300] * 5), strict=True)
    ]
    with make_engine(llama, daemon, max_num_batched_tokens=96) as engine:
        cold, none = run(engine, requests)
        warm, hits = run(engine, requests)
        grown, shared = run(engine, longer)
    assert cold == warm == expected(requests)
    assert grown == expected(longer)
    assert none == 0
    assert hits == cacheable(requests)
    assert shared == sum(len(one.prompt) // BLOCK_TOKENS * BLOCK_TOKENS for one in requests)
