"""WatchBlocks: what a session is told of the blocks in its namespaces, by a daemon and by a cache step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from prefixd.base.errors import SessionEndedError
from prefixd.base.tenancy.tenants import Role
from prefixd.cache import NamespaceSpec, PartSpec, Session, TieredCache
from prefixd.cache.index.trie import CPU, DISK
from prefixd.client import Client, ClientError
from prefixd.client import NamespaceSpec as ClientSpec
from prefixd.client import PartSpec as ClientPart
from prefixd.server.access.identities import Caller
from prefixd.server.drain_state import Draining
from prefixd.server.kv_events import BlockWatch
from prefixd.server.kv_events.loop_share import LoopShare
from prefixd.server.services.cache_service import PrefixCacheService
from prefixd.v1 import cache_pb2 as pb
from prefixd.v1 import cache_pb2_grpc
from tests.cache.index.entering import enter_chain
from tests.daemons import AnybodyCalls, Remote
from tests.rig import OpenCache
from tests.waiting import until

SIZE = 3000
TOKENS = list(range(100, 140))  # ten blocks


class Told:
    """What a client believes of each namespace."""

    def __init__(self) -> None:
        self.prompts: dict[int, list[int]] = {}
        self.has: set[tuple[bytes, int, int]] = set()

    def take(self, changes: pb.BlockChanges) -> None:
        for change in changes.changes:
            if change.cleared:
                self.has = {each for each in self.has if each[0] != change.namespace_id}
            for number in change.removed:
                self.has.remove((change.namespace_id, change.tier, number))
            tokens = np.frombuffer(change.token_ids, "<u4").reshape(len(change.stored), -1) if change.stored else ()
            before = self.prompts[change.parent] if change.HasField("parent") else []
            for number, own in zip(change.stored, tokens, strict=True):
                before = self.prompts[number] = [*before, *own.tolist()]
                assert (change.namespace_id, change.tier, number) not in self.has
                self.has.add((change.namespace_id, change.tier, number))

    def blocks(self, namespace: bytes, tier: int) -> list[list[int]]:
        """The prompts that end with a block there, the shortest first."""
        return sorted(
            (self.prompts[number] for of, where, number in self.has if (of, where) == (namespace, tier)), key=len
        )


def beginnings(tokens: Sequence[int], width: int = 4) -> list[list[int]]:
    return [list(tokens[:end]) for end in range(width, len(tokens) + 1, width)]


@pytest.mark.slow
def test_a_session_is_told_of_its_namespaces(launch: Callable[..., Remote]) -> None:
    """Of what was there, what comes, moves and goes, also of one that it opens later; of no other session's."""
    remote = launch({"cpu.bytes": "4MiB", "disk.bytes": "16MiB", "cache.write_back": "false"})
    with remote.session() as other, remote.session() as opened:
        mine, salted = (remote.register(other.session_id, "m", SIZE, salt=salt) for salt in (b"", b"s"))
        for namespace in (mine, salted):
            remote.put(other.session_id, namespace, TOKENS, bytes(10 * SIZE))
        stream: Iterator[pb.BlockChanges] = remote.cache.WatchBlocks(
            pb.WatchBlocksRequest(session_id=opened.session_id), timeout=60
        )
        told = Told()
        assert remote.register(opened.session_id, "m", SIZE) == mine
        while told.blocks(mine, pb.TIER_CPU) != beginnings(TOKENS):
            told.take(next(stream))
        remote.put(other.session_id, mine, [*TOKENS, 1, 2, 3, 4], bytes(11 * SIZE), durable=True)
        while told.blocks(mine, pb.TIER_DISK) != beginnings([*TOKENS, 1, 2, 3, 4]):
            told.take(next(stream))
        assert told.blocks(mine, pb.TIER_CPU) == beginnings([*TOKENS, 1, 2, 3, 4])
        assert not told.blocks(salted, pb.TIER_CPU)
        remote.register(opened.session_id, "m", SIZE, salt=b"s")
        while told.blocks(salted, pb.TIER_CPU) != beginnings(TOKENS):
            told.take(next(stream))
        remote.evict(namespace_id=mine)
        while told.blocks(mine, pb.TIER_CPU) or told.blocks(mine, pb.TIER_DISK):
            told.take(next(stream))
        assert told.blocks(salted, pb.TIER_CPU) == beginnings(TOKENS)
        stream.cancel()  # type: ignore[attr-defined]
    with pytest.raises(grpc.RpcError) as error:
        next(remote.cache.WatchBlocks(pb.WatchBlocksRequest(session_id=opened.session_id), timeout=60))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.fixture
async def cache(tmp_path: Path) -> Any:
    opened = OpenCache(tmp_path / "disk", disk_bytes=1 << 20)
    yield opened.cache
    await opened.close(check=False)  # its rows have no slots


async def test_who_does_not_read_misses_nothing(cache: TieredCache) -> None:
    """Blocks come and go meanwhile; nothing is kept but what is so in the end. The stream ends with the session."""
    session = cache.leases.open("engine", 1, 0.0, cache.tenants.get("default"))
    namespace = cache.register(NamespaceSpec("m", 4, (PartSpec("a", 0, 8),)))
    session.open_namespace(namespace)
    trie = cache.trie(namespace)
    watch, told = BlockWatch(cache, session), Told()
    changes = watch.changes()
    chain = cache.chain(namespace, np.arange(4000, dtype="<u4").tobytes())
    rows = enter_chain(trie, chain, namespace.root, namespace.ordinal)
    trie.put_copies(rows, DISK, np.arange(1000)[:, None], 0.0)
    while not told.has:
        told.take(await anext(changes))
    assert len(told.has) == 512, "in turns"
    for _ in range(200):
        trie.put_copies(rows, CPU, np.arange(1000)[:, None], 0.0)
        trie.drop_copies(rows, CPU)
    trie.drop_copies(rows[900:], DISK)
    assert not watch._unsent
    while len(told.has) != 900:
        told.take(await asyncio.wait_for(anext(changes), 60))
    assert told.blocks(namespace.id, pb.TIER_DISK) == beginnings(range(3600))
    cache.leases.close(session)
    with pytest.raises(SessionEndedError):
        await asyncio.wait_for(anext(changes), 60)
    trie.drop_copies(rows[:1], DISK)
    assert not watch._announced[trie.ordinal].changed.any(), "it is told of nothing any more"


async def test_changes_in_other_geometries_are_not_looked_at(cache: TieredCache) -> None:
    """They neither wake a watch nor take memory for it."""
    session = cache.leases.open("engine", 1, 0.0, cache.tenants.get("default"))
    other, mine = (cache.register(NamespaceSpec("m", 4, (PartSpec("a", 0, size),))) for size in (8, 16))
    session.open_namespace(mine)
    watch = BlockWatch(cache, session)
    cache.observe(watch._mark_changed)
    watch.announce_all()
    while watch._add_opened_namespaces() or watch._run_turn():
        pass
    watch._wake.clear()
    for namespace, wakes in ((other, False), (mine, True)):
        trie = cache.trie(namespace)
        rows = enter_chain(trie, cache.chain(namespace, bytes(16)), namespace.root, namespace.ordinal)
        trie.put_copies(rows, DISK, np.array([[0]]), 0.0)
        assert watch._wake.is_set() == wakes
    assert list(watch._announced) == [cache.trie(mine).ordinal]


@pytest.fixture
async def stub(cache: TieredCache) -> AsyncIterator[Any]:
    """PrefixCache of `cache`, in this process."""
    caller = Caller(cache.tenants.default, Role.CLIENT, "test", "unix")
    server = grpc.aio.server(interceptors=[AnybodyCalls(caller)])
    service = PrefixCacheService(cache, None, Draining())
    cache_pb2_grpc.add_PrefixCacheServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        yield cache_pb2_grpc.PrefixCacheStub(channel)
    await server.stop(None)


async def opened(cache: TieredCache, stub: Any) -> tuple[Any, Session]:
    """The stream of a session, and the session; it has a namespace open with 2 MiB of tokens."""
    opening = stub.OpenSession(pb.OpenSessionRequest(client_name="engine"))
    session = cache.leases.session((await opening.read()).opened.session_id)
    namespace = cache.register(NamespaceSpec("m", 512, (PartSpec("a", 0, 8),)))
    session.open_namespace(namespace)
    trie, chain = cache.trie(namespace), cache.chain(namespace, np.arange(512 * 1000, dtype="<u4").tobytes())
    rows = enter_chain(trie, chain, namespace.root, namespace.ordinal)
    trie.put_copies(rows, DISK, np.arange(1000)[:, None], 0.0)
    return opening, session


async def test_a_watch_that_is_not_read_ends_with_its_session(cache: TieredCache, stub: Any) -> None:
    """It would keep its place and its memory for as long as the connection lives."""
    opening, session = await opened(cache, stub)
    unread = stub.WatchBlocks(pb.WatchBlocksRequest(session_id=session.id))
    await until(lambda: len(cache._tries.observers) == 1)
    await asyncio.sleep(0.5)  # until nothing more fits in between
    calls = [task for task in asyncio.all_tasks() if "WatchBlocks" in task.get_name()]
    assert len(calls) == 1 and not calls[0].done()
    opening.cancel()
    await until(lambda: not cache._tries.observers and calls[0].done())
    unread.cancel()


async def test_a_session_has_one_watch(cache: TieredCache, stub: Any) -> None:
    """One that its client has cancelled just now does not count; another one that is under way does."""
    _, session = await opened(cache, stub)
    request = pb.WatchBlocksRequest(session_id=session.id)
    for _ in range(10):
        watch = stub.WatchBlocks(request)
        assert (await asyncio.wait_for(watch.read(), 30)).changes
        watch.cancel()
    watch = stub.WatchBlocks(request)
    assert (await asyncio.wait_for(watch.read(), 30)).changes
    with pytest.raises(grpc.RpcError) as error:
        await stub.WatchBlocks(request).read()
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "end it first" in (error.value.details() or "")
    assert len(cache._tries.observers) == 1 and session.tenant.refused["watches"] == 1
    assert (await asyncio.wait_for(watch.read(), 30)).changes
    watch.cancel()


async def test_all_watches_together_have_a_part_of_the_event_loop(cache: TieredCache) -> None:
    """However many there are, however much changes, and however often they begin anew."""
    namespace = cache.register(NamespaceSpec("m", 4, (PartSpec("a", 0, 8),)))
    trie = cache.trie(namespace)
    rows = enter_chain(trie, cache.chain(namespace, bytes(16)), namespace.root, namespace.ordinal)
    turns = 0

    def used() -> float:
        """Each time when it is asked, a millisecond more."""
        nonlocal turns
        turns += 1
        return turns / 1000

    share = LoopShare(0.1, used=used)

    async def watch(session: Session) -> None:
        while True:
            changes = BlockWatch(cache, session, share).changes()
            await anext(changes)
            await changes.aclose()

    watching = []
    for number in range(8):
        session = cache.leases.open(f"engine {number}", 1, 0.0, cache.tenants.get("default"))
        session.open_namespace(namespace)
        watching.append(asyncio.create_task(watch(session)))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while loop.time() < began_s + 1.0:
        trie.put_copies(rows, DISK, np.array([[0]]), 0.0)
        await asyncio.sleep(0.001)
        trie.drop_copies(rows, DISK)
    counted = turns / 2
    assert 8 < counted <= 100 * (loop.time() - began_s) + 20, "each takes a millisecond of ten"
    for task in watching:
        task.cancel()
    await asyncio.wait(watching)


@pytest.mark.slow
def test_by_the_client(launch: Callable[..., Remote]) -> None:
    """The SDK tells of its own namespaces, and says that it ended."""
    remote = launch({"cpu.bytes": "4MiB", "disk.bytes": 0})
    with Client(remote.daemon.address) as client:
        cache = client.register(ClientSpec("m", 4, (ClientPart("kv", 0, 512),)))
        cache.store(TOKENS, np.zeros(10 * 512, np.uint8))
        changes, told = client.watch_blocks(), Told()
        while told.blocks(cache.namespace_id, pb.TIER_CPU) != beginnings(TOKENS):
            told.take(pb.BlockChanges(changes=[next(changes)]))
        remote.daemon.stop()
        with pytest.raises(ClientError):
            list(changes)
