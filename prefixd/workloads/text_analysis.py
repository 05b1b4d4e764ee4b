"""The text analysis workload: a few templates, each sent many times with another text.

"Long-Term Memory", section VII.A: n unique prefixes, then k > n requests, each with a randomly chosen prefix
and a random body. The upper tiers have no room for all prefixes (section VII.C: of 128 prefixes 8 fit on the GPU, 32 in
CPU memory, 128 on disk).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

# The model that comes with prefixd: 16 KiB of KV a token, 16 tokens a block.
BLOCK_TOKENS = 16
BLOCK_BYTES = 16 * 16 << 10

# Ids that any byte-level vocabulary has and that are not special tokens.
FIRST_TOKEN, LAST_TOKEN = 32, 126


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAnalysis:
    """The requests. The same arguments give the same prompts.

    Lengths are in tokens. `prefix_tokens` should be whole blocks, since the cache finds only whole blocks.
    `outstanding` is the number of requests under way at a time, from which the daemon's queue can choose. `repeats` is
    how often the requests are sent to one daemon, each time with other choices and bodies.

    The first `header_tokens` of all prefixes are the same. The share `new` of the requests has prefixes that occur only
    once; they begin with the header, if there is one.
    """

    prefixes: int
    requests: int
    prefix_tokens: int = 512
    body_tokens: int = 32
    output_tokens: int = 2
    outstanding: int = 64
    repeats: int = 1
    seed: int = 0
    header_tokens: int = 0
    new: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError if a size is below 1, the header is as long as the prefix, or `new` is not from 0 to 1."""
        sizes = ("prefixes", "requests", "prefix_tokens", "body_tokens", "output_tokens", "outstanding", "repeats")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not 0 <= self.header_tokens < self.prefix_tokens:
            raise ValueError(
                f"header_tokens = {self.header_tokens}: must be 0 or more, and less than the prefix_tokens, "
                f"{self.prefix_tokens}"
            )
        if not 0.0 <= self.new <= 1.0:
            raise ValueError(f"new = {self.new}: must be a share, from 0 to 1")

    def prompts(self, repeat: int = 0) -> list[list[int]]:
        """Returns `requests` prompts as token ids, each a randomly chosen prefix and a body of its own."""
        source = random.Random(f"requests {self.seed}" + (f" {repeat}" if repeat else ""))
        prefixes = self._draw_prefixes()
        prompts = [source.choice(prefixes) + _draw_tokens(source, self.body_tokens) for _ in range(self.requests)]
        new_source = random.Random(f"new {self.seed} {repeat}")
        for number in new_source.sample(range(self.requests), self.new_requests):
            prompts[number] = self._draw_prefix(new_source) + prompts[number][self.prefix_tokens :]
        return prompts

    @property
    def new_requests(self) -> int:
        """Number of requests of a repeat that have prefixes of their own."""
        return round(self.new * self.requests)

    def warm_up_prompts(self) -> list[list[int]]:
        """Returns one prompt for each prefix, with bodies that no other prompt has."""
        source = random.Random(f"warm-up {self.seed}")
        return [prefix + _draw_tokens(source, self.body_tokens) for prefix in self._draw_prefixes()]

    def _draw_prefixes(self) -> list[list[int]]:
        source = random.Random(f"prefixes {self.seed}")
        return [self._draw_prefix(source) for _ in range(self.prefixes)]

    def _draw_prefix(self, source: random.Random) -> list[int]:
        """Returns the header, which all prefixes share, and random tokens after it."""
        header = _draw_tokens(random.Random(f"header {self.seed}"), self.header_tokens)
        return header + _draw_tokens(source, self.prefix_tokens)[self.header_tokens :]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSizes:
    """Sizes of the tiers, in prefixes.

    Bodies and outputs are cached too. So the CPU and disk tiers have room for a prefix and its share of bodies and
    outputs, and the GPU tier for the bodies and outputs of the `running` requests. The disk tier also has room for the
    prompts with new prefixes.
    """

    gpu_prefixes: int
    cpu_prefixes: int
    disk_prefixes: int
    running: int = 8

    def overrides(self, workload: TextAnalysis) -> dict[str, Any]:
        """Returns the settings, by dotted name, that give a daemon these tiers for `workload`."""
        prefix_blocks = _count_blocks(workload.prefix_tokens)
        prefix = prefix_blocks * BLOCK_BYTES
        longest = workload.prefix_tokens + workload.body_tokens + workload.output_tokens
        beside = (_count_blocks(longest) - prefix_blocks + 1) * BLOCK_BYTES
        # A prefix's share of the requests, and one request of the warm-up.
        requests = -(-workload.requests * workload.repeats // workload.prefixes) + 1
        kept = (longest // BLOCK_TOKENS - prefix_blocks) * requests * BLOCK_BYTES
        new = workload.new_requests * workload.repeats * (longest // BLOCK_TOKENS) * BLOCK_BYTES
        return {
            "gpu.bytes": self.gpu_prefixes * prefix + self.running * beside,
            "cpu.bytes": self.cpu_prefixes * (prefix + kept),
            "disk.bytes": self.disk_prefixes * (prefix + kept) + new,
            "worker.block_tokens": BLOCK_TOKENS,
            "worker.max_running": self.running,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One configuration of the daemon.

    Attributes:
        name: name of the configuration.
        caching: False: the daemon computes every prompt.
        policy: `scheduler.policy`.
        look_ahead: `scheduler.look_ahead`; 0: no prefetching.
        eviction: `cache.eviction`.
        tiers: the tiers that the daemon has, from the GPU tier on.
        everything: the GPU tier has room for all prefixes.
    """

    name: str
    caching: bool = True
    policy: str = "fpf"
    look_ahead: int | str = "auto"
    eviction: str = "lru"
    tiers: tuple[str, ...] = ("gpu", "cpu", "disk")
    everything: bool = False

    def overrides(self, workload: TextAnalysis, sizes: TierSizes) -> dict[str, Any]:
        """Returns the settings, by dotted name, of a daemon with this configuration for `workload`."""
        if self.everything:
            sizes = replace(sizes, gpu_prefixes=workload.prefixes + sizes.gpu_prefixes)
        return {
            **sizes.overrides(workload),
            **{f"{tier}.bytes": 0 for tier in ("cpu", "disk") if tier not in self.tiers},
            **self.settings,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, by dotted name, without the sizes of the tiers."""
        return {
            "cache.enabled": self.caching,
            "cache.eviction": self.eviction,
            "scheduler.policy": self.policy,
            "scheduler.look_ahead": self.look_ahead,
        }


CONFIGS = ("no-cache", "fcfs", "fpf", "relaxed-fpf")
"""Names of the compared configurations: without a cache, then each policy of the queue."""


def serving_of(config: str) -> Serving:
    """Returns the configuration of a name in CONFIGS."""
    if config == "no-cache":
        return Serving(name=config, caching=False, policy="fcfs")
    return Serving(name=config, policy=config)


def _draw_tokens(source: random.Random, count: int) -> list[int]:
    return [source.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def _count_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
