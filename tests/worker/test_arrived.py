"""Cached blocks that come while a request computes those before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prefixd.worker_protocol.protocol import Arrived, Extend

TOKENS = np.random.default_rng(12).integers(0, 95, 100).tolist()  # 6 blocks of 16, and 4
MakeRig = Callable[..., Any]


@pytest.mark.parametrize("kv", ["virtual", "paged"])
@pytest.mark.parametrize("passes", [0, 1, 2, 5], ids="{} passes before".format)
@pytest.mark.parametrize("first", [2, 5])
def test_the_request_goes_on_behind_them_with_the_same_tokens(
    make_rig: MakeRig, kv: str, passes: int, first: int
) -> None:
    rig = make_rig(kv=kv, max_step_tokens=16)
    home = rig.frames(8)
    expected = rig.generate(TOKENS, frames=home, max_tokens=20, temperature=1.0, seed=3)
    rig.steps.clear()
    request = rig.start(TOKENS, [home[0], *rig.frames(first - 1)], 1, max_tokens=20, temperature=1.0, seed=3)
    for _ in range(passes):
        rig.step()
    assert rig.tokens[request] == []
    rig.take(rig.engine.arrived(Arrived(request, first, home[first:6])))
    rig.run()
    assert rig.filled.get(request, 0) in (first, 6)  # it has no frame for the rest of the prompt yet
    rig.take(rig.engine.extend(Extend(request, rig.frames(2))))
    rig.run()
    assert rig.tokens[request] == expected
    assert sum(step.computed_tokens for step in rig.steps) == 16 * (first - 1) + 4 + 19
    assert rig.steps[0].context_tokens == 16


def test_a_child_copies_what_its_parent_passed_over(make_rig: MakeRig) -> None:
    rig = make_rig()
    home = rig.frames(8)
    expected = rig.generate(TOKENS, frames=home)
    parent = rig.start(TOKENS, [home[0], *rig.frames(1)], 1)
    rig.take(rig.engine.arrived(Arrived(parent, 2, home[2:6])))
    rig.run()
    assert rig.generate(TOKENS, fork_of=parent) == expected


@pytest.mark.parametrize(
    ("first", "blocks", "why"),
    [(1, 2, "2 have frames"), (2, 0, "whole blocks"), (2, 5, "leave at least one to compute")],
)
def test_what_cannot_follow_ends_the_request(make_rig: MakeRig, first: int, blocks: int, why: str) -> None:
    rig = make_rig()
    request = rig.start(TOKENS, rig.frames(2))
    rig.take(rig.engine.arrived(Arrived(request, first, rig.frames(blocks))))
    assert rig.done[request].reason == "error"
    assert why in rig.done[request].detail
    assert rig.engine.arrived(Arrived(request, 2, [])) == []


def test_blocks_arrive_once(make_rig: MakeRig) -> None:
    rig = make_rig()
    request = rig.start(TOKENS, rig.frames(1))
    rig.take(rig.engine.arrived(Arrived(request, 1, rig.frames(1))))
    rig.take(rig.engine.arrived(Arrived(request, 2, rig.frames(1))))
    assert "2 have frames" in rig.done[request].detail
