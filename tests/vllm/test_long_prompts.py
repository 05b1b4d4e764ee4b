"""Prompts longer than the daemon's memory: all of what is cached is loaded, in slices, and only that is counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.vllm.served import (
    BLOCK_TOKENS,
    Expected,
    NewRequests,
    StartEngine,
    cacheable,
    registered,
    run,
    tokens_of,
)
from tests.waiting import wait_until

TIER = 8  # blocks
PROMPT_TOKENS = 17 * BLOCK_TOKENS + 10
LLAMA_BLOCK = BLOCK_TOKENS * 2048
GEMMA_BLOCK = 6 * BLOCK_TOKENS * 1024


@pytest.fixture(scope="module")
def small_daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess({"cpu.bytes": TIER * LLAMA_BLOCK, "disk.bytes": "512MiB"}) as running:
        yield running


@pytest.fixture(scope="module")
def engine(llama: Path, small_daemon: DaemonProcess, make_engine: StartEngine) -> Iterator[EngineProcess]:
    with make_engine(llama, small_daemon) as running:
        yield running


def save_all(engine: EngineProcess, daemon: DaemonProcess, requests: Sequence[EngineRequest]) -> None:
    """Runs requests until the daemon has all their blocks; what has no room at the moment is saved the next time."""

    def saved() -> bool:
        for request in requests:
            run(engine, [request])
        with Client(daemon.address) as client:
            (cache,) = registered(client)
            return all(
                cache.match(request.prompt).blocks == len(request.prompt) // BLOCK_TOKENS for request in requests
            )

    wait_until(saved, "the prompts are not cached")


def counted(daemon: DaemonProcess) -> tuple[int, int]:
    with Client(daemon.address) as client:
        stats = client.stats()
    return stats.asked_tokens, stats.hit_tokens


def test_a_prompt_longer_than_the_tier_is_loaded_whole(
    engine: EngineProcess, small_daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    loaded_whole(engine, small_daemon, expected, new_requests(PROMPT_TOKENS))


def test_a_prompt_longer_than_the_tier_is_loaded_whole_layer_by_layer(
    llama: Path, small_daemon: DaemonProcess, make_engine: StartEngine, expected: Expected, new_requests: NewRequests
) -> None:
    with make_engine(llama, small_daemon, {"load": "layerwise"}) as layerwise:
        loaded_whole(layerwise, small_daemon, expected, new_requests(PROMPT_TOKENS))


def loaded_whole(
    engine: EngineProcess, daemon: DaemonProcess, expected: Expected, requests: Sequence[EngineRequest]
) -> None:
    save_all(engine, daemon, requests)
    before = counted(daemon)
    warm, hits = run(engine, requests)
    after = counted(daemon)
    assert warm == expected(requests)
    assert hits == cacheable(requests)
    asked, found = (later - earlier for later, earlier in zip(after, before, strict=True))
    assert asked == PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    assert found == hits, "what is said to be found was loaded"


def test_long_prompts_get_on_beside_each_other(
    engine: EngineProcess, small_daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    requests = new_requests(*[PROMPT_TOKENS] * 4)
    save_all(engine, small_daemon, requests)
    warm, hits = run(engine, requests)
    assert warm == expected(requests)
    assert hits == cacheable(requests)


def test_with_windows_a_prompt_longer_than_the_tier_is_loaded_whole(
    gemma3: Path, make_engine: StartEngine, gemma3_expected: Expected, new_requests: NewRequests
) -> None:
    requests = new_requests(PROMPT_TOKENS)
    settings = {"cpu.bytes": TIER * GEMMA_BLOCK, "disk.bytes": "512MiB"}
    with DaemonProcess(settings) as daemon, make_engine(gemma3, daemon) as engine:
        save_all(engine, daemon, requests)
        warm, hits = run(engine, requests)
    assert warm == gemma3_expected(requests)
    assert hits == cacheable(requests, windows=True)


def test_beside_a_lease_a_long_prompt_is_loaded_whole(
    engine: EngineProcess, small_daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    requests, others = new_requests(PROMPT_TOKENS), new_requests(5 * BLOCK_TOKENS + 10)
    save_all(engine, small_daemon, [*requests, *others])
    with Client(small_daemon.address) as client:
        (cache,) = registered(client)
        with cache.acquire(others[0].prompt) as lease:
            assert lease.blocks == 5
            assert engine.reset_prefix_cache()
            before = engine.metrics().external_hits
            warm = tokens_of(engine.generate(requests))
            hits = engine.metrics().external_hits - before
    assert warm == expected(requests)
    assert hits == cacheable(requests)
