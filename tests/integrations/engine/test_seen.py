from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.integrations.engine.seen import NOTHING_SEEN, SeenPrefix
from prefixd_scheduler import Distance, farthest

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
    assert NOTHING_SEEN.distance(0) is Distance.NONE
    assert NOTHING_SEEN.distance(16) is Distance.GPU


@given(TIERS, st.integers(1, 256), st.integers(0, 6000))
def test_runs_say_what_the_blocks_said(tiers: list[Distance], block_tokens: int, local: int) -> None:
    seen = SeenPrefix.of(tiers, block_tokens)
    assert seen.tokens == block_tokens * len(tiers)
    beyond = [tier for i, tier in enumerate(tiers) if (i + 1) * block_tokens > local]
    assert seen.distance(local) is (farthest(beyond) if beyond or not local else Distance.GPU)


@pytest.mark.parametrize(
    ("tokens", "runs"),
    [(64, ()), (0, ((Distance.CPU, 0),)), (64, ((Distance.NONE, 64),)), (64, ((Distance.CPU, 32),))],
)
def test_runs_that_contradict_themselves(tokens: int, runs: tuple[tuple[Distance, int], ...]) -> None:
    with pytest.raises(ValueError, match="the runs"):
        SeenPrefix(tokens, runs)
