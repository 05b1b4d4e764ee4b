"""What the tests say about engines that prefixd serves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest, EngineResult, connector
from benchmarks.engines.vllm_models import VOCABULARY
from prefixd.base.rules.rule_messages import from_message
from prefixd.client import Cache, Client, NamespaceSpec, PartSpec
from tests.waiting import wait_until

T = TypeVar("T")

BLOCK_TOKENS = 32
VLLM_BLOCK_TOKENS = 32
DAEMON = {"cpu.bytes": "256MiB", "disk.bytes": "512MiB"}
PATIENCE_S = 120.0

Tokens = list[tuple[int, ...]]
Expected = Callable[[Sequence[EngineRequest]], Tokens]
StartEngine = Callable[..., EngineProcess]


def make_prompt(seed: int, tokens: int) -> list[int]:
    """A prompt of its own for every seed."""
    rng = random.Random(seed)
    return [rng.randrange(4, VOCABULARY) for _ in range(tokens)]


class NewRequests:
    """Requests whose prompts nobody has had before, so that tests can share engines and daemons."""

    def __init__(self) -> None:
        self._seed = 1000

    def __call__(self, *lengths: int, max_tokens: int = 12, **fields: Any) -> list[EngineRequest]:
        """One request for each length."""
        first = self._seed
        self._seed += len(lengths)
        return [
            EngineRequest(make_prompt(first + place, length), max_tokens, **fields)
            for place, length in enumerate(lengths)
        ]


def always(address: str, **options: Any) -> dict[str, Any]:
    """The connector, told to load whatever is cached, however long that takes: neither which of loading and computing
    is faster nor what is slow may hang on the machine that tests."""
    return connector(address, **{"recompute_if_slower": False, "timeout_s": PATIENCE_S, **options})


def run(engine: EngineProcess, requests: Sequence[EngineRequest], *, forget: bool = True) -> tuple[Tokens, int]:
    """Runs the requests at once, after vLLM's own prefix cache was emptied unless told otherwise, and waits until what
    they computed is saved.

    Returns:
        Their tokens, and how many prompt tokens came from the connector by vLLM's own count.
    """
    if forget:
        assert engine.reset_prefix_cache()
    before = engine.metrics().external_hits
    results = engine.generate(requests)
    engine.wait_until_idle()
    return tokens_of(results), engine.metrics().external_hits - before


def tokens_of(results: Sequence[EngineResult]) -> Tokens:
    """The tokens alone."""
    return [result.token_ids for result in results]


def cacheable(requests: Sequence[EngineRequest], *, windows: bool = False) -> int:
    """Prompt tokens that can come from prefixd: those of full blocks, but for the vLLM block that has to be computed so
    that the next token comes of it. With windows it is a block of prefixd's."""
    step = BLOCK_TOKENS if windows else VLLM_BLOCK_TOKENS
    return sum(
        min(len(request.prompt) // BLOCK_TOKENS * BLOCK_TOKENS, (len(request.prompt) - 1) // step * step)
        for request in requests
    )


def wait_until_back(engine: EngineProcess) -> None:
    """Returns when whatever of the engine's scheduler and ranks has said that the daemon is away has found it again.

    Each looks for it by itself. A rank that has not found it computes what the scheduler has, and saves nothing.
    """

    def all_back() -> bool:
        log = engine.log.read_bytes()
        return log.count(b"prefixd is away") == log.count(b"prefixd is back")

    wait_until(all_back, "the log does not say that the daemon is back")


def alter(client: Client, prompt: Sequence[int]) -> int:
    """Writes other numbers into the daemon's memory where it keeps the prompt's prefix (without salt); how many blocks.

    The daemon knows nothing of it. Whoever has the prefix leased, or finds it later, reads what was written.
    """
    altered = 0
    for cache in registered(client):
        with cache.acquire(prompt) as lease:
            assert client.arena is not None
            for block in range(lease.blocks):
                for part, spec in enumerate(cache.spec.parts):
                    if lease.has(block, part):
                        there = client.arena.bytes_at(lease.offset(block, part), spec.nbytes)
                        np.copyto(there.view(np.float32), np.float32(0.5))
            altered += lease.blocks
    return altered


def registered(client: Client) -> list[Cache]:
    """The namespaces (without salt) that the engines of the client's daemon have registered."""
    caches = []
    for namespace in client.stats().namespaces:
        known = namespace.namespace
        parts = (
            PartSpec(
                part.group,
                part.rank,
                part.nbytes,
                from_message(part),
            )
            for part in known.parts
        )
        spec = NamespaceSpec(known.name, known.block_tokens, tuple(parts), dtype=known.dtype, layout=known.layout)
        caches.append(client.register(spec))
    return caches
