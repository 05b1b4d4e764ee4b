from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.integrations.engine.waiting.seen_prefix import NOTHING_SEEN, SeenPrefix
from prefixd_scheduler import WEIGHT_CLASSES, Distance, prompt_weight

TIERS = st.lists(st.sampled_from([Distance.GPU, Distance.CPU, Distance.DISK]), max_size=20)


def test_only_blocks_beyond_the_engines_own_decide() -> None:
    seen = SeenPrefix.of([Distance.DISK, Distance.CPU, Distance.CPU], 64)
    assert seen == SeenPrefix(192, ((Distance.DISK, 64), (Distance.CPU, 128)))
    assert seen.distance(0) is Distance.DISK
    assert seen.distance(48) is Distance.DISK, "a block that vLLM holds in part is loaded"
    assert seen.distance(64) is Distance.CPU
    assert seen.distance(192) is Distance.GPU
    assert seen.distance(1000) is Distance.GPU


def test_nothing_cached_anywhere() -> None:
    assert NOTHING_SEEN.distance(0) is NOTHING_SEEN.distance(16) is Distance.GPU, "nothing is loaded"
    assert NOTHING_SEEN.weight(0, 100) == 1.0
    assert NOTHING_SEEN.weight(96, 100) == 4.0


def test_a_header_that_the_engine_holds_makes_no_prompt_near() -> None:
    """One block of 512 tokens in the engine, 3,584 to compute, beside a prompt that lies on disk."""
    assert NOTHING_SEEN.weight(512, 4096) == 1.5
    on_disk = SeenPrefix.of([Distance.DISK] * 7, 512)
    assert on_disk.weight(0, 4096) == 2.0
    assert on_disk.weight(512, 4096) == 2.0


@given(TIERS, st.integers(1, 256), st.integers(0, 6000))
def test_runs_say_what_the_blocks_said(tiers: list[Distance], block_tokens: int, local: int) -> None:
    seen = SeenPrefix.of(tiers, block_tokens)
    assert seen.tokens == block_tokens * len(tiers)
    beyond = [tier for i, tier in enumerate(tiers) if (i + 1) * block_tokens > local]
    assert seen.distance(local) is max(beyond, default=Distance.GPU)


@given(TIERS, st.integers(1, 64), st.integers(0, 1500), st.integers(0, 1500), st.integers(0, 100))
def test_the_weight_is_that_of_each_token(
    tiers: list[Distance], block_tokens: int, local: int, behind: int, header_percent: int
) -> None:
    seen = SeenPrefix.of(tiers, block_tokens)
    prompt_tokens = max(1, seen.tokens + behind, local)
    of_tokens = [tier for tier in tiers for _ in range(block_tokens)]
    of_tokens[:local] = [Distance.GPU] * local
    weight = seen.weight(local, prompt_tokens)
    assert weight == prompt_weight([(tier, 1) for tier in of_tokens], prompt_tokens)
    assert weight in WEIGHT_CLASSES
    header = len(of_tokens) * header_percent // 100
    of_document = [(tier, 1) for tier in of_tokens[header:]]
    assert seen.weight(local, prompt_tokens, header) == prompt_weight(of_document, prompt_tokens - header)


@pytest.mark.parametrize(
    ("tokens", "runs"),
    [(64, ()), (0, ((Distance.CPU, 0),)), (64, ((Distance.NONE, 64),)), (64, ((Distance.CPU, 32),))],
)
def test_runs_that_contradict_themselves(tokens: int, runs: tuple[tuple[Distance, int], ...]) -> None:
    with pytest.raises(ValueError, match="the runs"):
        SeenPrefix(tokens, runs)
