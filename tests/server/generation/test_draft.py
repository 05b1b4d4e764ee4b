"""A daemon with a draft model: the answers of one without, in fewer passes, from every tier."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.server.figures.metrics import MetricsCollector
from prefixd.v1 import admin_pb2
from tests.daemons import Answer, Remote

pytestmark = pytest.mark.slow

PROMPT, NEW = 70, 40


def noised(directory: Path, target: Path) -> Path:
    """A copy of a model and its tokenizer whose weights are a little off."""
    shutil.copytree(directory, target)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.01 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(target)
    return target


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 1.0, "seed": 5, "stop_token_ids": list(range(0, 270, 15))},
    {"temperature": 1.0, "seed": 6, "stop": ["a", "Q"]},
    {"temperature": 1.0, "seed": 7, "max_tokens": 3},
]


def ask(remote: Remote, prompts: list[list[int]]) -> list[Answer]:
    return [
        remote.generate(prompt, **{"max_tokens": NEW, **sampling})
        for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)
    ]


def what(answers: list[Answer]) -> list[Any]:
    """All but where it was found."""
    return [(each.tokens, each.text, each.finished.reason, each.logprobs) for each in answers]


def share(worker: admin_pb2.WorkerStats) -> float:
    """Of the tokens proposed those that were accepted."""
    return worker.draft.accepted_tokens / worker.draft.proposed_tokens


def test_the_same_answers_in_fewer_passes_from_every_tier(
    model_daemon: Remote,
    with_model: dict[str, str | int],
    folder: Path,
    tmp_path: Path,
    prompt: Callable[..., list[int]],
) -> None:
    """Room for three requests in the GPU tier, of 2 frames a block: six at once preempt each other."""
    prompts = [prompt(PROMPT, variant) for variant in range(len(SAMPLINGS))]
    crowd = [prompt(PROMPT, 10 + variant) for variant in range(6)]
    before = model_daemon.stats().worker.passes
    alone = what(ask(model_daemon, prompts))
    passes_alone = model_daemon.stats().worker.passes - before
    crowd_alone = [model_daemon.generate(each, max_tokens=NEW).tokens for each in crowd]
    settings = {
        **with_model,
        "worker.draft_model": str(noised(Path(with_model["worker.model"]), tmp_path / "draft")),
        "worker.draft_tokens": 3,
        "gpu.bytes": 3 * 7 * 2 * 8192,
    }
    with DaemonProcess(settings, directory=folder) as daemon, Remote(daemon) as remote:
        assert what(ask(remote, prompts)) == alone
        stats = remote.settled()
        assert 0 < stats.worker.draft.accepted_tokens < stats.worker.draft.proposed_tokens
        assert stats.worker.passes < 0.7 * passes_alone
        assert (stats.worker.draft.model, stats.worker.draft.draft_tokens) == (settings["worker.draft_model"], 3)
        assert not model_daemon.stats().worker.HasField("draft")
        metrics = {family.name: family.samples for family in MetricsCollector(stats).collect()}
        assert metrics["prefixd_draft_accepted_tokens"][0].value == stats.worker.draft.accepted_tokens
        assert metrics["prefixd_worker_passes"][0].value == stats.worker.passes
        warm = ask(remote, prompts)
        assert what(warm) == alone
        assert all(sum(answer.hits) == 64 for answer in warm)
        together = remote.generate_all(crowd, max_tokens=NEW)
        assert [answer.tokens for answer in together] == crowd_alone
        remote.settled()
        integrity = remote.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest(), timeout=60)
        assert not integrity.violations
        assert daemon.stop() == 0
    with DaemonProcess(settings, directory=folder) as daemon, Remote(daemon) as remote:
        again = ask(remote, prompts)
        assert what(again) == alone
        assert all(answer.hits == (0, 0, 64) for answer in again)
        after = remote.settled().worker
    assert share(after) > 0.8 * share(stats.worker), "what the draft resumes from on disk is its own"
