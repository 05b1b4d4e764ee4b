"""Parallelism in a real vLLM: what is refused when it starts; and latents, of which all ranks have the same bytes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.vllm_engine import EngineFailed, EngineRequest
from benchmarks.engines.vllm_engine_child import EngineLoop
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from prefixd.v1.cache_pb2 import TIER_CPU
from tests.vllm.served import (
    BLOCK_TOKENS,
    DAEMON,
    Expected,
    NewRequests,
    StartEngine,
    Tokens,
    cacheable,
    run,
    tokens_of,
)
from tests.vllm.tiny_models import save_mla

LENGTHS = (700, 389, 520, 1000, 129)  # no multiples of vLLM's block size, which is 16 for latents on a CPU
LATENT_BYTES = 2 * (512 + 64) * 4
"""KV of a token of the model: in each of two layers a latent vector and a key with its position, in float32."""
NATIVE_ROTARY = {"custom_ops": ["-rotary_embedding"]}
"""vLLM 0.32's kernel for CPUs reads (tokens, heads, size) as one head: its tokens are wrong, and not the same for a
prompt in one step and in two."""


@pytest.fixture(scope="module")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mla(tmp_path_factory.mktemp("mla"))


@pytest.fixture(scope="module")
def mla_expected(mla: Path, make_engine: StartEngine) -> Expected:
    """As `expected`, for `mla`."""

    def tokens(requests: Sequence[EngineRequest]) -> Tokens:
        with make_engine(mla, None, compilation_config=NATIVE_ROTARY) as engine:
            return tokens_of(engine.generate(requests))

    return tokens


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2: each stage has other layers"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size = 2: each rank has some of a block's tokens",
        ),
    ],
)
def test_what_splits_layers_or_tokens_is_refused(
    daemon: DaemonProcess, make_engine: StartEngine, mla: Path, arguments: dict[str, int], words: str
) -> None:
    engine = make_engine(mla, daemon, distributed_executor_backend="mp", **arguments)
    with pytest.raises(EngineFailed):
        engine.start()
    assert words in engine.log.read_text()


def run_with_prefix_caching(channel: socket.socket, setup: dict[str, Any]) -> None:
    """An engine's process in which prefix caching and chunked prefill stay on for latents.

    On a CPU without AMX vLLM turns both off, and the connector with them. With `NATIVE_ROTARY` it computes the right
    tokens behind a cached prefix there, too.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_turn_on(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = True
        vllm_config.scheduler_config.enable_chunked_prefill = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_turn_on))
        EngineLoop(channel, setup).run()


@pytest.mark.parametrize("ranks", [1, 2])
def test_latents_are_stored_once(
    ranks: int, mla: Path, make_engine: StartEngine, mla_expected: Expected, new_requests: NewRequests
) -> None:
    """Two ranks store as many bytes a token as one; each loads them all, also after a restart of the engine."""
    requests = new_requests(*LENGTHS)
    arguments = {
        "tensor_parallel_size": ranks,
        "compilation_config": NATIVE_ROTARY,
        "loop": run_with_prefix_caching,
    }
    with DaemonProcess(DAEMON) as daemon:
        with make_engine(mla, daemon, **arguments) as engine:
            cold, none = run(engine, requests)
        with Client(daemon.address) as client:
            stats = client.stats()
        with make_engine(mla, daemon, **arguments) as engine:
            warm, hits = run(engine, requests)
            samples = engine.metrics().samples
    assert cold == warm == mla_expected(requests)
    assert (none, hits) == (0, cacheable(requests))
    (namespace,) = stats.namespaces
    (used_bytes,) = (tier.used_bytes for tier in stats.tiers if tier.tier == TIER_CPU)
    assert namespace.blocks >= hits // BLOCK_TOKENS
    assert used_bytes == namespace.blocks * BLOCK_TOKENS * LATENT_BYTES
    (loaded_bytes,) = (value for name, value in samples.items() if name.startswith("vllm:prefixd_load_bytes{"))
    assert loaded_bytes == ranks * hits * LATENT_BYTES
