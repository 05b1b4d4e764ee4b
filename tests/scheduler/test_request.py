from __future__ import annotations

import pytest

from prefixd_scheduler import Distance, InvalidValueError, QueuedRequest, farthest


def test_distances_weigh_as_in_the_paper() -> None:
    assert sorted(Distance) == [Distance.GPU, Distance.CPU, Distance.DISK, Distance.REMOTE, Distance.NONE]
    weights = {distance: 4 - n for n, distance in enumerate((Distance.GPU, Distance.CPU, Distance.DISK, Distance.NONE))}
    assert {distance: distance.weight for distance in weights} == weights
    assert Distance.DISK.weight > Distance.REMOTE.weight > Distance.NONE.weight


def test_the_farthest_block_decides() -> None:
    assert farthest([Distance.GPU, Distance.DISK, Distance.CPU]) is Distance.DISK
    assert farthest([Distance.GPU]) is Distance.GPU
    assert farthest([]) is Distance.NONE


@pytest.mark.parametrize(("prompt", "cached"), [(10, 11), (10, -1), (-1, 0)])
def test_counts_outside_their_range_are_refused_with_the_value(prompt: int, cached: int) -> None:
    with pytest.raises(InvalidValueError, match=f"request 7 has {cached} cached of {prompt} prompt tokens; pass"):
        QueuedRequest(id=7, arrival_s=0.0, prompt_tokens=prompt, cached_tokens=cached)
