"""Limits of the process: descriptors, and memory that may be locked."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from prefixd.cache import Troubles
from prefixd.process import process_limits
from prefixd_swap import CpuArena, OutOfMemoryError
from prefixd_swap import arena as arena_module
from tests.daemons import Remote
from tests.waiting import until


@pytest.fixture
def troubles() -> Troubles:
    return Troubles(time.monotonic)


def test_the_descriptor_limit_is_raised_and_one_that_is_too_low_is_said(
    troubles: Troubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = [(256, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: allowed[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: allowed.append(both))
    assert process_limits.raise_descriptor_limit(100, 256, troubles) == 1024
    assert allowed[-1] == (1024, 1024)
    assert not list(troubles)
    assert process_limits.raise_descriptor_limit(1000, 256, troubles) == 1024
    (trouble,) = troubles
    assert trouble.part == "descriptor limit" and "1000 sessions" in trouble.what and "LimitNOFILE" in trouble.remedy


def test_running_out_of_descriptors_is_said_as_long_as_it_lasts_and_a_little_longer(troubles: Troubles) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    held: list[int] = []
    descriptors = process_limits.DescriptorCheck(troubles)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 64, before[1]))
        descriptors.check()
        assert process_limits.NOW not in troubles
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        descriptors.check()
        assert process_limits.NOW in troubles
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    descriptors.check()
    descriptors.check()
    assert process_limits.NOW in troubles, "a scraper needs a descriptor to see it"
    descriptors.check()
    assert process_limits.NOW not in troubles


def test_an_arena_that_may_not_be_locked_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = CpuArena(1 << 20)
    try:
        arena.lock()
        monkeypatch.setattr(arena_module.libc, "mlock2", lambda *_: -1, raising=False)
        with pytest.raises(OutOfMemoryError, match=r"may be swapped out .*; raise RLIMIT_MEMLOCK"):
            arena.lock()
    finally:
        arena.close()


@pytest.mark.slow
def test_a_daemon_without_descriptors_serves_whom_it_has(launch: Callable[..., Remote]) -> None:
    remote = launch({"cpu.bytes": "4MiB", "disk.bytes": "64MiB"})
    pid = remote.daemon.pid
    lasting = {each.part for each in remote.stats().troubles}  # of a machine whose hard limit is low
    with remote.session() as session:
        space = remote.register(session.session_id, "m", 4096)
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        taken = [int(fd) for fd in os.listdir(f"/proc/{pid}/fd")]
        limit = max(taken) + 4
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
        callers = [socket.socket(socket.AF_UNIX) for _ in range(limit - len(taken) + 8)]
        try:
            for caller in callers:
                caller.connect(str(remote.daemon.socket))
            stats = remote.until(lambda stats: any(each.part == process_limits.NOW for each in stats.troubles))
            assert "RLIMIT_NOFILE" in next(each.remedy for each in stats.troubles if each.part == process_limits.NOW)
            for number in range(4):
                tokens = [number, 1, 2, 3]
                remote.put(session.session_id, space, tokens, bytes([number]) * 4096)
                assert remote.get(session.session_id, space, tokens) == (1, bytes([number]) * 4096)
        finally:
            for caller in callers:
                caller.close()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
        remote.until(lambda stats: {each.part for each in stats.troubles} <= lasting)
        remote.put(session.session_id, space, [9, 9, 9, 9], bytes(4096), durable=True)


async def test_an_arena_is_locked_as_soon_as_it_may_be(troubles: Troubles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_limits, "_LOCK_S", 0.001)
    attempts: list[bool] = []

    class Arena:
        def lock(self) -> None:
            attempts.append(len(attempts) >= 2)
            if not attempts[-1]:
                raise OutOfMemoryError("not yet; raise RLIMIT_MEMLOCK")

    troubles.begin(process_limits.LOCK, "not locked; raise RLIMIT_MEMLOCK")
    await asyncio.wait_for(process_limits.watch_memory_lock(Arena(), troubles), 60)  # type: ignore[arg-type]
    assert attempts == [False, False, True] and process_limits.LOCK not in troubles


async def test_an_arena_is_locked_once_there_is_a_thread_for_it(
    troubles: Troubles,
    monkeypatch: pytest.MonkeyPatch,
    no_more_threads: Callable[[], AbstractContextManager[list[str]]],
) -> None:
    monkeypatch.setattr(process_limits, "_LOCK_S", 0.001)
    locked = asyncio.Event()

    class Arena:
        def lock(self) -> None:
            locked.set()

    troubles.begin(process_limits.LOCK, "not locked; raise RLIMIT_MEMLOCK")
    with no_more_threads() as refused:
        watch = asyncio.create_task(process_limits.watch_memory_lock(Arena(), troubles))  # type: ignore[arg-type]
        await until(lambda: len(refused) >= 3)
        assert not watch.done() and process_limits.LOCK in troubles
    await asyncio.wait_for(watch, 60)
    assert process_limits.LOCK not in troubles
