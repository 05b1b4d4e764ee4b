"""The engine process itself, with vLLM alone: what the other tests rest on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engines.vllm_engine import EngineFailed, EngineProcess, EngineRequest
from tests.vllm.served import NewRequests, StartEngine


@pytest.fixture(scope="module")
def engine(llama: Path) -> Iterator[EngineProcess]:
    """The last test kills it."""
    with EngineProcess(llama) as running:
        yield running


def test_same_tokens_alone_in_a_batch_cached_and_in_chunks(
    engine: EngineProcess, llama: Path, make_engine: StartEngine, new_requests: NewRequests
) -> None:
    requests = new_requests(700, 389, 512, 1000, 129)
    alone = [engine.generate([request])[0] for request in requests]
    cached = engine.generate(requests)
    assert engine.reset_prefix_cache()
    batch = engine.generate(requests)
    metrics = engine.metrics()
    with make_engine(llama, None, max_num_batched_tokens=96, enable_prefix_caching=False) as chunked_engine:
        chunked = chunked_engine.generate(requests)
    expected = [result.token_ids for result in alone]
    assert [result.token_ids for result in cached] == expected
    assert [result.token_ids for result in batch] == expected
    assert [result.token_ids for result in chunked] == expected
    assert len(set(expected)) == len(expected), "prompts that differ must not give the same tokens"
    assert not any(result.cached_tokens for result in batch)
    assert metrics.prefix_hits == sum(result.cached_tokens for result in cached) > 0
    assert metrics.external_queries == 0
    assert metrics.prompt_tokens_by_source["local_compute"] + metrics.prefix_hits == metrics.prompt_tokens


def test_an_engine_that_cannot_start_says_why(tmp_path: Path, make_engine: StartEngine) -> None:
    with pytest.raises(EngineFailed, match="no-model"), make_engine(tmp_path / "no-model", None):
        pass


def test_what_vllm_refuses_is_an_error_and_the_engine_goes_on(alone: EngineProcess) -> None:
    with pytest.raises(EngineFailed, match=r"refused.*maximum context length"):
        alone.generate([EngineRequest([5] * 5000, 4)])
    assert len(alone.generate([EngineRequest([5] * 100, 4)])[0].token_ids) == 4


def test_an_engine_that_dies_says_so_with_its_log(engine: EngineProcess) -> None:
    ids = engine.submit([EngineRequest([5] * 100, 3000)])
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="ended with status -9; it said:"):
        engine.collect(ids)
