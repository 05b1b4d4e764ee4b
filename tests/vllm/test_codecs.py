"""Blocks that the daemon's disk keeps in fewer bytes: the tokens that vLLM computes with them, and without prefixd.

vLLM's attention on a CPU packs its pages, so no codec alters them. `plain` engines have pages as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.vllm.served import (
    Expected,
    NewRequests,
    StartEngine,
    Tokens,
    always,
    cacheable,
    make_prompt,
    run,
    wait_until_back,
)
from tests.waiting import wait_until

LENGTHS = (700, 389, 512, 1000, 129)
DAEMON = {"cpu.bytes": "4MiB", "disk.bytes": "512MiB"}  # memory holds less than the requests of a test


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(DAEMON) as running:
        yield running


@pytest.fixture(scope="module")
def packed(llama: Path, daemon: DaemonProcess, make_engine: StartEngine) -> Iterator[EngineProcess]:
    with make_engine(llama, daemon) as running:
        yield running


@pytest.fixture(scope="module")
def plain(llama: Path, daemon: DaemonProcess, make_engine: StartEngine) -> Iterator[EngineProcess]:
    transfer = {**always(daemon.address), "kv_connector_module_path": "benchmarks.engines.vllm_plain_pages"}
    with make_engine(llama, None, kv_transfer=transfer) as running:
        yield running


def begin_anew(daemon: DaemonProcess, engine: EngineProcess, probe: EngineRequest, codec: str) -> None:
    """Starts the daemon with this codec and without blocks."""
    daemon.configure({"disk.codec": codec})
    daemon.replace()
    wait_until(lambda: run(engine, [probe])[1], "no hits from the new daemon")
    wait_until_back(engine)


def from_disk(
    daemon: DaemonProcess, engine: EngineProcess, requests: list[EngineRequest], probe: EngineRequest
) -> Tokens:
    """The tokens of requests whose prefixes are loaded from the disk by a daemon that is started again."""
    with Client(daemon.address) as client:
        client.flush()
    daemon.restart()
    wait_until(lambda: run(engine, [probe])[1], "no hits after the daemon's return")
    wait_until_back(engine)
    tokens, hits = run(engine, requests)
    assert hits == cacheable(requests)
    return tokens


def stored(daemon: DaemonProcess) -> Any:
    with Client(daemon.address) as client:
        assert not client.check_integrity().violations
        return client.stats().stored


@pytest.mark.parametrize("codec", ["lossless", "int8"])
def test_packed_pages_are_never_altered(
    codec: str, packed: EngineProcess, daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    requests, (probe,) = new_requests(*LENGTHS), new_requests(200)
    begin_anew(daemon, packed, probe, codec)
    cold, _ = run(packed, requests)
    assert cold == from_disk(daemon, packed, requests, probe) == expected(requests)
    on_disk = stored(daemon)
    assert on_disk.blocks["coded"] and not on_disk.blocks["altered"] and not on_disk.altered_blocks
    assert on_disk.stored_bytes < on_disk.exact_bytes
    assert on_disk.decoded_bytes


def test_plain_pages_without_loss(
    plain: EngineProcess, daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    requests, (probe,) = new_requests(*LENGTHS), new_requests(200)
    begin_anew(daemon, plain, probe, "lossless")
    cold, _ = run(plain, requests)
    assert cold == from_disk(daemon, plain, requests, probe) == expected(requests)
    on_disk = stored(daemon)
    assert on_disk.blocks["coded"] and not on_disk.blocks["altered"]


def test_plain_pages_with_less_precision(
    plain: EngineProcess, daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    requests = [EngineRequest(make_prompt(number, length), 12) for number, length in enumerate(LENGTHS)]
    (probe,) = new_requests(200)
    begin_anew(daemon, plain, probe, "int8")
    exact, _ = run(plain, requests)
    assert exact == expected(requests)
    altered = from_disk(daemon, plain, requests, probe)
    on_disk = stored(daemon)
    assert on_disk.blocks["altered"] == sum(on_disk.blocks.values())
    assert on_disk.stored_bytes < 0.27 * on_disk.exact_bytes, "float32 in 8 bits"
    assert 0 < on_disk.rms_error[0].value < 0.03
    same = [one == other for one, other in zip(altered, exact, strict=True)]
    assert sum(same) >= 3, "most requests get the tokens that exact blocks give"
    assert from_disk(daemon, plain, requests, probe) == altered, "blocks are altered once"
