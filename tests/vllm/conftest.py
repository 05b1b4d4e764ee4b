"""Tiny models, the tokens that vLLM alone gives for them, and daemons; models are made once for a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest
from benchmarks.engines.vllm_models import save_gemma3, save_llama
from prefixd.cli.demo.daemon_process import DaemonProcess
from tests.vllm.forked import ForkedEngine
from tests.vllm.served import DAEMON, Expected, NewRequests, StartEngine, Tokens, always, tokens_of


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="session")
def new_requests() -> NewRequests:
    return NewRequests()


@pytest.fixture(scope="session")
def engine_logs() -> list[Path]:
    """Of all engines that `make_engine` has made."""
    return []


@pytest.fixture(autouse=True)
def show_log(engine_logs: list[Path]) -> Iterator[None]:
    """Prints what prefixd has logged in engines during the test, for pytest to show where the test fails."""
    before = {log: log.stat().st_size for log in engine_logs if log.exists()}
    yield
    for log in engine_logs:
        if not log.exists():
            continue
        with log.open("rb") as file:
            file.seek(before.get(log, 0))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if "prefixd" in line]
        if lines:
            print(f"{log}:", *lines, sep="\n  ")


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory: pytest.TempPathFactory, engine_logs: list[Path]) -> StartEngine:
    """`make_engine(model, daemon or None, connector's options, **arguments)`: an EngineProcess, not yet started.

    It is forked from one that has vLLM imported, unless `forked=False`: see forked.py.
    """

    def make(
        model: Path,
        daemon: DaemonProcess | None,
        options: dict[str, Any] | None = None,
        *,
        forked: bool = True,
        **arguments: Any,
    ) -> EngineProcess:
        if daemon is not None:
            arguments.setdefault("kv_transfer", always(daemon.address, **(options or {})))
        engine = ForkedEngine if forked else EngineProcess
        engine_logs.append(tmp_path_factory.mktemp("engine") / "engine.log")
        return engine(model, log=engine_logs[-1], **arguments)

    return make


@pytest.fixture(scope="session")
def alone(llama: Path, make_engine: StartEngine) -> Iterator[EngineProcess]:
    """vLLM without a connector and without a prefix cache of its own."""
    with make_engine(llama, None, enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def expected(alone: EngineProcess) -> Expected:
    """The tokens of requests to `llama` as vLLM alone computes them, whatever their salts."""

    def tokens(requests: Sequence[EngineRequest]) -> Tokens:
        return tokens_of(alone.generate(requests))

    return tokens


@pytest.fixture(scope="session")
def gemma3_expected(gemma3: Path, make_engine: StartEngine) -> Iterator[Expected]:
    """As `expected`, for `gemma3`."""
    with make_engine(gemma3, None, enable_prefix_caching=False) as engine:
        yield lambda requests: tokens_of(engine.generate(requests))


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(DAEMON) as running:
        yield running
