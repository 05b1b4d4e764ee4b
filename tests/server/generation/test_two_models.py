"""Two models in one daemon: transformers' tokens of each, and one tier whose memory goes to whoever is busy."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import AutoModelForCausalLM

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.v1 import admin_pb2, cache_pb2
from tests.daemons import Answer, Remote
from tests.worker.tiny_models import GROUP_SIZES, WINDOW, tiny_config

pytestmark = pytest.mark.slow

BLOCK = 16
PROMPT = 7 * BLOCK + 5
NEW, LONG = 24, 480
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
    max_position_embeddings=1024,
)
READY, FAILED = admin_pb2.WorkerStats.STATE_READY, admin_pb2.WorkerStats.STATE_FAILED


class Reference:
    """A model, and what transformers generates with it greedily."""

    def __init__(self, config: Any, directory: Path) -> None:
        torch.manual_seed(5)
        self._model = AutoModelForCausalLM.from_config(config)
        self._model.save_pretrained(directory)
        self._model.generation_config.eos_token_id = None
        self.name, self.directory = directory.name, directory

    def tokens(self, seed: int, new: int = NEW) -> list[int]:
        ids = torch.tensor([prompt_of(seed)])
        with torch.inference_mode():
            found: Any = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
            )
        tokens: list[int] = found[0, PROMPT:].tolist()
        return tokens


def prompt_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 90, PROMPT).tolist()


def settings_of(first: Reference, second: Reference, gpu_bytes: int) -> dict[str, str | int]:
    return {
        "worker.model": str(first.directory),
        "worker.more_models": str(second.directory),
        "worker.block_tokens": BLOCK,
        "worker.threads": 1,
        "worker.max_step_tokens": 64,
        "gpu.device": "cpu",
        "gpu.bytes": gpu_bytes,
        "cpu.bytes": "16MiB",
        "disk.bytes": "64MiB",
        "scheduler.load": "always",
    }


def test_memory_goes_to_the_model_that_is_busy(folder: Path, tmp_path: Path) -> None:
    llama, gemma = Reference(LLAMA, tmp_path / "llama"), Reference(GEMMA, tmp_path / "gemma")
    settings = settings_of(llama, gemma, 3 * 9 * 4 * FRAME)  # three requests of gemma's, four of llama's
    from tests.daemons import collect

    with DaemonProcess(settings, directory=folder) as daemon, Remote(daemon) as remote:
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

        def resize(requests: int) -> None:
            nbytes = requests * 9 * 4 * FRAME
            *_, last = remote.admin.ResizeTier(admin_pb2.ResizeTierRequest(tier=cache_pb2.TIER_GPU, nbytes=nbytes))
            assert (last.done, last.unfinished, last.nbytes) == (True, "", nbytes)

        # Both workers let go of what a smaller tier has no more, and get what a larger one has.
        for requests in (2, 3):
            resize(requests)
            ask(llama, 0)
            ask(gemma, 0)
            gpu_blocks()

        # One worker is killed while both have more to do than fits: the other goes on, and its own requests run again.
        # The one that is seen to run when it is killed is long, so that it still does. Before its successor has the
        # tier's frames, the size changes.
        first = remote.begin(prompt_of(20), model=gemma.name, **(options | {"max_tokens": LONG}))
        streams = [
            (model, seed, remote.begin(prompt_of(seed), model=model.name, **options))
            for seed in range(16, 19)
            for model in (gemma, llama)
        ]
        accepted, tokens = next(first), next(first)
        killed = stats.models[1].worker.pid
        os.kill(killed, signal.SIGKILL)
        next_pid = remote.until(lambda stats: stats.models[1].worker.pid not in (0, killed)).models[1].worker.pid
        os.kill(next_pid, signal.SIGSTOP)
        resize(4)
        ask(llama, 0)
        resize(3)
        os.kill(next_pid, signal.SIGCONT)
        asked.extend((model, seed, collect(stream)) for model, seed, stream in streams)
        long = collect(itertools.chain((accepted, tokens), first))
        assert long.finished.resumed >= 1
        remote.until(lambda stats: stats.models[1].worker.state == READY)
        gpu_blocks()
        stats = remote.stats()
        assert [(model.worker.restarts, model.held_bytes) for model in stats.models] == [(0, 0), (1, 0)]
        unnamed = remote.generate(prompt_of(19), **options)
        asked.append((llama, 19, unnamed))
        assert daemon.stop() == 0
    for model, seed, answer in asked:
        assert answer.tokens == model.tokens(seed), (model.name, seed, answer.hits)
    assert long.tokens == gemma.tokens(20, LONG)


def test_the_model_that_does_not_fit_is_refused_and_the_other_served(
    folder: Path, tmp_path: Path, refused: Callable[..., Any]
) -> None:
    """Requests that name no model go to the first, which is the one that does not fit."""
    gemma, llama = Reference(GEMMA, tmp_path / "gemma"), Reference(LLAMA, tmp_path / "llama")
    settings = settings_of(gemma, llama, 7 * FRAME)  # gemma's smallest request takes 8, llama's 6
    with DaemonProcess(settings, directory=folder) as daemon, Remote(daemon) as remote:
        answer = remote.generate(prompt_of(1)[:BLOCK], model="llama", max_tokens=4, ignore_eos=True, temperature=0.0)
        assert len(answer.tokens) == 4
        why = "gpu.bytes = 28672 holds 7 frames of 4096 bytes, and a request of gemma needs at least 8, 32768 bytes"
        for name in ("", "gemma"):
            with refused("UNAVAILABLE", "the worker was given up", why, "raise gpu.bytes to 32768"):
                remote.generate(prompt_of(1), model=name)
        stats = remote.settled()
        assert [(model.name, model.worker.state) for model in stats.models] == [("gemma", FAILED), ("llama", READY)]
        (trouble,) = remote.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).troubles
        assert trouble.part == "worker of gemma" and why in trouble.what
        health = health_pb2_grpc.HealthStub(remote.channel)
        serving = {
            service: health.Check(health_pb2.HealthCheckRequest(service=service)).status
            == health_pb2.HealthCheckResponse.SERVING
            for service in ("", "prefixd.v1.Inference", "prefixd.model.gemma", "prefixd.model.llama")
        }
        assert serving == {
            "": True,
            "prefixd.v1.Inference": True,
            "prefixd.model.gemma": False,
            "prefixd.model.llama": True,
        }
        with refused("NOT_FOUND", "prefixd.model.gemma, prefixd.model.llama"):
            health.Check(health_pb2.HealthCheckRequest(service="prefixd.model.other"))
        assert daemon.stop() == 0
