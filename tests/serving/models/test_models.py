"""Every model that the worker runs, on the daemon's cache: transformers' tokens, wherever the prefix comes from.

In one process; `tests/server/generation/test_hybrid_models.py` runs some of them through a daemon and its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixd.cache.index.trie import DISK
from prefixd.worker.model import CausalModel, load_model
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.worker_settings import WorkerSettings
from tests.serving.dispatch.model_bench import ModelBench, open_model_bench
from tests.slow import slow_but
from tests.waiting import until
from tests.worker.tiny_models import LATENT, RECURRENT, WINDOWED, build_grouped

BLOCK = 16
BLOCKS = 7
PROMPT = BLOCKS * BLOCK + 5
NEW = 24
LONG = 48
RUN = [name for name in (*WINDOWED, *LATENT, *RECURRENT) if name != "zamba2"]
IN_PAGES = ("gemma3_text", "jamba", "falcon_h1", "qwen3_next")
"""Those that are run with block tables, too: large pages whose small pages have one size, or several."""
RUNS = [*((name, "virtual") for name in RUN), *((name, "paged") for name in IN_PAGES)]
FAST = [("gemma3_text", "virtual"), ("jamba", "virtual"), ("jamba", "paged")]
"""A model with windows and one with states: `make test` runs these, `make test-all` all."""
STATES_ONLY = ("mamba", "mamba2")


def prompt_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 90, PROMPT).tolist()


class Subject:
    """A model in the worker's form, and what transformers' own generates greedily."""

    def __init__(self, name: str, kv: str, directory: Path) -> None:
        self.name = name
        self._reference = build_grouped(name)
        self._reference.save_pretrained(directory)
        self._reference.generation_config.eos_token_id = None
        self.model: CausalModel = load_model(
            read_model_spec(WorkerSettings(model=str(directory), block_tokens=BLOCK, kv=kv))
        )
        self._known: dict[int, list[int]] = {}

    def tokens(self, seed: int, count: int = NEW) -> list[int]:
        if seed not in self._known:
            ids = torch.tensor([prompt_of(seed)])
            with torch.inference_mode():
                found: Any = self._reference.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=LONG, do_sample=False, pad_token_id=0
                )
            self._known[seed] = found[0, PROMPT:].tolist()
        return self._known[seed][:count]

    def frames(self, blocks: int, states: int) -> int:
        """Frames of so many blocks and states."""
        return blocks * self.model.spec.block_frames + states * self.model.spec.state_frames


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Subject]:
    return cache(lambda name, kv: Subject(name, kv, tmp_path_factory.mktemp(name)))


@pytest.fixture(params=slow_but(FAST, RUNS), ids="-".join)
def subject(request: pytest.FixtureRequest, subject_of: Callable[[str, str], Subject]) -> Subject:
    return subject_of(*request.param)


async def test_a_hit_from_each_tier_and_after_a_restart_gives_transformers_tokens(
    subject: Subject, tmp_path: Path
) -> None:
    expected, prompt, hit = subject.tokens(0), prompt_of(0), BLOCKS * BLOCK
    frames = subject.frames(blocks=20, states=10)
    async with open_model_bench(subject.model, tmp_path, frames) as bench:
        assert await bench.generate(prompt, NEW) == (expected, (0, 0, 0, 0))
        assert await bench.generate(prompt, NEW) == (expected, (hit, 0, 0, 0))
        await bench.clear_gpu_tier()
        assert await bench.generate(prompt, NEW) == (expected, (0, hit, 0, 0))
    async with open_model_bench(subject.model, tmp_path, frames) as bench:
        assert await bench.generate(prompt, NEW) == (expected, (0, 0, hit, 0))


async def test_what_the_rules_allow_to_go_goes_without_a_loss_and_nothing_else_does(
    subject: Subject, tmp_path: Path
) -> None:
    expected, prompt = subject.tokens(0), prompt_of(0)
    async with open_model_bench(subject.model, tmp_path, subject.frames(blocks=20, states=10)) as bench:
        await bench.generate(prompt, NEW)
        trie, path = bench.trie, bench.path(prompt)
        drop(bench, path, ~trie.needed(BLOCKS))
        assert (trie.available[path] == trie.needed(BLOCKS)).all()
        assert await bench.generate(prompt, NEW) == (expected, (BLOCKS * BLOCK, 0, 0, 0))

        drop(bench, path, ~trie.needed(BLOCKS))  # the run above may have kept more
        needed = trie.needed(BLOCKS)
        drop(bench, path[-1:], needed[-1:])
        tokens, hits = await bench.generate(prompt, NEW)
        assert tokens == expected
        assert sum(hits) < BLOCKS * BLOCK


def drop(bench: ModelBench, rows: Any, groups: Any) -> None:
    """Evicts these groups of some blocks from every tier."""
    for tier in bench.cache.tiers:
        if tier.level != DISK:  # nothing was written there yet
            bench.cache.placement.drop(bench.trie, rows, tier, groups & np.uint8(bench.trie.all_groups))


async def test_requests_that_are_preempted_and_resumed_give_transformers_tokens(
    subject: Subject, tmp_path: Path
) -> None:
    if subject.name in STATES_ONLY:
        pytest.skip("a state does not grow: no request ever lacks a frame")
    async with open_model_bench(subject.model, tmp_path, subject.frames(blocks=30, states=10)) as bench:
        requests = [bench.submit(prompt_of(seed), LONG) for seed in range(2)]
        counters, taken = bench.dispatcher.preemption.counters, list[int]()
        while not all(request.generated for request in requests):
            await asyncio.sleep(0)
        bench.paused = True
        while not counters.preempted:  # others take what is free, and what the windows of each pass let go of
            assert bench.dispatcher.running, "both have ended"
            bench.pass_once()
            while more := await bench.take_block():
                taken += more
            await bench.cache.mover.quiesce()
            for _ in range(5):
                await asyncio.sleep(0)
        bench.paused = False
        bench.cache.tiers.compute.free(taken)
        for seed, request in enumerate(requests):
            assert await bench.tokens_of(request) == subject.tokens(seed, LONG)
        assert sum(request.resumed for request in requests) == counters.preempted


async def test_requests_whose_worker_dies_give_transformers_tokens(subject: Subject, tmp_path: Path) -> None:
    async with open_model_bench(subject.model, tmp_path, subject.frames(blocks=40, states=20)) as bench:
        bench.paused = True
        requests = [bench.submit(prompt_of(seed), NEW) for seed in range(2)]
        await until(lambda: len(bench.dispatcher.running) >= 2)  # neither is done before the other begins
        bench.paused = False
        await until(lambda: min(request.generated for request in requests) >= 4)
        bench.die()
        for seed, request in enumerate(requests):
            assert await bench.tokens_of(request) == subject.tokens(seed)
            assert request.resumed == 1
