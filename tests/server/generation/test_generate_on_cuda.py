"""A daemon with its GPU tier on CUDA and a worker that computes there: every tier, a restart, the same answers.

Against the stand-in driver (`tests/swap/test_cuda_stand_in.py`) the worker computes on the CPU over what the driver
maps, shared between both processes. A GPU's kernels sum in another order for every shape, so what is computed from a
cached prefix is compared exactly with what was computed from it in another tier, and with the first run by its
probabilities; on the CPU all are the same.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefixd.v1 import admin_pb2, cache_pb2, inference_pb2
from tests.daemons import Answer, Remote

STAND_IN = "PREFIXD_TEST_STAND_IN" in os.environ
BLOCK_TOKENS = 32  # 56 KiB a token in bfloat16, padded to 64 KiB: Qwen2.5-7B's
LOGPROB_TOLERANCE = 0.25

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not STAND_IN and not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]

# The daemon believes in the stand-in's device, and its worker computes on the CPU.
_STAND_IN_DAEMON = """
import msgspec
from prefixd.server import daemon
from prefixd.serving.models import worker_start
from prefixd.cli import tethered

encode = worker_start.encode_settings
daemon.resolve_device = lambda settings: "cuda:0"
worker_start.encode_settings = lambda settings: encode(
    msgspec.structs.replace(settings, device="cpu", chunk_bytes=2 << 20)
)
tethered.main()
"""


@pytest.fixture(scope="module")
def wide_model(model_directory: Path) -> Iterator[Path]:
    """Small weights and much KV, 56 KiB a token; with the tokenizer of the small model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = Path(tempfile.mkdtemp(prefix="prefixd-model-"))
    torch.manual_seed(9)
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=14,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1024,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=271,
        tie_word_embeddings=False,
    )
    try:
        LlamaForCausalLM(config).save_pretrained(directory)
        for file in model_directory.glob("token*"):
            shutil.copy(file, directory)
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def remote(launch: Callable[..., Remote], wide_model: Path) -> Iterator[Remote]:
    settings: dict[str, str | int] = {
        "worker.model": str(wide_model),
        "worker.dtype": "bfloat16",
        "worker.threads": 1,
        "gpu.device": "cuda",
        "gpu.least_bytes": "20MiB",
        "gpu.most_bytes": "40MiB",  # 20 blocks
        "gpu.reserve_bytes": "8MiB",
        "gpu.idle_s": 3600,
        "cpu.bytes": "128MiB",
        "disk.bytes": "256MiB",
        "scheduler.load": "always",
        "worker.layerwise_loads": "always",
    }
    program: dict[str, Any] = {"program": ("-c", _STAND_IN_DAEMON)} if STAND_IN else {}
    started = launch(settings, start_timeout_s=300.0, **program)
    yield until_ready(started)


def until_ready(remote: Remote) -> Remote:
    remote.until(lambda stats: stats.worker.state == admin_pb2.WorkerStats.STATE_READY)
    return remote


def assert_alike(found: Answer, first: Answer) -> None:
    """What a prefix's KV gives is what was computed without it."""
    if STAND_IN:
        assert found.tokens == first.tokens
    ours, theirs = (dict(zip(a.logprobs[0].top_ids, a.logprobs[0].top_logprobs, strict=True)) for a in (found, first))
    common = ours.keys() & theirs.keys()
    assert len(common) >= 3
    assert max(abs(ours[token] - theirs[token]) for token in common) < LOGPROB_TOLERANCE


def test_every_tier_and_a_restart_give_the_same_answer(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    tokens = prompt(3 * BLOCK_TOKENS + 10)
    cached = 3 * BLOCK_TOKENS

    def ask() -> Answer:
        return remote.generate(tokens, logprobs=5)

    assert remote.tier(cache_pb2.TIER_GPU).capacity_bytes == 20 << 20
    worker = remote.stats().worker
    assert (worker.block_tokens, worker.token_bytes, worker.token_memory) == (BLOCK_TOKENS, 56 << 10, 64 << 10)
    first = ask()
    assert first.hits == (0, 0, 0) and len(set(first.tokens)) > 1
    on_gpu = ask()
    assert on_gpu.hits == (cached, 0, 0)
    assert_alike(on_gpu, first)
    for first_variant in range(1, 21, 4):
        for variant in range(first_variant, first_variant + 4):  # of 7 blocks each
            remote.generate(prompt(200, variant))
        on_cpu = ask()
        assert on_cpu.hits == (0, cached, 0)
        assert on_cpu.tokens == on_gpu.tokens
        if remote.stats().scheduler.layerwise_loads:  # of a load so small all layers may come before its run begins
            break
    else:
        pytest.fail("no run began before the last layers had come")

    together = remote.sequences(tokens, n=2, seed=3)
    assert [len(answer.tokens) for answer in together] == [12, 12]
    beams = remote.sequences(tokens, beam_search=inference_pb2.BeamSearch(width=2), n=2, temperature=0.0, seed=0)
    assert beams[0].tokens != beams[1].tokens and all(len(beam.tokens) == 12 for beam in beams)
    remote.settled()

    for most in (20 << 20, 40 << 20):
        *_, resized = remote.admin.ResizeTier(admin_pb2.ResizeTierRequest(tier=cache_pb2.TIER_GPU, nbytes=most))
        assert resized.done
        for variant in range(1, 5):
            remote.generate(prompt(200, variant))
        assert remote.tier(cache_pb2.TIER_GPU).capacity_bytes == most, "it grows rather than evict"
        assert ask().tokens == on_gpu.tokens
    remote.settled()

    assert remote.daemon.stop() == 0
    remote.daemon.configure({"gpu.least_bytes": "8MiB", "gpu.idle_s": 1})
    remote.daemon.start()
    until_ready(remote)
    restored = ask()
    assert restored.hits == (0, 0, cached), "from disk"
    assert restored.tokens == on_gpu.tokens
    remote.generate(prompt(200, 5))
    remote.until(lambda stats: stats.tiers[0].capacity_bytes == 8 << 20)  # 4 blocks; idle
    down = ask()
    assert sum(down.hits) == cached and down.hits[1] > 0 and down.tokens == on_gpu.tokens
    remote.settled()
