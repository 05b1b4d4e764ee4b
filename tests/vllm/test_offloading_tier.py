"""The tier by itself, called as vLLM's scheduler calls it, with a host pool and a daemon but without an engine."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering import base
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob

from prefixd.base.errors import ConfigError
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import NamespaceSpec, PartSpec
from prefixd.integrations.vllm import offloading
from prefixd.integrations.vllm.offloading import secondary_tier, tier_releases
from tests.waiting import wait_until

CHUNKS, CHUNK_BYTES = 64, 4096
AT_ONCE_S = 0.5  # a call to the daemon that stands still would take a second

Pool = np.ndarray[Any, Any]


class Scheduler:
    """A tier as vLLM's scheduler uses it."""

    def __init__(self, address: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        parts = (PartSpec("chunk", 0, CHUNK_BYTES),)
        without_groups = SimpleNamespace(kv_cache_groups=[])
        monkeypatch.setattr(secondary_tier, "callers_configuration", lambda: (None, without_groups))
        monkeypatch.setattr(secondary_tier, "namespace_of", lambda *_: NamespaceSpec("vllm/tier", 8, parts))
        monkeypatch.setattr(secondary_tier, "prefix_groups", lambda _: frozenset({0}))
        self.pool: Pool = np.zeros((CHUNKS, CHUNK_BYTES), np.int8)
        self.view = memoryview(self.pool)
        self.tier = offloading.PrefixdTier(
            SimpleNamespace(config=None), self.view, "PrefixdTier", address=address, **options
        )
        self._jobs = 0
        self.slowest_s = 0.0

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the tier and notes how long the scheduler was kept."""
        began_s = time.monotonic()
        answer = getattr(self.tier, name)(*arguments)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
        return answer

    def found(self, keys: list[Any], request: ReqContext) -> list[LookupResult]:
        """What the lookups of a request say in the end, over as many steps as that takes."""

        def step() -> list[LookupResult]:
            answers = [self.call("lookup", key, request) for key in keys]
            self.call("on_schedule_end", None)
            return [] if LookupResult.RETRY in answers else answers

        return wait_until(step, "a lookup has no answer", 20)

    def submit(self, way: str, keys: list[Any], chunks: list[int], request: ReqContext) -> None:
        """`way` is "load" or "store"."""
        self._jobs += 1
        job = TransferJob(self._jobs, keys, np.array(chunks, np.int32), way == "load", request)
        self.call(f"submit_{way}", job)

    def result(self) -> Any:
        """That of the one job that is under way."""
        (finished,) = wait_until(lambda: list(self.call("get_finished_jobs")), "the job does not end", 20)
        return finished


@pytest.fixture
def scheduler(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    made = Scheduler(daemon.address, monkeypatch)
    yield made
    made.call("shutdown")
    made.view.release()  # as vLLM does; BufferError where the tier still refers to it


def request_of(scheduler: Scheduler, name: str) -> ReqContext:
    context = ReqContext(name)
    scheduler.call("on_new_request", context)
    return context


def keys_of(name: str, count: int, group: int = 0) -> list[Any]:
    return [make_offload_key(hashlib.sha256(f"{name} {place}".encode()).digest(), group) for place in range(count)]


def store(scheduler: Scheduler, keys: list[Any], request: ReqContext) -> Pool:
    """Stores random chunks; what was in them."""
    rng = np.random.default_rng(len(keys))
    scheduler.pool[: len(keys)] = rng.integers(-128, 128, (len(keys), CHUNK_BYTES), np.int8)
    scheduler.submit("store", keys, list(range(len(keys))), request)
    assert scheduler.result().success
    return scheduler.pool[: len(keys)].copy()


def test_chunks_come_back_into_other_places(scheduler: Scheduler) -> None:
    request = request_of(scheduler, "there and back")
    keys = keys_of("there and back", 20)
    assert scheduler.found(keys, request) == [LookupResult.MISS] * 20
    scheduler.call("on_request_finished", request)
    stored = store(scheduler, keys, request)
    again = request_of(scheduler, "again")
    assert scheduler.found(keys, again) == [LookupResult.HIT] * 20
    places = list(range(60, 40, -1))
    scheduler.submit("load", keys, places, again)
    result = scheduler.result()
    assert result.success and result.transfer_time is not None
    assert (scheduler.pool[places] == stored).all()


def test_nothing_behind_a_missing_chunk_of_a_prefix_is_found(scheduler: Scheduler) -> None:
    """Of a group with a window each chunk counts by itself."""
    request = request_of(scheduler, "gaps")
    for group, there in ((0, [True] * 40 + [False] * 40), (1, [True] * 40 + [False] + [True] * 39)):
        keys = keys_of("gaps", 80, group)
        for first in (0, 41):
            for half in range(first, min(first + 40, 80), 20):
                store(scheduler, keys[half : min(half + 20, first + 40)], request)
        found = scheduler.found(keys, request)
        wanted = [LookupResult.HIT if one else LookupResult.MISS for one in there]
        # What was asked for together with the missing one is known, too; what lies further behind was not asked for.
        assert found[:41] == wanted[:41]
        assert found[64:] == wanted[64:]


def test_a_load_of_which_some_are_missing(scheduler: Scheduler) -> None:
    """vLLM is told which came, and does not ask for the others again and again."""
    request = request_of(scheduler, "some")
    keys = keys_of("some", 6)
    stored = store(scheduler, keys[:4], request)
    assert scheduler.found(keys, request)[:4] == [LookupResult.HIT] * 4
    before = scheduler.pool[34:36].copy()
    scheduler.submit("load", keys, list(range(30, 36)), request)
    result = scheduler.result()
    assert not result.success and sorted(result.successful_keys) == sorted(keys[:4])
    assert (scheduler.pool[30:34] == stored).all() and (scheduler.pool[34:36] == before).all()
    assert scheduler.found(keys[4:], request) == [LookupResult.MISS] * 2


def test_a_pool_place_that_does_not_exist(scheduler: Scheduler) -> None:
    request = request_of(scheduler, "nowhere")
    keys = keys_of("nowhere", 2)
    for way in ("store", "load"):
        scheduler.submit(way, keys, [0, CHUNKS], request)
        assert not scheduler.result().success


def test_what_was_computed_before_a_reset_is_neither_found_nor_stored(scheduler: Scheduler) -> None:
    old = request_of(scheduler, "before")
    keys = keys_of("before", 4)
    store(scheduler, keys, old)
    scheduler.submit("store", keys_of("under way", 4), [0, 1, 2, 3], old)
    scheduler.call("drain_jobs")
    assert scheduler.result().success
    scheduler.submit("store", keys_of("late", 4), [0, 1, 2, 3], old)  # it was computed with the weights before
    assert not scheduler.result().success
    new = request_of(scheduler, "after")
    assert scheduler.found([*keys, *keys_of("late", 4)], new) == [LookupResult.MISS] * 8
    store(scheduler, keys, new)
    scheduler.call("on_request_finished", new)
    assert scheduler.found(keys, request_of(scheduler, "later")) == [LookupResult.HIT] * 4


def test_a_tier_that_only_reads(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Scheduler(daemon.address, monkeypatch, save=False)
    request, keys = request_of(reader, "reader"), keys_of("reader", 3)
    reader.submit("store", keys, [0, 1, 2], request)
    assert not reader.result().success
    assert reader.found(keys, request) == [LookupResult.MISS] * 3
    reader.call("shutdown")


def test_the_scheduler_is_never_kept_by_a_daemon_that_stands_still(scheduler: Scheduler, daemon: DaemonProcess) -> None:
    request = request_of(scheduler, "still")
    keys = keys_of("still", 8)
    stored = store(scheduler, keys, request)
    scheduler.slowest_s = 0.0
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        other = request_of(scheduler, "other")
        scheduler.submit("load", keys, list(range(8, 16)), request)
        assert scheduler.found(keys_of("other", 8), other) == [LookupResult.MISS] * 8
        result = scheduler.result()
        assert not result.success and not result.successful_keys
        scheduler.submit("store", keys_of("away", 2), [0, 1], request)
        assert not scheduler.result().success
        assert scheduler.slowest_s < AT_ONCE_S
    finally:
        os.kill(daemon.pid, signal.SIGCONT)

    def back() -> bool:
        again = request_of(scheduler, f"back {time.monotonic()}")
        return scheduler.found(keys, again) == [LookupResult.HIT] * 8

    wait_until(back, "no hits after the daemon's return", 30)
    scheduler.submit("load", keys, list(range(8, 16)), request)
    assert scheduler.result().success
    assert (scheduler.pool[8:16] == stored).all()


def test_a_release_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(base, "JobResult")
    with pytest.raises(ConfigError, match=r"lacks what prefixd needs of it: \S+base:JobResult;"):
        _ = offloading.PrefixdTier


def test_a_release_with_a_new_method(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tier_releases.log, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(SecondaryTierManager, "price", lambda self: 0, raising=False)
    _ = offloading.PrefixdTier
    (said,) = {record.getMessage() for record in caplog.records if "does not know" in record.getMessage()}
    assert "SecondaryTierManager.price" in said


def test_this_release_is_known_whole(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    _ = offloading.PrefixdTier
    assert not [record for record in caplog.records if "does not know" in record.getMessage()]


def test_jobs_of_older_releases() -> None:
    assert tier_releases.chunk_ids(SimpleNamespace(block_ids=np.array([3, 1]))) == [3, 1]
    assert tier_releases.job_result(job_id=1, success=True, of_a_later_release=7).job_id == 1


def test_outside_of_an_offloading_connector() -> None:
    with pytest.raises(ConfigError, match="does not make PrefixdTier from its OffloadingConnector"):
        tier_releases.callers_configuration()
