"""What the tests with a real vLLM share: tiny models, prompts, and the tokens that vLLM alone gives for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks._vllm_engine import EngineProcess, EngineRequest
from benchmarks._vllm_models import VOCABULARY, save_gemma3, save_llama

Tokens = list[tuple[int, ...]]
Expected = Callable[[Sequence[EngineRequest]], Tokens]


def make_prompt(seed: int, tokens: int) -> list[int]:
    """A prompt of its own for every seed."""
    rng = random.Random(seed)
    return [rng.randrange(4, VOCABULARY) for _ in range(tokens)]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Five prompts with nothing in common."""
    return [make_prompt(seed, tokens) for seed, tokens in enumerate((700, 389, 512, 1000, 129))]


@pytest.fixture(scope="session")
def alone(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """vLLM without a connector and without a prefix cache of its own."""
    log = tmp_path_factory.mktemp("alone") / "engine.log"
    with EngineProcess(llama, enable_prefix_caching=False, log=log) as engine:
        yield engine


@pytest.fixture(scope="session")
def expected(alone: EngineProcess) -> Expected:
    """The tokens of requests to `llama` as vLLM alone computes them, whatever their salts."""

    def tokens(requests: Sequence[EngineRequest]) -> Tokens:
        return [result.token_ids for result in alone.generate(requests)]

    return tokens
