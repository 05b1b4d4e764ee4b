"""The wheel of this tree, and fresh environments that have it with an extra and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from benchmarks.common.harness import BenchmarkError
from benchmarks.wheels import build_wheel
from tests.install.environments import Environment


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Environment]:
    """`environment(extra)`: made once for a run. Skips where there is no package index."""
    folder = tmp_path_factory.mktemp("install")

    @cache
    def make(extra: str) -> Environment:
        try:
            wheel = next(folder.glob("*.whl"), None) or build_wheel(folder)
            return Environment(folder / (extra or "client"), wheel, extra)
        except BenchmarkError as error:
            pytest.skip(f"no wheel can be built and installed here: {error}")

    return make


@pytest.fixture(scope="session")
def client(environment: Callable[[str], Environment]) -> Environment:
    """`pip install prefixd`."""
    return environment("")


@pytest.fixture(scope="session")
def sidecar(environment: Callable[[str], Environment]) -> Environment:
    """`pip install 'prefixd[daemon]'`."""
    return environment("daemon")
