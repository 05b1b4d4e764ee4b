"""Gemma 3, whose layers see 128 tokens back, or all: window bytes that no prefix needs are dropped or never saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, SlidingWindow
from tests.vllm.served import BLOCK_TOKENS, Expected, NewRequests, StartEngine, cacheable, registered, run

PROMPT_TOKENS = 1000
PROMPTS = 4
BLOCK_BYTES = 6 * BLOCK_TOKENS * 1024  # six layers, 2 KV heads of 64, keys and values in float32
# All groups of the prompts' 60 blocks need 22.5 MiB. With their windows, 2 blocks each, 10.5 MiB are needed.
CPU_BYTES = PROMPTS * (PROMPT_TOKENS // BLOCK_TOKENS) * BLOCK_BYTES * 2 // 3


def matched(address: str, tokens: Sequence[int]) -> int:
    """Blocks of a prefix that the daemon has for Gemma."""
    with Client(address) as client:
        (cache,) = registered(client)
        return cache.match(tokens).blocks


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess({"cpu.bytes": "64MiB", "disk.bytes": 0}) as running:
        yield running


@pytest.fixture(scope="module")
def engine(gemma3: Path, daemon: DaemonProcess, make_engine: StartEngine) -> Iterator[EngineProcess]:
    with make_engine(gemma3, daemon) as running:
        yield running


def test_what_windows_need_is_saved_and_loaded(
    engine: EngineProcess, daemon: DaemonProcess, gemma3_expected: Expected, new_requests: NewRequests
) -> None:
    requests = new_requests(700, 389, 512, 1000, 129)
    cold, none = run(engine, requests)
    warm, hits = run(engine, requests)
    with Client(daemon.address) as client:
        (cache,) = registered(client)
    assert cold == warm == gemma3_expected(requests)
    assert none == 0
    assert hits == cacheable(requests, windows=True)
    assert [part.rule for part in cache.spec.parts] == [SlidingWindow(128), SlidingWindow(128), None]


def test_window_bytes_are_dropped_and_tokens_are_equal(
    gemma3: Path, make_engine: StartEngine, gemma3_expected: Expected, new_requests: NewRequests
) -> None:
    requests = new_requests(*[PROMPT_TOKENS] * PROMPTS)
    branches = [
        EngineRequest([*request.prompt[:500], *other.prompt], 12)
        for request, other in zip(requests, new_requests(*[200] * PROMPTS), strict=True)
    ]
    every = {"resume_every": 1}
    with (
        DaemonProcess({"cpu.bytes": CPU_BYTES, "disk.bytes": 0}) as daemon,
        make_engine(gemma3, daemon, every) as engine,
    ):
        cold, none = run(engine, requests)
        whole = [matched(daemon.address, request.prompt) for request in requests]
        half = [matched(daemon.address, request.prompt[:512]) for request in requests]
        warm, hits = run(engine, requests)
        branched, _ = run(engine, branches)
        again, shared = run(engine, branches)
    assert cold == warm == gemma3_expected(requests)
    assert none == 0 and hits == cacheable(requests, windows=True)
    assert whole == [PROMPT_TOKENS // BLOCK_TOKENS] * PROMPTS
    assert min(half) < 512 // BLOCK_TOKENS, "window bytes in the middle of the prompts were dropped"
    assert branched == again == gemma3_expected(branches)
    assert 0 < shared <= cacheable(branches, windows=True)


def test_a_prefix_that_only_vllm_has_is_saved_without_what_its_windows_have_passed(
    engine: EngineProcess, daemon: DaemonProcess, gemma3_expected: Expected, new_requests: NewRequests
) -> None:
    (request,) = new_requests(640)
    (more,) = new_requests(300)
    longer = EngineRequest([*request.prompt, *more.prompt], 12)
    run(engine, [request])
    with Client(daemon.address) as client:
        client.evict(all=True)
    assert matched(daemon.address, longer.prompt) == 0
    grown, none = run(engine, [longer], forget=False)
    assert matched(daemon.address, request.prompt[:320]) == 0, "its window bytes were saved though vLLM had let go"
    warm, hits = run(engine, [longer])
    assert none == 0 and hits == cacheable([longer], windows=True)
    assert grown == warm == gemma3_expected([longer])
