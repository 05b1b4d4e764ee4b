"""The GPU tier is resized while requests run: the memory is the system's again, and the answers stay the same."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from prefixd.v1 import admin_pb2, cache_pb2
from tests.daemons import Remote, collect

pytestmark = pytest.mark.slow

LARGE = 4 << 20
SMALL = 1 << 20
GPU = cache_pb2.TIER_GPU


@pytest.fixture(scope="module")
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "log"


@pytest.fixture(scope="module")
def remote(launch: Callable[..., Remote], with_model: dict[str, str | int], audit_log: Path) -> Remote:
    remote = launch({**with_model, "gpu.bytes": LARGE, "server.audit_log": str(audit_log)})
    remote.until(lambda stats: stats.worker.state == admin_pb2.WorkerStats.STATE_READY)
    return remote


@pytest.fixture(autouse=True)
def adds_up(remote: Remote) -> Iterator[None]:
    yield
    remote.settled()
    assert not remote.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).violations


def resize(remote: Remote, nbytes: int, **options: Any) -> admin_pb2.ResizeTierResponse:
    *_, last = remote.admin.ResizeTier(admin_pb2.ResizeTierRequest(tier=GPU, nbytes=nbytes, **options), timeout=120)
    assert last.done
    return last


def memory_bytes(pid: int) -> int:
    """What the system has given to the GPU tier's file of the daemon."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # a file that was closed meanwhile
            if "prefixd-gpu-tier" in os.readlink(link):
                return os.stat(link).st_blocks * 512
    raise AssertionError("the daemon has no GPU tier")


def check_size(remote: Remote, nbytes: int) -> None:
    assert remote.tier(GPU).capacity_bytes == nbytes
    assert memory_bytes(remote.daemon.pid) == nbytes


def test_under_load_to_a_quarter_and_back(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    prompts = [prompt(64) + prompt(40, variant) for variant in range(1, 9)]
    expected = [remote.generate(tokens, max_tokens=120, salt=b"alone").tokens for tokens in prompts]
    ended = threading.Event()

    def generate(number: int) -> int:
        rounds = 0
        while not ended.is_set() or not rounds:
            answer = remote.generate(prompts[number], max_tokens=120, salt=bytes([rounds % 3]))
            assert answer.tokens == expected[number]
            rounds += 1
        return rounds

    with ThreadPoolExecutor(len(prompts)) as threads:
        counts = [threads.submit(generate, number) for number in range(len(prompts))]
        try:
            remote.until(lambda stats: stats.worker.running_requests > 0)
            for _ in range(2):
                for nbytes in (SMALL, LARGE):
                    answer = resize(remote, nbytes)
                    assert (answer.nbytes, answer.target_bytes, answer.unfinished) == (nbytes, nbytes, "")
                    check_size(remote, nbytes)
        finally:
            ended.set()
        assert sum(count.result() for count in counts) >= len(prompts)


def test_what_was_cached_goes_down_and_is_found_there(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    remote.evict_all()
    first = remote.generate(prompt(400, 50))
    others = [prompt(1200, variant) for variant in range(51, 56)]
    remote.generate_all(others)
    answer = resize(remote, SMALL)
    assert answer.evicted_blocks and answer.before_bytes == LARGE
    again = remote.generate(prompt(400, 50))
    assert again.tokens == first.tokens and sum(again.hits) == 384
    resize(remote, LARGE)


def test_a_worker_killed_in_the_middle(remote: Remote, prompt: Callable[..., list[int]]) -> None:
    """Its successor is handed what there is then; what ran ends with the same tokens."""
    tokens = prompt(80, 60)
    expected = remote.generate(tokens, max_tokens=400, salt=b"alone").tokens
    for nbytes in (SMALL, LARGE):
        stream = remote.begin(tokens, max_tokens=400, salt=bytes([nbytes >> 20]))
        with ThreadPoolExecutor(2) as threads:
            answer = threads.submit(collect, stream)
            stats = remote.until(lambda stats: stats.worker.running_requests == 1 and stats.worker.pid)
            resizing = threads.submit(resize, remote, nbytes)
            os.kill(stats.worker.pid, signal.SIGKILL)
            assert resizing.result().unfinished == ""
            assert answer.result().tokens == expected
        check_size(remote, nbytes)


def test_a_request_that_needs_more_is_waited_for(
    remote: Remote, prompt: Callable[..., list[int]], refused: Any
) -> None:
    """Those that run end as they would have; those that come, or wait, are told why they cannot run."""
    assert resize(remote, LARGE).unfinished == ""
    stream = remote.begin(prompt(40, 70), max_tokens=1900)  # 122 blocks; the tier has 512, and an eighth of it 64
    remote.until(lambda stats: stats.worker.running_requests == 1)
    answer = resize(remote, LARGE // 8, wait_s=1.5)
    assert "1 requests run, of which the largest may come to need 122 frames; " in answer.unfinished
    assert "of 122 frames of the gpu tier are held; most by request r" in answer.unfinished
    assert answer.nbytes == 122 * 8192
    check_size(remote, answer.nbytes)
    with ThreadPoolExecutor(1) as threads:
        resizing = threads.submit(resize, remote, LARGE // 8, wait_s=60)
        assert len(collect(stream).tokens) == 1900
        assert resizing.result().unfinished == ""
    check_size(remote, LARGE // 8)
    with refused("RESOURCE_EXHAUSTED", str(LARGE // 8)):
        remote.generate(prompt(40, 71), max_tokens=1900)
    resize(remote, LARGE)


def test_the_audit_log_tells_of_a_resize_that_was_made_and_of_none_that_was_refused(
    remote: Remote, audit_log: Path, refused: Callable[..., Any]
) -> None:
    def told() -> list[int]:
        lines = map(json.loads, audit_log.read_text().splitlines())
        return [line["nbytes"] for line in lines if line["event"] == "resized"]

    resize(remote, 2 * SMALL)
    remote.until(lambda _: told()[-1:] == [2 * SMALL])  # a thread writes them, in order
    before = len(told())
    with refused("INVALID_ARGUMENT"):
        resize(remote, 1)
    resize(remote, SMALL)
    resize(remote, LARGE)
    remote.until(lambda _: len(told()) >= before + 2)
    assert told()[before:] == [SMALL, LARGE]


def test_what_cannot_be_is_refused(remote: Remote, refused: Any) -> None:
    def ask(**what: Any) -> None:
        list(remote.admin.ResizeTier(admin_pb2.ResizeTierRequest(**what)))

    before = remote.tier(GPU).capacity_bytes
    with refused("INVALID_ARGUMENT", "TIER_GPU"):
        ask(nbytes=LARGE)
    with refused("UNIMPLEMENTED", "TIER_CPU", "cpu.bytes"):
        ask(tier=cache_pb2.TIER_CPU, nbytes=LARGE)
    with refused("UNIMPLEMENTED", "77"):
        ask(tier=77, nbytes=LARGE)
    with refused("INVALID_ARGUMENT", "16383", "at least 2"):
        ask(tier=GPU, nbytes=16383)
    with refused("RESOURCE_EXHAUSTED", str(1 << 60), "give at most"):
        ask(tier=GPU, nbytes=1 << 60)
    for wait_s in (-1.0, float("nan"), float("inf")):
        with refused("INVALID_ARGUMENT", f"wait_s = {wait_s:g}"):
            ask(tier=GPU, nbytes=LARGE, wait_s=wait_s)
    assert remote.tier(GPU).capacity_bytes == before
    remote.admin.Drain(admin_pb2.DrainRequest())
    with refused("FAILED_PRECONDITION", "the daemon drains"):
        ask(tier=GPU, nbytes=LARGE)


def test_a_daemon_without_a_model_has_no_gpu_tier(launch: Callable[..., Remote], refused: Any) -> None:
    sidecar = launch({"cpu.bytes": "1MiB", "disk.bytes": 0})
    with refused("UNIMPLEMENTED", "no model", "worker.embedded"):
        resize(sidecar, LARGE)
