"""Two models in one daemon: transformers' tokens of each, and one tier whose memory goes to whoever is busy."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixd.v1 import admin_pb2, cache_pb2
from prefixd.workloads.daemon_process import DaemonProcess
from tests.worker.tiny_models import GROUP_SIZES, WINDOW, tiny_config

if TYPE_CHECKING:
    from tests.server.conftest import Answer, Remote

BLOCK = 16
PROMPT = 7 * BLOCK + 5
NEW = 24
FRAME = 4096
# A block of llama is 12,288 bytes, three common frames; each of the two groups of gemma has 8,192, two frames.
LLAMA = tiny_config("LlamaConfig", GROUP_SIZES, num_hidden_layers=3)
GEMMA = tiny_config(
    "Gemma3TextConfig",
    GROUP_SIZES,
    head_dim=32,
    query_pre_attn_scalar=16,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"],
)
READY = admin_pb2.WorkerStats.STATE_READY


class Reference:
    """A model, and what transformers generates with it greedily."""

    def __init__(self, config: Any, directory: Path) -> None:
        torch.manual_seed(5)
        self._model = AutoModelForCausalLM.from_config(config)
        self._model.save_pretrained(directory)
        self._model.generation_config.eos_token_id = None
        self.name, self.directory = directory.name, directory

    def tokens(self, seed: int) -> list[int]:
        ids = torch.tensor([prompt_of(seed)])
        with torch.inference_mode():
            found: Any = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
            )
        tokens: list[int] = found[0, PROMPT:].tolist()
        return tokens


def prompt_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 90, PROMPT).tolist()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket's path."""
    made = Path(tempfile.mkdtemp(prefix="prefixd-"))
    yield made
    shutil.rmtree(made)


def test_memory_goes_to_the_model_that_is_busy(folder: Path, tmp_path: Path, remote_type: type[Remote]) -> None:
    llama, gemma = Reference(LLAMA, tmp_path / "llama"), Reference(GEMMA, tmp_path / "gemma")
    settings: dict[str, str | int] = {
        "worker.model": str(llama.directory),
        "worker.more_models": str(gemma.directory),
        "worker.block_tokens": BLOCK,
        "worker.threads": 1,
        "worker.max_step_tokens": 64,
        "gpu.device": "cpu",
        "gpu.bytes": 3 * 9 * 4 * FRAME,  # three requests of gemma's, four of llama's
        "cpu.bytes": "16MiB",
        "disk.bytes": "64MiB",
        "scheduler.recompute_if_slower": "false",
    }
    with DaemonProcess(settings, directory=folder) as daemon, remote_type(daemon) as remote:
        asked: list[tuple[Reference, int, Answer]] = []

        def ask(model: Reference, *seeds: int) -> None:
            options = {"model": model.name, "max_tokens": NEW, "ignore_eos": True, "temperature": 0.0}
            answers = remote.generate_all([prompt_of(seed) for seed in seeds], **options)
            asked.extend(zip([model] * len(seeds), seeds, answers, strict=True))

        def gpu_blocks() -> dict[str, int]:
            stats = remote.settled()
            blocks = {each.namespace.name: each.gpu_blocks for each in stats.namespaces}
            assert not remote.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).violations
            return {model.name: blocks.get(model.namespace, 0) for model in stats.models}

        ask(llama, *range(6))
        first = gpu_blocks()
        assert first["llama"] >= 25 and not first["gemma"], "llama's blocks fill the tier"
        ask(gemma, *range(6))
        then = gpu_blocks()
        assert then["gemma"] > first["gemma"] and then["llama"] < first["llama"], "gemma's took its frames"
        ask(llama, *range(6, 12))
        back = gpu_blocks()
        assert back["llama"] > then["llama"] and back["gemma"] < then["gemma"]

        # Both at once, with room for three: they preempt and wait for each other, and all end.
        options = {"max_tokens": NEW, "ignore_eos": True, "temperature": 0.0}
        streams = [
            (model, seed, remote.begin(prompt_of(seed), model=model.name, **options))
            for seed in range(12, 16)
            for model in (llama, gemma)
        ]
        from tests.server.conftest import collect

        asked.extend((model, seed, collect(stream)) for model, seed, stream in streams)
        gpu_blocks()

        stats = remote.stats()
        assert [(model.name, model.scheduler.finished_requests) for model in stats.models] == [
            ("llama", 16),
            ("gemma", 10),
        ]
        assert not any(model.worker.restarts for model in stats.models)
        with pytest.raises(grpc.RpcError) as refused:
            remote.generate([5, 6], model="other")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert "this daemon has llama, gemma" in (refused.value.details() or "")

        # Both workers let go of what a smaller tier has no more, and get what a larger one has.
        for nbytes in (2 * 9 * 4 * FRAME, 3 * 9 * 4 * FRAME):
            *_, last = remote.admin.ResizeTier(admin_pb2.ResizeTierRequest(tier=cache_pb2.TIER_GPU, nbytes=nbytes))
            assert (last.done, last.unfinished, last.nbytes) == (True, "", nbytes)
            ask(llama, 0)
            ask(gemma, 0)
            gpu_blocks()

        # One worker dies: the other goes on, and the one that died comes back.
        os.kill(stats.models[1].worker.pid, signal.SIGKILL)
        ask(llama, 16)
        remote.until(lambda stats: stats.models[1].worker.state == READY and stats.models[1].worker.restarts == 1)
        ask(gemma, 16)
        gpu_blocks()
        assert not remote.stats().models[0].worker.restarts
        assert daemon.stop() == 0
    for model, seed, answer in asked:
        assert answer.tokens == model.tokens(seed), (model.name, seed, answer.hits)
