"""prefixd below vLLM's own offloading: the same promises as the connector's. vLLM's copies are made without a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest
from benchmarks.storage.bit_flips import StoredBlocks
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.vllm.served import (
    DAEMON,
    PATIENCE_S,
    VLLM_BLOCK_TOKENS,
    Expected,
    NewRequests,
    StartEngine,
    run,
    tokens_of,
)
from tests.waiting import wait_until

LENGTHS = (700, 389, 512, 1000, 129)
SMALL_POOL = 40 * (64 << 10)  # 1,280 tokens of `llama`: less than half of what LENGTHS have

pytestmark = pytest.mark.timeout(900)

MakeTiered = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def make_tiered(make_engine: StartEngine) -> Iterator[MakeTiered]:
    """`make_tiered(model, address, host pool's bytes, the connector's options, **arguments)`: an engine with vLLM's
    offloading and prefixd below it, not yet started."""
    name = f"prefixd-tier-{uuid4().hex}"
    made = 0

    def make(
        model: Path, address: str, pool_bytes: int = 64 << 20, *, extra: dict[str, Any] | None = None, **arguments: Any
    ) -> EngineProcess:
        nonlocal made
        made += 1
        tier = {
            "type": "PrefixdTier",
            "module_path": "prefixd.integrations.vllm.offloading",
            "address": address,
            "timeout_s": PATIENCE_S,  # a slow machine must not decide what is found
        }
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": f"{name}-{made}",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tests.vllm.cpu_offloading",
                "cpu_bytes_to_use": pool_bytes,
                "secondary_tiers": [tier],
                **(extra or {}),
            },
        }
        return make_engine(model, None, kv_transfer=transfer, **arguments)

    yield make
    for left in Path("/dev/shm").glob(f"vllm_offload_{name}-*"):  # of engines that were killed
        left.unlink()


@pytest.fixture(scope="module")
def engine(llama: Path, daemon: DaemonProcess, make_tiered: MakeTiered) -> Iterator[EngineProcess]:
    """With a host pool that holds less than half of a test's requests."""
    with make_tiered(llama, daemon.address, SMALL_POOL) as running:
        yield running


@pytest.fixture(autouse=True)
def daemon_runs(daemon: DaemonProcess) -> Iterator[None]:
    yield
    if not daemon.alive:
        daemon.kill()
        daemon.start()


def loadable(requests: Sequence[EngineRequest], chunk_tokens: int = VLLM_BLOCK_TOKENS) -> int:
    """Prompt tokens in full chunks, which vLLM counts though it computes the last token of a prompt again."""
    return sum(len(request.prompt) // chunk_tokens * chunk_tokens for request in requests)


def from_prefixd(engine: EngineProcess) -> int:
    """Chunks that vLLM has found in prefixd since the engine's start, by its own count."""
    samples = engine.metrics().samples
    return int(
        sum(
            value
            for name, value in samples.items()
            if name.startswith("vllm:kv_offload_tiering_chunk_hits") and "PrefixdTier" in name
        )
    )


def accounts(daemon: DaemonProcess) -> list[str]:
    """What does not add up at the daemon."""
    with Client(daemon.address) as client:
        wait_until(lambda: not client.stats().leases and not client.stats().reservations, "something is still held")
        return list(client.check_integrity().violations)


@pytest.mark.parametrize("ranks", [1, 2])
def test_hits_after_restarts(
    ranks: int,
    llama: Path,
    daemon: DaemonProcess,
    make_tiered: MakeTiered,
    expected: Expected,
    new_requests: NewRequests,
) -> None:
    """Of the engine, then of the daemon too. The second engine of one rank imports everything anew, with another hash
    seed."""
    requests = [*new_requests(*LENGTHS), *new_requests(300, salt="of a tenant")]
    answers = expected(requests)
    with make_tiered(llama, daemon.address, tensor_parallel_size=ranks) as first:
        assert run(first, requests) == (answers, 0)
    with make_tiered(llama, daemon.address, tensor_parallel_size=ranks, forked=ranks > 1) as second:
        assert run(second, requests) == (answers, loadable(requests))
        assert from_prefixd(second) * VLLM_BLOCK_TOKENS == loadable(requests)
        second.stop()
        daemon.restart()
        second.start()
        assert run(second, requests) == (answers, loadable(requests))
    assert accounts(daemon) == []


def test_chunks_of_several_blocks(
    llama: Path, daemon: DaemonProcess, make_tiered: MakeTiered, expected: Expected, new_requests: NewRequests
) -> None:
    requests = new_requests(*LENGTHS)
    answers = expected(requests)
    with make_tiered(llama, daemon.address, extra={"blocks_per_chunk": 4}) as engine:
        assert run(engine, requests) == (answers, 0)
        engine.stop()
        engine.start()
        assert run(engine, requests) == (answers, loadable(requests, 4 * VLLM_BLOCK_TOKENS))


def test_a_hybrid_model(
    gemma3: Path,
    daemon: DaemonProcess,
    make_tiered: MakeTiered,
    gemma3_expected: Expected,
    new_requests: NewRequests,
) -> None:
    requests = new_requests(*LENGTHS)
    answers = gemma3_expected(requests)
    with make_tiered(gemma3, daemon.address) as engine:
        assert run(engine, requests)[0] == answers
        engine.stop()
        engine.start()
        tokens, hits = run(engine, requests)
    assert tokens == answers
    assert hits > loadable(requests) // 2


def test_a_host_pool_that_is_too_small(
    engine: EngineProcess, daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    sets = [new_requests(*LENGTHS) for _ in range(3)]
    answers = [expected(requests) for requests in sets]
    before = from_prefixd(engine)
    for _ in range(2):
        for requests, right in zip(sets, answers, strict=True):
            assert run(engine, requests)[0] == right
    assert from_prefixd(engine) > before
    mixed = [request for requests in sets for request in requests]
    assert run(engine, mixed)[0] == [tokens for right in answers for tokens in right]
    assert accounts(daemon) == []


def test_damage_on_disk_is_never_served(
    llama: Path, make_tiered: MakeTiered, expected: Expected, new_requests: NewRequests, tmp_path_factory: Any
) -> None:
    requests = new_requests(*LENGTHS)
    answers = expected(requests)
    rng = random.Random("flips")
    with DaemonProcess(DAEMON) as daemon, make_tiered(llama, daemon.address) as engine:
        assert run(engine, requests)[0] == answers
        engine.stop()
        with Client(daemon.address) as client:
            client.flush()
        daemon.stop()
        stored = StoredBlocks(next(daemon.directory.rglob("slabs")).parent, 512 << 20)
        blocks = sorted(stored.blocks.values(), key=lambda block: block.key)
        for block in rng.sample(blocks, 6):
            (place,) = block.places
            with place.file.open("r+b") as opened:
                opened.seek(place.offset + rng.randrange(place.nbytes))
                byte = opened.read(1)[0]
                opened.seek(-1, 1)
                opened.write(bytes([byte ^ 1 << rng.randrange(8)]))
        daemon.start()
        engine.start()
        tokens, hits = run(engine, requests)
        assert tokens == answers
        assert 0 < hits < loadable(requests)
        assert accounts(daemon) == []


def test_daemon_away_at_the_start_and_killed_while_requests_run(
    llama: Path, make_tiered: MakeTiered, expected: Expected, new_requests: NewRequests
) -> None:
    known, new = new_requests(*LENGTHS), new_requests(*LENGTHS, max_tokens=40)
    answers = expected([*known, *new])
    with DaemonProcess(DAEMON) as daemon:
        daemon.kill()
        with make_tiered(llama, daemon.address, SMALL_POOL) as engine:
            assert run(engine, known)[0] == answers[: len(known)]
            daemon.start()

            def hit() -> int:
                assert run(engine, known)[0] == answers[: len(known)]
                return from_prefixd(engine)

            wait_until(hit, "no hits after the daemon's start")
            assert engine.reset_prefix_cache()
            ids = engine.submit([*known, *new])
            daemon.kill()
            assert tokens_of(engine.collect(ids, PATIENCE_S)) == answers
            engine.wait_until_idle()
            before = from_prefixd(engine)
            daemon.start()
            wait_until(lambda: hit() > before, "no hits after the daemon's return")
            assert accounts(daemon) == []
            log = engine.log.read_text()
    assert "prefixd is away" in log and "Traceback" not in log


def test_engine_killed_while_requests_run(
    llama: Path, daemon: DaemonProcess, make_tiered: MakeTiered, expected: Expected, new_requests: NewRequests
) -> None:
    requests = new_requests(*LENGTHS)
    answers = expected(requests)
    with make_tiered(llama, daemon.address, SMALL_POOL) as engine:
        for _ in range(2):
            engine.submit(requests)
            with Client(daemon.address) as client:
                wait_until(lambda: client.stats().reservations or client.stats().leases, "nothing is copied", 10)
            engine.kill()
            assert accounts(daemon) == []
            engine.start()
        assert run(engine, requests)[0] == answers


def test_a_reset_makes_the_chunks_this_engines_own(
    engine: EngineProcess, expected: Expected, new_requests: NewRequests
) -> None:
    """As after new weights: nothing that was computed before is found again, by nobody."""
    requests = new_requests(*LENGTHS)
    answers = expected(requests)
    assert run(engine, requests)[0] == answers
    assert engine.reset_prefix_cache(connector=True)
    before = from_prefixd(engine)
    assert run(engine, requests) == (answers, 0)
    assert from_prefixd(engine) == before
    # All that the first run stored may still lie in the host pool; what the second one stores takes its place there.
    for _ in range(2):
        assert run(engine, requests)[0] == answers
    assert from_prefixd(engine) > before
