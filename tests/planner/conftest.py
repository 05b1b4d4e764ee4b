"""A tiny machine to plan: blocks of 4 tokens and 4 KiB, and passes that take a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from prefixd.planner.machine.hardware import Way, Ways
from prefixd.planner.planned_models import LayerGroup, PlannedModel
from prefixd.planner.virtual_daemon import Plan
from prefixd.planner.workload import PlannedRequest, Workload
from prefixd.settings import Settings

BLOCK = 4
BLOCK_BYTES = 4096
FULL = LayerGroup(layers=1, kv_heads=1, head_dim=256)


class OneSecond:
    """Every pass takes a second."""

    def pass_s(self, parts: Sequence[tuple[int, int]], begun: int = 0, /) -> float:
        assert 0 <= begun <= len(parts)
        assert parts and all(count > 0 and before >= 0 for count, before in parts)
        return 1.0

    def assumptions(self) -> list[str]:
        return ["a pass takes a second"]


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """`make_plan(gpu=, cpu=, disk=, groups=, **settings)`: sizes in blocks of one full group."""

    def make(gpu: int, cpu: int = 0, disk: int = 0, groups: tuple[LayerGroup, ...] = (FULL,), **settings: Any) -> Plan:
        model = PlannedModel("tiny", groups, 1e6, 1e6, 1, 1024, "a test")
        given = {name.replace("__", "."): value for name, value in settings.items()}
        values = {
            "worker.embedded": True,
            "worker.block_tokens": BLOCK,
            "worker.max_running": 1,
            "worker.max_step_tokens": 64,
            "scheduler.look_ahead": 0,
            "scheduler.policy": "fcfs",
            "gpu.bytes": gpu * BLOCK_BYTES,
            "cpu.bytes": cpu * BLOCK_BYTES,
            "disk.bytes": disk * BLOCK_BYTES,
            **given,
        }
        way = Way(1e9, 0.0)
        return Plan(model, Settings.load(None, values, {}), OneSecond(), Ways(way, way, way, way))

    return make


@pytest.fixture(scope="session")
def one_by_one() -> Callable[..., Workload]:
    """`one_by_one("AAB", blocks=2)`: a request a letter, each after the last one's end.

    A prompt is `blocks` full blocks of the letter's own tokens and a token behind them; one token is generated.
    """

    def make(letters: str, blocks: int = 2, output_tokens: int = 1) -> Workload:
        requests = [
            PlannedRequest(0.0, partial(prompt, letter, blocks), blocks * BLOCK + 1, output_tokens)
            for letter in letters
        ]
        return Workload("letters", requests, outstanding=1)

    return make


def prompt(letter: str, blocks: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.arange(blocks * BLOCK + 1, dtype=np.uint32) + ord(letter) * 1000
