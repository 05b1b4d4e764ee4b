"""Who gets the arena, and who does not."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prefixd.client import MemoryUnavailable
from prefixd.client.connecting.mapped_arena import Arena, fetch_arena
from prefixd.server.rpc.sockets import memory_listener as memory_door
from prefixd.server.rpc.sockets.memory_listener import MemoryListener
from tests.waiting import until

NBYTES = 8192


@pytest.fixture
async def door(folder: Path) -> AsyncIterator[MemoryListener]:
    fd = os.memfd_create("arena")
    os.ftruncate(fd, NBYTES)
    os.pwrite(fd, b"hello", 4096)
    made = MemoryListener(folder / "m", fd, NBYTES, {"alive"}.__contains__)
    await made.start()
    yield made
    await made.close()
    os.close(fd)


async def fetch(door: MemoryListener, session_id: str) -> Arena:
    return await asyncio.to_thread(fetch_arena, str(door.path), session_id, 60.0)


async def test_a_live_session_maps_the_same_memory(door: MemoryListener) -> None:
    arena = await fetch(door, "alive")
    assert arena.nbytes == NBYTES
    assert arena.bytes_at(4096, 5).tobytes() == b"hello"
    other = await fetch(door, "alive")
    arena.bytes_at(0, 3)[:] = list(b"abc")
    assert other.bytes_at(0, 3).tobytes() == b"abc"
    arena.close()
    other.close()


@pytest.mark.parametrize("session_id", ["dead", "", "x" * 10_000])
async def test_anyone_else_is_refused(door: MemoryListener, session_id: str) -> None:
    with pytest.raises(MemoryUnavailable):
        await fetch(door, session_id)
    (await fetch(door, "alive")).close()


async def test_another_user_is_refused_and_the_log_says_so_once(
    door: MemoryListener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_door, "_peer", lambda visitor: (os.getpid(), os.geteuid() + 1))
    for _ in range(3):  # as an engine's connector goes on to ask
        with pytest.raises(MemoryUnavailable, match="may not map"):
            await fetch(door, "alive")
    assert len([record for record in caplog.records if "asked for the memory" in record.getMessage()]) == 1


async def test_a_silent_visitor_keeps_nobody_out(door: MemoryListener) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(door.path))
        (await fetch(door, "alive")).close()


@pytest.mark.parametrize(("mine", "in_all"), [(4, 64), (16, 4)])
async def test_too_many_silent_visitors_keep_nobody_out(
    door: MemoryListener, monkeypatch: pytest.MonkeyPatch, mine: int, in_all: int
) -> None:
    monkeypatch.setattr(memory_door, "_VISITORS_OF_A_USER", mine)
    monkeypatch.setattr(memory_door, "_VISITORS", in_all)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(9)]
    try:
        for each in silent:
            each.connect(str(door.path))
        (await fetch(door, "alive")).close()
        assert len(door._visits) <= 4
        silent[0].settimeout(60)
        told = await asyncio.to_thread(silent[0].recv, 4096)
        assert f"of user {os.geteuid()} and 4 in all wait at the memory door" in json.loads(told)["error"]
    finally:
        for each in silent:
            each.close()
    await until(lambda: not door._visits)
    assert not door._visits_of.total()


async def test_a_user_who_crowds_the_door_sends_only_its_own_away(
    door: MemoryListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_door, "_VISITORS_OF_A_USER", 2)
    uids = iter([7, 8, 8, 8, 8])
    peers: dict[int, int] = {}

    def peer(visitor: socket.socket) -> tuple[int, int]:
        return os.getpid(), peers.setdefault(visitor.fileno(), next(uids, 8))

    monkeypatch.setattr(memory_door, "_peer", peer)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(5)]
    for each in silent:
        each.connect(str(door.path))
        each.settimeout(60)
    for gone in silent[1:3]:
        assert b"of user 8" in await asyncio.to_thread(gone.recv, 4096)
    assert sorted(uid for uid, _ in door._visits.values()) == [7, 8, 8]
    for each in silent:
        each.close()


async def test_who_is_let_in_can_be_decided_elsewhere(folder: Path) -> None:
    fd = os.memfd_create("arena")
    os.ftruncate(fd, NBYTES)
    visits: list[tuple[str, int, int]] = []

    def visit(session_id: str, uid: int, pid: int, visitor: socket.socket, sent: int) -> str | None:
        visits.append((session_id, uid, pid))
        return "not for this session" if session_id == "other" else None

    let_in = [True]
    door = MemoryListener(folder / "m", fd, NBYTES, lambda _: True, admit=visit, may_map=lambda uid: let_in[0])
    await door.start()
    (await fetch(door, "alive")).close()
    assert visits == [("alive", os.geteuid(), os.getpid())]
    with pytest.raises(MemoryUnavailable, match="not for this session"):
        await fetch(door, "other")
    let_in[0] = False
    with pytest.raises(MemoryUnavailable, match="may not map the memory"):
        await fetch(door, "alive")
    await door.close()
    os.close(fd)


async def test_only_the_owner_may_connect_and_the_socket_goes_at_close(door: MemoryListener) -> None:
    assert door.path.stat().st_mode & 0o777 == 0o600
    await door.close()
    assert not door.path.exists()
    with pytest.raises(MemoryUnavailable, match="cannot get the arena"):
        await fetch(door, "alive")


async def test_a_leftover_is_replaced_and_a_living_socket_is_not(door: MemoryListener, folder: Path) -> None:
    leftover = folder / "old"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(leftover))
    replaced = MemoryListener(leftover, 0, 1, lambda _: False)
    await replaced.start()
    await replaced.close()
    with pytest.raises(OSError, match="in use"):
        await MemoryListener(door.path, 0, 1, lambda _: False).start()
    (await fetch(door, "alive")).close()


async def test_visits_leave_no_descriptors(door: MemoryListener) -> None:
    (await fetch(door, "alive")).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        (await fetch(door, "alive")).close()
        with pytest.raises(MemoryUnavailable):
            await fetch(door, "dead")
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_a_visitor_parks_no_descriptors_at_the_door(door: MemoryListener) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as visitor, open(os.devnull, "rb") as sent:
        visitor.setblocking(False)
        await loop.sock_connect(visitor, str(door.path))
        for _ in range(2):
            socket.send_fds(visitor, [b"a"], [sent.fileno()])
        assert "error" in json.loads(await asyncio.wait_for(loop.sock_recv(visitor, 4096), 2.0))


def test_an_arena_smaller_than_announced_is_refused() -> None:
    fd = os.memfd_create("small")
    os.ftruncate(fd, 4096)
    with pytest.raises(MemoryUnavailable, match=r"8192 bytes.*4096"):
        Arena(fd, 8192)
    os.close(fd)


def test_a_view_outlives_the_arena_it_came_from() -> None:
    fd = os.memfd_create("arena")
    os.ftruncate(fd, NBYTES)
    arena = Arena(fd, NBYTES)
    view = arena.bytes_at(10, 4)
    arena.close()
    arena.close()
    view[:] = 7
    assert os.pread(fd, 4, 10) == b"\x07\x07\x07\x07"
    os.close(fd)


@pytest.mark.parametrize(("mine", "in_all"), [(3, 16), (16, 3)])
async def test_a_descriptor_that_cannot_be_closed_keeps_nobody_waiting(
    door: MemoryListener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mine: int, in_all: int
) -> None:
    """As one of a network file system whose server is gone; it is not a process's, as an honest client's is."""
    hanging, really = threading.Event(), os.close
    hung: list[str] = []

    def close(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path / "hangs"):
            hung.append(threading.current_thread().name)
            hanging.wait(30)
        really(descriptor)

    monkeypatch.setattr(memory_door, "_CLOSING", in_all)
    monkeypatch.setattr(memory_door, "_CLOSING_OF_A_USER", mine)
    monkeypatch.setattr("prefixd.server.rpc.sockets.memory_listener.os.close", close)
    try:
        for _ in range(6):
            assert b"no such session" in await asyncio.to_thread(send, door, tmp_path / "hangs")
        await until(lambda: len(hung) >= 3)
        (await fetch(door, "alive")).close()
        assert hung == ["prefixd-close"] * 3, "then none is received"
        assert door._may_receive_descriptor(os.geteuid() + 1) == (in_all > 3), "others have a part of their own"
    finally:
        hanging.set()
    await until(lambda: not door._closing)


async def test_a_descriptor_without_a_thread_to_close_it_is_closed_later(
    door: MemoryListener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    file, sending = tmp_path / "sent", asyncio.to_thread(send, door, tmp_path / "sent")
    with monkeypatch.context() as short:
        task = asyncio.create_task(sending)
        while not door._visits:  # its own thread runs
            await asyncio.sleep(0)
        short.setattr("threading.Thread.start", no_thread)
        await asyncio.wait_for(task, 30)
        assert [uid for uid, _ in door._unclosed] == [os.geteuid()] and open_here(file)
    (await fetch(door, "alive")).close()
    await until(lambda: not (door._closing or open_here(file)))


def send(door: MemoryListener, path: Path) -> bytes:
    """The answer to a visitor that sends a file's descriptor."""
    with socket.socket(socket.AF_UNIX) as visitor, path.open("w") as file:
        visitor.settimeout(30)
        visitor.connect(str(door.path))
        socket.send_fds(visitor, [b"dead\n"], [file.fileno()])
        return visitor.recv(1000)


def open_here(path: Path) -> bool:
    """Whether a descriptor of this process is of the file."""
    links = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return any(link.is_symlink() and os.readlink(link) == str(path) for link in links)
