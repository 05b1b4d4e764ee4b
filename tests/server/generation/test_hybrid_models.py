"""Models whose layers keep different things, in a daemon and its worker: transformers' tokens, from every tier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixd.cli.demo.daemon_process import DaemonProcess
from tests.daemons import Answer, Remote
from tests.worker.tiny_models import RECURRENT, build_grouped

pytestmark = pytest.mark.slow

BLOCK = 16
PROMPT = 7 * BLOCK + 5
NEW = 24
CROWDED = 128  # tokens each of those that run at once: more than fit when all have them
STATES_ONLY = ("mamba", "mamba2")
# What a block and a state take: KV with windows, and a state beside KV. PREFIXD_MODELS names others;
# `tests/serving/models/test_models.py` runs all of them in one process.
MODELS = os.environ.get("PREFIXD_MODELS", "gemma3_text jamba").split()


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prompt_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 90, PROMPT).tolist()


class Reference:
    """What transformers' own model generates greedily."""

    def __init__(self, name: str) -> None:
        self._model = build_grouped(name)
        self._known: dict[int, list[int]] = {}

    def tokens(self, seed: int, count: int = NEW) -> list[int]:
        if seed not in self._known:
            ids = torch.tensor([prompt_of(seed)])
            self._model.generation_config.eos_token_id = None
            with torch.inference_mode():
                found: Any = self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=CROWDED, do_sample=False, pad_token_id=0
                )
            self._known[seed] = found[0, PROMPT:].tolist()
        return self._known[seed][:count]

    def save(self, directory: Path) -> Path:
        self._model.save_pretrained(directory)
        return directory


def ask(remote: Remote, seed: int) -> Answer:
    return remote.generate(prompt_of(seed), max_tokens=NEW, ignore_eos=True, temperature=0.0)


@pytest.mark.parametrize("name", ["jamba"], indirect=True)
def test_block_tables_give_the_same_tokens(name: str, folder: Path, tmp_path: Path) -> None:
    """Several frames a state, in a tier with room for two requests and for what large pages leave free."""
    reference = Reference(name)
    settings: dict[str, str | int] = {
        "worker.model": str(reference.save(tmp_path / "model")),
        "worker.kv": "paged",
        "worker.block_tokens": BLOCK,
        "worker.threads": 1,
        "gpu.device": "cpu",
        "gpu.bytes": gpu_bytes(tmp_path / "model", more_states=5),
        "cpu.bytes": "16MiB",
        "scheduler.load": "always",
    }
    with DaemonProcess(settings, directory=folder) as daemon, Remote(daemon) as remote:
        cold = [ask(remote, seed) for seed in range(4)]
        warm = [ask(remote, seed) for seed in range(4)]
        crowded = remote.generate_all(
            [prompt_of(seed) for seed in range(4, 8)], max_tokens=NEW, ignore_eos=True, temperature=0.0
        )
        assert daemon.stop() == 0
    for seed, answer in zip([*range(4), *range(4), *range(4, 8)], [*cold, *warm, *crowded], strict=True):
        assert answer.tokens == reference.tokens(seed), (seed, answer.hits)
    assert all(sum(answer.hits) == 7 * BLOCK for answer in warm)


def test_tokens_are_those_of_transformers_from_every_tier(name: str, folder: Path, tmp_path: Path) -> None:
    """Room for two requests in the GPU tier: the others' blocks come up from the CPU tier, and after a restart from
    disk. Six at once preempt each other, unless all that they keep is a state."""
    reference = Reference(name)
    settings: dict[str, str | int] = {
        "worker.model": str(reference.save(tmp_path / "model")),
        "worker.block_tokens": BLOCK,
        "worker.threads": 1,
        "worker.max_step_tokens": 64,
        "gpu.device": "cpu",
        "gpu.bytes": gpu_bytes(tmp_path / "model"),
        "cpu.bytes": "16MiB",
        "disk.bytes": "64MiB",
        "scheduler.load": "always",
    }
    with DaemonProcess(settings, directory=folder) as daemon, Remote(daemon) as remote:
        cold = [ask(remote, seed) for seed in range(6)]
        warm = [ask(remote, seed) for seed in (5, *range(6))]
        crowded = remote.generate_all(
            [prompt_of(seed) for seed in range(6, 12)], max_tokens=CROWDED, ignore_eos=True, temperature=0.0
        )
        stats = remote.settled()
        assert remote.tier(1).blocks >= (1 if name in STATES_ONLY else 7), "blocks of which some groups are there"
        if name not in STATES_ONLY:
            assert stats.scheduler.preempted_requests
        if name in RECURRENT:
            assert stats.worker.states.kept_states > 0 < stats.worker.states.resumed_runs
        assert daemon.stop() == 0
    for seed, answer in zip([*range(6), 5, *range(6)], [*cold, *warm], strict=True):
        assert answer.tokens == reference.tokens(seed), (seed, answer.hits)
    for seed, answer in enumerate(crowded, 6):
        assert answer.tokens == reference.tokens(seed, CROWDED), (seed, answer.hits)
    assert all(answer.hits == (0, 0, 0) for answer in cold)
    assert all(sum(answer.hits) == 7 * BLOCK for answer in warm)
    assert warm[0].hits[0] and any(answer.hits[1] for answer in warm), "from the GPU tier and from the CPU tier"
    with DaemonProcess(settings, directory=folder) as daemon, Remote(daemon) as remote:
        again = [ask(remote, seed) for seed in range(6)]
    assert [answer.tokens for answer in again] == [reference.tokens(seed) for seed in range(6)]
    assert all(answer.hits == (0, 0, 7 * BLOCK) for answer in again), [answer.hits for answer in again]


def gpu_bytes(model: Path, more_states: int = 0) -> int:
    """Room for the blocks of two requests, and for some states."""
    from prefixd.worker.spec.model_spec import read_model_spec
    from prefixd.worker_protocol.worker_settings import WorkerSettings

    spec = read_model_spec(WorkerSettings(model=str(model), block_tokens=BLOCK))
    blocks = 2 * -(-(PROMPT + NEW) // BLOCK)
    states = more_states + (5 if spec.block_frames else 8)
    return (blocks * spec.block_frames + states * spec.state_frames) * spec.groups.frame_bytes
