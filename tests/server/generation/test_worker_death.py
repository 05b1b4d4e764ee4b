"""The worker is killed: nothing cached is lost, and the answers are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixd.server.figures.metrics import MetricsCollector
from prefixd.v1 import admin_pb2, cache_pb2
from tests.daemons import Remote, collect

pytestmark = pytest.mark.slow

READY = admin_pb2.WorkerStats.STATE_READY
FAILED = admin_pb2.WorkerStats.STATE_FAILED


@pytest.fixture(scope="module")
def remote(launch: Callable[..., Remote], with_model: dict[str, str | int]) -> Remote:
    return launch({**with_model, "gpu.bytes": "4MiB"})


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
    remote: Remote, prompt: Callable[..., list[int]]
) -> None:
    shared = prompt(64)
    prompts = [shared + prompt(20, variant) for variant in range(1, 7)]
    before = remote.stats().worker.restarts
    streams = [remote.begin(tokens, max_tokens=300) for tokens in prompts]
    with ThreadPoolExecutor(len(streams)) as threads:
        answers = [threads.submit(collect, stream) for stream in streams]
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


def test_the_next_worker_finds_the_gpu_tier_as_it_was(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    """Requests that come while there is no worker wait for it, and one whose caller goes meanwhile is forgotten."""
    tokens = prompt(100)
    first = remote.generate(tokens)
    assert first.hits == (0, 0, 0)
    running = remote.begin(prompt(40, 9), max_tokens=1900)
    next(running)
    remote.until(lambda stats: stats.worker.running_requests == 1)
    before = remote.stats().worker.restarts
    kill_worker(remote)
    remote.until(lambda stats: stats.worker.restarts == before + 1)
    running.cancel()
    remote.until(lambda stats: stats.scheduler.waiting_requests == 0)
    streams = [remote.begin(tokens), remote.begin([*tokens, 1, 2, 3])]
    again, longer = [collect(stream) for stream in streams]
    assert [answer.hits for answer in (again, longer)] == [(96, 0, 0)] * 2
    assert again.tokens == first.tokens
    assert longer.tokens == remote.generate([*tokens, 1, 2, 3], salt=b"nothing cached").tokens


def test_a_worker_that_dies_again_and_again_is_given_up(
    launch: Callable[..., Remote], with_model: dict[str, str | int], prompt: Callable[..., list[int]], refused: Any
) -> None:
    remote = launch({**with_model, "worker.restart_limit": 1, "disk.bytes": 0})
    waiting = remote.begin(prompt(40), max_tokens=1900)
    next(waiting)
    kill_worker(remote)
    remote.until(lambda stats: stats.worker.restarts == 1)
    kill_worker(remote)
    stats = remote.until(lambda stats: stats.worker.state == FAILED)
    assert stats.worker.pid == 0
    assert stats.worker.error == "signal 9"
    with refused("UNAVAILABLE", "worker"):
        list(waiting)
    with refused("UNAVAILABLE", "given up", "signal 9"):
        remote.generate(prompt(40))
    assert "given up" in remote.daemon.log.read_text()
    # The cache itself goes on.
    with remote.session() as session:
        namespace = remote.register(session.session_id, "engine", 4096)
        assert remote.put(session.session_id, namespace, range(8), bytes(8192)).committed == 2
    remote.settled()


def test_a_model_that_cannot_be_loaded_is_one_clear_line(
    launch: Callable[..., Remote],
    with_model: dict[str, str | int],
    model_directory: Path,
    tmp_path: Path,
    refused: Any,
) -> None:
    shutil.copy(model_directory / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(4096))  # whole by its name and size: only the worker reads it
    remote = launch({**with_model, "worker.model": str(tmp_path), "disk.bytes": 0})
    stats = remote.until(lambda stats: stats.worker.state == FAILED)
    assert str(tmp_path) in stats.worker.error
    with refused("UNAVAILABLE", str(tmp_path), "header"):
        remote.generate([1, 2, 3])
    log = remote.daemon.log.read_text()
    assert "Traceback" not in log
    errors = [line for line in log.splitlines() if " ERROR " in line]
    assert len(errors) == 1, log
    assert str(tmp_path) in errors[0]
    assert "given up" in errors[0]


def test_a_worker_that_was_given_up_is_seen_by_everyone_who_asks(
    launch: Callable[..., Remote], with_model: dict[str, str | int], refused: Any
) -> None:
    remote = launch({**with_model, "gpu.bytes": 4096, "disk.bytes": 0})
    stats = remote.until(lambda stats: stats.worker.state == FAILED)
    assert stats.worker.error.startswith("gpu.bytes = 4096 holds 0 frames")
    for troubles in (stats.troubles, remote.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).troubles):
        (trouble,) = troubles
        assert trouble.part == "worker" and "it was given up: gpu.bytes = 4096 holds 0 frames" in trouble.what
        assert "raise gpu.bytes" in trouble.remedy and "start the daemon again" in trouble.remedy
    figures = {family.name: family.samples for family in MetricsCollector(stats).collect()}
    assert [sample.value for sample in figures["prefixd_worker_up"]] == [0]
    assert [sample.labels for sample in figures["prefixd_trouble_seconds"]] == [{"part": "worker"}]
    health = health_pb2_grpc.HealthStub(remote.channel)

    def serving(service: str) -> bool:
        status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    assert not serving("prefixd.v1.Inference")
    assert serving("") and serving("prefixd.v1.PrefixCache") and serving("prefixd.v1.Admin"), "the cache goes on"
    resize = admin_pb2.ResizeTierRequest(tier=cache_pb2.TIER_GPU, nbytes=1 << 20)
    with refused("FAILED_PRECONDITION", "there is no gpu tier: the worker was given up: gpu.bytes = 4096"):
        list(remote.admin.ResizeTier(resize))
    with pytest.raises(grpc.RpcError) as caught:
        remote.generate([1, 2, 3])
    assert ("prefixd-answered", "yes") in caught.value.trailing_metadata(), "the daemon is there"


def test_a_config_json_with_a_wrong_value_is_one_clear_line(
    launch: Callable[..., Remote],
    with_model: dict[str, str | int],
    model_directory: Path,
    tmp_path: Path,
    refused: Any,
) -> None:
    shutil.copytree(model_directory, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_key_value_heads": "two"}))
    remote = launch({**with_model, "worker.model": str(tmp_path), "disk.bytes": 0})
    with refused("UNAVAILABLE", str(tmp_path), "num_key_value_heads"):
        remote.generate([1, 2, 3])
    log = remote.daemon.log.read_text()
    assert "Traceback" not in log
    told = [line for line in log.splitlines() if "num_key_value_heads" in line]
    assert len(told) == 2 and all(str(tmp_path) in line for line in told), "of the tokenizer, and of the worker"


def test_a_directory_that_is_no_model_is_refused_at_the_start(
    with_model: dict[str, str | int], tmp_path: Path, serve_failing: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    run = Path(tempfile.gettempdir()) / f"prefixd-never-made-{os.getpid()}"  # a socket's path is limited
    settings = {**with_model, "data_dir": str(tmp_path / "data"), "server.socket": str(run / "s")}
    for model, words in ((tmp_path, "config.json"), (tmp_path / "none", "not a directory")):
        result = serve_failing({**settings, "worker.model": str(model)})
        (line,) = result.stderr.splitlines()
        assert result.returncode == 2
        assert str(model) in line
        assert words in line
    assert not run.exists()
