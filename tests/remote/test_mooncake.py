"""Mooncake: registered memory, a master or another host that dies or stands still, a store that is full."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from prefixd_swap.errors import RemoteFullError, RemoteStoreError
from prefixd_swap.stores import MooncakeOptions, Read, Write
from prefixd_swap.stores.mooncake.mooncake_lane import address_of
from prefixd_swap.stores.mooncake.mooncake_store import MooncakeStore
from tests.remote.mooncake_server import MooncakeServer, mooncake_folder, mooncake_server, start_master
from tests.remote.objects import (
    DEADLINE_S,
    assert_read,
    assert_works,
    found,
    joined,
    new_name,
    new_write,
    opened,
    read_of,
)
from tests.remote.processes import free_port
from tests.waiting import WAIT_S


@pytest.fixture(scope="module", autouse=True)
def client_can_be_loaded() -> None:
    mooncake_folder()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    with mooncake_server(tmp_path_factory.mktemp("own_mooncake")) as started:
        yield started


async def test_registered_memory_is_not_copied(server: MooncakeServer) -> None:
    async with opened(server.options()) as store:
        arena = memoryview(mmap.mmap(-1, 32 << 20))
        store.register(address_of(arena), len(arena))
        arena[:1024] = bytes(range(256)) * 4
        writes = [Write(new_name(), (arena[at : at + 64], arena[4096 * at : 4096 * at + 70_000])) for at in range(3)]
        await store.put(writes, 0, DEADLINE_S)
        reads = [Read(write.name, (arena[-64:], arena[(16 + n) << 20 :][:70_000])) for n, write in enumerate(writes)]
        for read, write in zip(reads, writes, strict=True):
            assert await found(store, [read, read]) == [True, True]
            assert_read([read], [write])
        assert store.copied_bytes == 0
        other = read_of(writes[1])
        assert await found(store, [other, reads[1]]) == [True, True]
        assert joined(other) == joined(writes[1])
        assert store.copied_bytes == writes[1].nbytes
        longer = [
            Read(writes[0].name, (arena[20 << 20 :][:70_065],)),
            Read(writes[1].name, (arena[:64], arena[22 << 20 :])),
        ]
        assert await store.get([*longer, reads[0]], DEADLINE_S) == [70_064] * 3
        assert joined(longer[0])[:70_064] == joined(writes[0]) and joined(longer[1])[:70_064] == joined(writes[1])


async def test_of_an_object_with_a_head_the_head_alone_is_copied(server: MooncakeServer) -> None:
    async with opened(server.options(bounce_bytes=1 << 20)) as store:
        arena = memoryview(mmap.mmap(-1, 16 << 20))
        store.register(address_of(arena), len(arena))
        arena[:1024] = bytes(range(256)) * 4
        payload, head = arena[: 4 << 20], memoryview(bytearray(range(104)))  # longer than a lane
        write = Write(new_name(), (head, payload))
        await store.put([write], 0, DEADLINE_S)
        assert store.copied_bytes == len(head)
        read = Read(write.name, (memoryview(bytearray(len(head))), arena[8 << 20 : 12 << 20]))
        assert await found(store, [read]) == [True]
        assert_read([read], [write])
        assert store.copied_bytes == 2 * len(head)


async def test_an_object_that_is_too_long(server: MooncakeServer) -> None:
    async with opened(server.options(bounce_bytes=200_000)) as store:
        await assert_works(store)
        with pytest.raises(RemoteStoreError, match="raise bounce_bytes"):
            await store.put([new_write(200_001)], 0, DEADLINE_S)


async def test_the_loop_stays_free(server: MooncakeServer) -> None:
    """While the master does not answer: a native call that held the interpreter's lock would end first."""
    async with opened(server.options()) as store:
        await assert_works(store)
        server.master.freeze()
        try:
            for call in (store.ping(0.2), store.put([new_write(10)], 0, 0.2)):
                with pytest.raises(RemoteStoreError):
                    await call
                assert isinstance(store, MooncakeStore) and store._running
        finally:
            server.master.thaw()


async def test_a_frozen_master_ends_every_call_at_its_deadline(server: MooncakeServer) -> None:
    async with opened(server.options()) as store:
        writes = [new_write(64, 300_000) for _ in range(6)]
        await store.put(writes, 0, DEADLINE_S)
        server.master.freeze()
        reads = [read_of(write) for write in writes]
        outcomes = await asyncio.gather(
            store.ping(0.3),
            store.exists([new_name()], 0.3),
            store.get(reads, 0.3),
            store.put([new_write(1 << 20)], 0, 0.3),
            store.delete([new_name()], 0.3),
            return_exceptions=True,
        )
        assert isinstance(store, MooncakeStore) and store._running, "the native calls go on"
        assert all(isinstance(outcome, RemoteStoreError) for outcome in outcomes), outcomes
        before = [joined(read) for read in reads]
        server.master.thaw()
        for write in writes:
            read = read_of(write)
            assert await store.exists([write.name, new_name()], DEADLINE_S) == [True, False]
            assert await found(store, [read]) == [True]
            assert_read([read], [write])
        await assert_works(store)
        assert [joined(read) for read in reads] == before


async def test_another_host_stands_still(server: MooncakeServer) -> None:
    """Who has the objects does not answer: registered memory is given back when the native call has ended."""
    async with opened(server.options()) as store:
        arena = memoryview(mmap.mmap(-1, 4 << 20))
        store.register(address_of(arena), len(arena))
        write = new_write(1 << 20)
        await store.put([write], 0, DEADLINE_S)
        server.giver.freeze()
        try:
            for read in (read_of(write), Read(write.name, (arena[: 1 << 20],))):
                with pytest.raises(RemoteStoreError):
                    await store.get([read], 0.3)
            seen = bytes(arena)
        finally:
            server.giver.thaw()
        await asyncio.sleep(0.1)
        assert bytes(arena) == seen
        await assert_works(store)


async def test_nobody_listens() -> None:
    async with opened(MooncakeOptions(master=f"127.0.0.1:{free_port()}")) as store:
        for call in (store.ping(10.0), store.put([new_write(10)], 0, 10.0)):
            with pytest.raises(RemoteStoreError):
                await call


async def test_a_full_store(folder: Path) -> None:
    with mooncake_server(folder, segment_bytes=32 << 20) as small:
        async with opened(small.options()) as store:
            writes = [new_write(4 << 20) for _ in range(16)]
            with pytest.raises(RemoteFullError, match="give it more memory"):
                await store.put(writes, 0, DEADLINE_S)
            async with asyncio.timeout(WAIT_S):
                while True:  # parts of the batch that were given up may still arrive
                    await store.delete([write.name for write in writes], DEADLINE_S)
                    with suppress(RemoteFullError):
                        return await assert_works(store)


async def test_the_master_dies_and_comes_back(folder: Path) -> None:
    """What it knew is lost; clients that give memory tell it again that they are there."""
    with mooncake_server(folder, segment_bytes=64 << 20) as own:
        async with opened(own.options()) as store:
            write = new_write(100_000)
            await store.put([write], 0, DEADLINE_S)
            own.master.end()
            for call in (store.ping(3.0), store.get([read_of(write)], 3.0), store.put([new_write(9)], 0, 3.0)):
                with pytest.raises(RemoteStoreError):
                    await call
            own.master = start_master(folder, own.port)
            async with asyncio.timeout(WAIT_S):
                while True:
                    with suppress(RemoteStoreError):
                        return await assert_works(store)
                    await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "wrong", [{"master": "host"}, {"protocol": "ib"}, {"threads": 0}, {"bounce_bytes": 1}, {"native_timeout_s": 0.0}]
)
def test_options_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="set"):
        MooncakeOptions(**{"master": "a:1", **wrong})  # type: ignore[arg-type]
