"""The worker is killed: nothing cached is lost, and the answers are those of an undisturbed run."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from prefixd.v1 import admin_pb2

if TYPE_CHECKING:
    from tests.server.conftest import Answer, Remote

READY = admin_pb2.WorkerStats.STATE_READY
FAILED = admin_pb2.WorkerStats.STATE_FAILED


@pytest.fixture(scope="module")
def remote(launch: Callable[..., Remote], with_model: dict[str, str | int]) -> Remote:
    return launch({**with_model, "GPU__BYTES": "4MiB"})


@pytest.fixture(autouse=True)
def adds_up(remote: Remote) -> Iterator[None]:
    yield
    remote.settled()


def kill_worker(remote: Remote) -> int:
    """Kills the worker that is ready; returns its pid."""
    pid: int = remote.until(lambda stats: stats.worker.state == READY and stats.worker.pid > 0).worker.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_batch_that_is_interrupted_ends_with_the_same_tokens(
    remote: Remote, prompt: Callable[..., list[int]], collector: Callable[[Any], Answer]
) -> None:
    shared = prompt(64)
    prompts = [shared + prompt(20, variant) for variant in range(1, 7)]
    before = remote.stats().worker.restarts
    streams = [remote.begin(tokens, max_tokens=300) for tokens in prompts]
    with ThreadPoolExecutor(len(streams)) as threads:
        answers = [threads.submit(collector, stream) for stream in streams]
        remote.until(lambda stats: stats.worker.running_requests == len(prompts))
        dead = kill_worker(remote)
        interrupted = [answer.result() for answer in answers]
    stats = remote.stats()
    assert stats.worker.restarts == before + 1
    assert stats.worker.pid not in (0, dead)
    assert sum(answer.finished.resumed for answer in interrupted) >= 1
    # The cache is full of what both workers computed; without it the answers are the same.
    undisturbed = [remote.generate(tokens, max_tokens=300, salt=b"undisturbed").tokens for tokens in prompts]
    assert [answer.tokens for answer in interrupted] == undisturbed
    assert len({tuple(tokens) for tokens in undisturbed}) == len(prompts)


def test_what_was_on_the_gpu_is_there_for_the_next_worker(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    tokens = prompt(100)
    first = remote.generate(tokens)
    assert first.hits == (0, 0, 0)
    kill_worker(remote)
    again = remote.generate(tokens)
    assert again.hits == (96, 0, 0)
    assert again.tokens == first.tokens


def test_requests_that_come_while_there_is_no_worker_wait_for_the_next(
    remote: Remote, prompt: Callable[..., list[int]], collector: Callable[[Any], Answer]
) -> None:
    kill_worker(remote)
    remote.until(lambda stats: stats.worker.state == admin_pb2.WorkerStats.STATE_STARTING)
    streams = [remote.begin(prompt(40, variant)) for variant in range(3)]
    answers = [collector(stream) for stream in streams]
    assert [len(answer.tokens) for answer in answers] == [12, 12, 12]


def test_cancelled_while_the_worker_is_dead(remote: Remote, prompt: Callable[..., list[int]], refused: Any) -> None:
    stream = remote.begin(prompt(40), max_tokens=1000)
    next(stream)
    assert next(stream).tokens.token_ids
    kill_worker(remote)
    remote.until(lambda stats: stats.worker.state == admin_pb2.WorkerStats.STATE_STARTING)
    stream.cancel()
    remote.until(lambda stats: stats.scheduler.waiting_requests == 0)
    kill_worker(remote)
    assert len(remote.generate(prompt(40)).tokens) == 12


def test_a_worker_that_dies_again_and_again_is_given_up(
    launch: Callable[..., Remote], with_model: dict[str, str | int], prompt: Callable[..., list[int]], refused: Any
) -> None:
    remote = launch({**with_model, "WORKER__RESTART_LIMIT": 1, "DISK__BYTES": 0})
    waiting = remote.begin(prompt(40), max_tokens=1900)
    next(waiting)
    kill_worker(remote)
    remote.until(lambda stats: stats.worker.restarts == 1)
    kill_worker(remote)
    stats = remote.until(lambda stats: stats.worker.state == FAILED)
    assert stats.worker.pid == 0
    with refused("UNAVAILABLE", "worker"):
        list(waiting)
    with refused("UNAVAILABLE", "given up", "signal 9"):
        remote.generate(prompt(40))
    assert "given up" in remote.daemon.log.read_text()
    # The cache itself goes on.
    with remote.session() as session:
        namespace = remote.register("engine", 4096)
        assert remote.put(session.session_id, namespace, range(8), bytes(8192)).committed == 2
    remote.settled()


@pytest.mark.parametrize("lacking", ["weights", "everything"])
def test_a_model_that_cannot_be_loaded_is_one_clear_line(
    launch: Callable[..., Remote],
    with_model: dict[str, str | int],
    model_directory: Path,
    tmp_path: Path,
    refused: Any,
    lacking: str,
) -> None:
    """A directory that is no model at all is refused by `prefixd serve` before it starts."""
    (tmp_path / "config.json").write_text("{}")
    if lacking == "weights":
        shutil.copy(model_directory / "config.json", tmp_path)
    remote = launch({**with_model, "WORKER__MODEL": str(tmp_path), "DISK__BYTES": 0})
    remote.until(lambda stats: stats.worker.state == FAILED)
    with refused("UNAVAILABLE", str(tmp_path)):
        remote.generate([1, 2, 3])
    log = remote.daemon.log.read_text()
    assert "Traceback" not in log
    errors = [line for line in log.splitlines() if " ERROR " in line]
    assert len(errors) == 1, log
    assert str(tmp_path) in errors[0]
