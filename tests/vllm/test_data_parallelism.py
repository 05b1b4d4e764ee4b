"""A real vLLM with two replicas (`data_parallel_size` = 2): each loads what the other has saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.engines.vllm_engine import EngineRequest
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.vllm import data_parallel_child
from tests.vllm.forked import ForkedEngine
from tests.vllm.served import BLOCK_TOKENS, Expected, NewRequests, Tokens, always, cacheable, registered
from tests.waiting import wait_until

LENGTHS = (700, 389, 512)


class Replicas(ForkedEngine):
    """A vLLM with two replicas, each in a process of its own; the caller says which of them has a request."""

    def __init__(self, model: Path, daemon: DaemonProcess, log: Path) -> None:
        super().__init__(
            model, kv_transfer=always(daemon.address), data_parallel_size=2, log=log, loop=data_parallel_child.run
        )

    def ask(self, replica: int, requests: Sequence[EngineRequest]) -> tuple[Tokens, int]:
        """The tokens that the replica gives, and how many tokens of the prompts it did not compute."""
        rows = [{**asdict(request), "prompt": list(request.prompt)} for request in requests]
        results = self._command("generate", rank=replica, requests=rows)["results"]
        return [tuple(tokens) for tokens, _ in results], sum(cached for _, cached in results)

    def external_hits(self) -> dict[str, int]:
        """Prompt tokens that came from the connector by vLLM's own count, of each replica."""
        counts: dict[str, int] = self._command("count", counter="vllm:external_prefix_cache_hits")["counts"]
        return counts


@pytest.fixture
def replicas(llama: Path, daemon: DaemonProcess, tmp_path: Path) -> Iterator[Replicas]:
    with Replicas(llama, daemon, tmp_path / "engine.log") as running:
        yield running


def wait_until_saved(daemon: DaemonProcess, requests: Sequence[EngineRequest]) -> None:
    """Returns when the daemon has all full blocks of the prompts, in one namespace."""
    with Client(daemon.address) as client:
        (cache,) = registered(client)

        def saved(request: EngineRequest) -> bool:
            with cache.acquire(request.prompt, counted=False) as lease:
                return lease.blocks == len(request.prompt) // BLOCK_TOKENS

        wait_until(lambda: all(saved(request) for request in requests), "a prompt was not saved")


def test_each_replica_loads_what_the_other_has_saved(
    replicas: Replicas, daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    first, second = new_requests(*LENGTHS), new_requests(*LENGTHS)
    assert replicas.ask(0, first) == (expected(first), 0)
    assert replicas.ask(1, second) == (expected(second), 0)
    wait_until_saved(daemon, [*first, *second])
    assert replicas.ask(0, second) == (expected(second), cacheable(second))
    assert replicas.ask(1, first) == (expected(first), cacheable(first))
    assert replicas.external_hits() == {"0": cacheable(second), "1": cacheable(first)}
