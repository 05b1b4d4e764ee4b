"""However an engine loses a prefix, it comes back from prefixd, and the tokens are those that vLLM alone computes."""

from __future__ import annotations

from collections.abc import Iterator
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
    alter,
    cacheable,
    run,
    tokens_of,
    wait_until_back,
)
from tests.waiting import wait_until

LENGTHS = (700, 389, 512, 1000, 129)


@pytest.fixture(scope="module")
def engine(llama: Path, daemon: DaemonProcess, make_engine: StartEngine) -> Iterator[EngineProcess]:
    with make_engine(llama, daemon) as running:
        yield running


def test_cold_then_warm(engine: EngineProcess, expected: Expected, new_requests: NewRequests) -> None:
    requests = new_requests(*LENGTHS)
    cold, no_hits = run(engine, requests)
    warm, hits = run(engine, requests)
    own, no_more = run(engine, requests, forget=False)
    assert cold == warm == own == expected(requests)
    assert no_hits == no_more == 0
    assert hits == cacheable(requests)
    assert b"so the version counts" not in engine.log.read_bytes(), "what the backend writes is seen"


def test_a_longer_prompt_loads_what_it_shares(
    engine: EngineProcess, expected: Expected, new_requests: NewRequests
) -> None:
    (first,) = new_requests(500)
    (more,) = new_requests(300)
    run(engine, [first])
    (answer,) = tokens_of(engine.generate([first]))
    turn = EngineRequest([*first.prompt, *answer, *more.prompt], 12)
    tokens, hits = run(engine, [turn])
    assert tokens == expected([turn])
    assert hits == cacheable([first])


def test_what_it_generates_is_cached_too(engine: EngineProcess, expected: Expected, new_requests: NewRequests) -> None:
    (asked,) = new_requests(100, max_tokens=200)
    (answer,), _ = run(engine, [asked])
    turn = EngineRequest([*asked.prompt, *answer, *asked.prompt], 12)
    tokens, hits = run(engine, [turn])
    assert tokens == expected([turn])
    assert hits == (100 + 199) // BLOCK_TOKENS * BLOCK_TOKENS, "the last token that was generated was never computed"


def test_salts_are_kept_apart(engine: EngineProcess, expected: Expected, new_requests: NewRequests) -> None:
    ours = new_requests(*LENGTHS, salt="ours")
    theirs = [EngineRequest(request.prompt, request.max_tokens, salt="theirs") for request in ours]
    unsalted = [EngineRequest(request.prompt, request.max_tokens) for request in ours]
    _, before = run(engine, ours)
    other, across = run(engine, theirs)
    bare, without = run(engine, unsalted)
    again, within = run(engine, ours)
    assert other == bare == again == expected(unsalted)
    assert (before, across, without) == (0, 0, 0)
    assert within == cacheable(ours)


def test_after_the_connectors_cache_was_reset_nothing_old_is_hit(
    engine: EngineProcess, expected: Expected, new_requests: NewRequests
) -> None:
    requests = new_requests(*LENGTHS)
    run(engine, requests)
    try:
        assert engine.reset_prefix_cache(connector=True)
        after, old = run(engine, requests)
        again, new = run(engine, requests)
    finally:
        engine.stop()
        engine.start()
    assert after == again == expected(requests)
    assert old == 0
    assert new == cacheable(requests)


def test_altered_bytes_change_the_output(
    engine: EngineProcess, daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    requests = new_requests(*LENGTHS)
    right, _ = run(engine, requests)
    with Client(daemon.address) as client:
        for request in requests:
            assert alter(client, request.prompt)
        wrong, hits = run(engine, requests)
    assert right == expected(requests)
    assert hits == cacheable(requests)
    assert all(one != other for one, other in zip(wrong, right, strict=True))


def test_after_the_engine_was_restarted(engine: EngineProcess, expected: Expected, new_requests: NewRequests) -> None:
    requests = new_requests(*LENGTHS)
    first, _ = run(engine, requests)
    engine.stop()
    engine.start()
    second, hits = run(engine, requests)
    assert first == second == expected(requests)
    assert hits == cacheable(requests)


def test_after_the_daemon_was_restarted_prefixes_come_from_disk(
    engine: EngineProcess, daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    requests, (other,) = new_requests(*LENGTHS), new_requests(200)
    first, _ = run(engine, [*requests, other])
    daemon.restart()
    # The engine finds out with its next request.
    wait_until(lambda: run(engine, [other])[1], "no hits after the daemon's return")
    wait_until_back(engine)
    before = engine.metrics().cached_by_source
    second, hits = run(engine, requests)
    assert first[:-1] == second == expected(requests)
    assert hits == cacheable(requests)
    if before:  # vLLM says so from 0.32 on
        assert engine.metrics().cached_by_source["disk"] - before["disk"] == hits


def test_two_engines_share_one_daemon_at_once(
    llama: Path,
    daemon: DaemonProcess,
    engine: EngineProcess,
    make_engine: StartEngine,
    expected: Expected,
    new_requests: NewRequests,
) -> None:
    """One loads while others are computed, the other layer by layer."""
    ours, theirs, both = new_requests(*LENGTHS), new_requests(*LENGTHS), new_requests(*LENGTHS)
    with make_engine(llama, daemon, {"load": "layerwise"}) as other:
        assert engine.reset_prefix_cache()
        ids = engine.submit([*ours, *both])
        other_ids = other.submit([*both, *theirs])
        first, second = tokens_of(engine.collect(ids)), tokens_of(other.collect(other_ids))
        engine.wait_until_idle()
        other.wait_until_idle()
        crossed, hits = run(engine, theirs)
        crossed_too, other_hits = run(other, ours)
    assert first == [*expected(ours), *expected(both)]
    assert second == [*expected(both), *expected(theirs)]
    assert crossed == expected(theirs)
    assert crossed_too == expected(ours)
    assert hits == cacheable(theirs)
    assert other_hits == cacheable(ours)


def test_an_engine_with_another_block_size_has_blocks_of_its_own(
    llama: Path, daemon: DaemonProcess, engine: EngineProcess, make_engine: StartEngine, new_requests: NewRequests
) -> None:
    requests = new_requests(700)
    ours, _ = run(engine, requests)
    with make_engine(llama, daemon, {"block_tokens": 128}) as coarse:
        theirs, none = run(coarse, requests)
        again, hits = run(coarse, requests)
    assert ours == theirs == again
    assert (none, hits) == (0, 640)
