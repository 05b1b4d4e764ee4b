"""Models with recurrent layers, each built once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from prefixd.worker.recurrent.experts import STEADY_EXPERTS, register_experts, set_experts
from tests.worker.recurrent.flattened import Runner
from tests.worker.tiny_models import build_recurrent

CELL = 16


@pytest.fixture(scope="session")
def runner_of() -> Callable[[str], Runner]:
    @cache
    def build(name: str) -> Runner:
        model = build_recurrent(name)
        register_experts()
        set_experts(model, STEADY_EXPERTS)
        return Runner(model, CELL)

    return build
