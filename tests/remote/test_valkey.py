"""Valkey: servers that die, stand still, are full, refuse, lie or are slow; TLS, users and clusters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.stand_ins.slow_link import SlowLink
from prefixd_swap.errors import RemoteFullError, RemoteStoreError
from prefixd_swap.stores import ObjectStore, Read, ValkeyOptions
from prefixd_swap.stores.valkey.valkey_slots import SLOTS, Endpoint, parse_nodes, slot_of
from tests.remote.certificates import new_certificates
from tests.remote.objects import (
    DEADLINE_S,
    LATE_S,
    assert_read,
    assert_works,
    found,
    new_name,
    new_write,
    opened,
    read_of,
)
from tests.remote.processes import free_port
from tests.remote.tls_front import tls_front
from tests.remote.valkey_server import ValkeyServer, valkey_cluster, valkey_server

PREFIX = ValkeyOptions().prefix


def every_call(store: ObjectStore, deadline_s: float) -> list[Awaitable[object]]:
    """One of each, not started."""
    write = new_write(64, 1 << 20)
    return [
        store.exists([write.name], deadline_s),
        store.get([read_of(write)], deadline_s),
        store.put([write] + [new_write(4 << 20) for _ in range(4)], 0, deadline_s),
        store.delete([write.name], deadline_s),
        store.ping(deadline_s),
    ]


async def test_objects_expire(shared_valkey: ValkeyServer) -> None:
    async with opened(ValkeyOptions(port=shared_valkey.port)) as store:
        write, kept = new_write(5000), new_write(5000)
        await store.put([kept], 3600, DEADLINE_S)
        await store.put([write], 1.5, DEADLINE_S)
        assert await store.exists([write.name, kept.name], DEADLINE_S) == [True, True]
        await asyncio.sleep(1.6)
        assert await store.exists([write.name, kept.name], DEADLINE_S) == [False, True]


async def test_a_time_to_live_has_no_bad_values(shared_valkey: ValkeyServer) -> None:
    async with opened(ValkeyOptions(port=shared_valkey.port)) as store:
        for ttl_s in (1e-300, 1e300, float("inf")):
            await store.put([new_write(10)], ttl_s, DEADLINE_S)


async def test_a_socket_file_and_a_database(folder: Path) -> None:
    path = str(folder / "s")
    with valkey_server(folder, "--unixsocket", path):
        async with opened(ValkeyOptions(unix_socket=path, db=3)) as store:
            await assert_works(store)
            assert store.address == f"unix:{path}"


async def test_nobody_listens() -> None:
    async with opened(ValkeyOptions(port=free_port())) as store:
        for call in every_call(store, DEADLINE_S):
            with pytest.raises(RemoteStoreError, match=r"valkey at 127.0.0.1:\d+: cannot connect"):
                await call


async def test_a_host_that_cannot_be_named() -> None:
    for host in ("a" * 70, "no-such-host.invalid"):
        async with opened(ValkeyOptions(host=host)) as store:
            with pytest.raises(RemoteStoreError):
                await store.ping(2.0)


async def test_the_server_dies_and_comes_back(folder: Path) -> None:
    port = free_port()
    async with opened(ValkeyOptions(port=port)) as store:
        with valkey_server(folder, port=port) as server:
            await assert_works(store)
            writes = [new_write(4 << 20) for _ in range(24)]
            puts = [asyncio.ensure_future(store.put(writes, 0, DEADLINE_S)) for _ in range(2)]
            await asyncio.sleep(0.005)
            server.process.end()
            for put in puts:
                with pytest.raises(RemoteStoreError):
                    await put
        with pytest.raises(RemoteStoreError):
            await store.get([read_of(writes[0])], DEADLINE_S)
        with valkey_server(folder, port=port):
            await assert_works(store)


async def test_a_frozen_server_ends_every_call_at_its_deadline(folder: Path) -> None:
    with valkey_server(folder) as server:
        async with opened(ValkeyOptions(port=server.port)) as store:
            writes = [new_write(64, 300_000) for _ in range(12)]
            await store.put(writes, 0, DEADLINE_S)
            calls = every_call(store, 2.0) + every_call(store, 2.0)
            server.process.freeze()
            began_s = time.monotonic()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert time.monotonic() - began_s < LATE_S
            assert all(isinstance(outcome, RemoteStoreError) for outcome in outcomes), outcomes
            server.process.thaw()
            for write in writes:  # at once, while the old requests are answered
                read = read_of(write)
                assert await store.exists([write.name, new_name()], DEADLINE_S) == [True, False]
                assert await found(store, [read]) == [True]
                assert_read([read], [write])
            await assert_works(store)


async def test_frozen_in_the_middle_of_a_value(folder: Path) -> None:
    """What arrives after the deadline is written into nobody's memory."""
    with valkey_server(folder) as server, SlowLink("127.0.0.1", server.port, bytes_per_s=4e6) as link:
        async with opened(ValkeyOptions(port=link.port, connections=1)) as store:
            writes = [new_write(64, 1 << 20) for _ in range(4)]
            await store.put(writes, 0, DEADLINE_S)
            reads = [read_of(write) for write in writes]
            getting = asyncio.ensure_future(store.get(reads, 2.0))
            while bytes(reads[0].into[1]) != bytes(writes[0].pieces[1]):
                assert not getting.done()
                await asyncio.sleep(0.01)
            link.bytes_per_s = 5e5
            with pytest.raises(RemoteStoreError, match="has not ended within"):
                await getting
            partial = [bytes(read.into[1]) for read in reads]
            assert partial[0] == bytes(writes[0].pieces[1]) and partial[3] != bytes(writes[3].pieces[1])
            await asyncio.sleep(0.2)  # more of them arrive
            assert [bytes(read.into[1]) for read in reads] == partial
            await assert_works(store)


async def test_a_full_server(folder: Path) -> None:
    with valkey_server(folder, "--maxmemory", "12mb", "--maxmemory-policy", "noeviction") as server:
        async with opened(ValkeyOptions(port=server.port)) as store:
            writes = [new_write(64, 2 << 20) for _ in range(12)]
            with pytest.raises(RemoteFullError, match="raise maxmemory"):
                await store.put(writes, 0, DEADLINE_S)
            there = await store.exists([write.name for write in writes], DEADLINE_S)
            assert not all(there)
            reads = [read_of(write) for write in writes]
            got = await store.get(reads, DEADLINE_S)  # a part that was given up may have arrived since
            assert all(now or not before for now, before in zip(got, there, strict=True)) and not all(got)
            await store.delete([write.name for write in writes], DEADLINE_S)
            await assert_works(store)


async def test_users_and_their_rights(folder: Path) -> None:
    data = ["+get", "+set", "+exists", "+unlink", "+ping", "~prefixd:*"]
    with valkey_server(folder, "--user", "default", "off", "--user", "reader", "on", ">secret", "+get", "~prefixd:*",
                       "--user", "writer", "on", ">geheim", *data) as server:  # fmt: skip
        async with opened(ValkeyOptions(port=server.port, username="writer", password="geheim")) as store:
            await assert_works(store)  # without the right to run scripts
        async with opened(ValkeyOptions(port=server.port, username="reader", password="secret")) as store:
            assert await found(store, [read_of(new_write(10))]) == [False]
            for call in (store.put([new_write(10)], 0, DEADLINE_S), store.exists([new_name()], DEADLINE_S)):
                with pytest.raises(RemoteStoreError, match=r"NOPERM.*give the user"):
                    await call
        async with opened(ValkeyOptions(port=server.port, username="reader", password="wrong")) as store:
            with pytest.raises(RemoteStoreError, match=r"WRONGPASS.*correct the username"):
                await store.ping(DEADLINE_S)
        async with opened(ValkeyOptions(port=server.port)) as store:
            with pytest.raises(RemoteStoreError, match=r"NOAUTH.*set the username"):
                await store.ping(DEADLINE_S)
    assert "geheim" not in repr(ValkeyOptions(username="writer", password="geheim"))


async def test_tls(folder: Path) -> None:
    files = new_certificates(folder)
    with valkey_server(folder) as server:
        async with tls_front(server.port, files) as port:
            mutual = ValkeyOptions(port=port, tls=True, ca_file=files.ca, cert_file=files.cert, key_file=files.key)
            async with opened(mutual) as store:
                writes = [new_write(64, 3 << 20) for _ in range(4)]
                await store.put(writes, 0, DEADLINE_S)
                reads = [read_of(write) for write in writes]
                assert await found(store, reads) == [True] * 4
                assert_read(reads, writes)
                await assert_works(store)
                server.process.freeze()
                for call in every_call(store, 0.2):
                    with pytest.raises(RemoteStoreError, match="has not ended"):
                        await call
                server.process.thaw()
                await assert_works(store)
            for options in (
                ValkeyOptions(port=port, tls=True),  # nobody that it trusts has signed
                ValkeyOptions(port=port, tls=True, ca_file=files.ca),  # the server asks for a certificate
                ValkeyOptions(port=port),
                ValkeyOptions(port=server.port, tls=True, ca_file=files.ca),
                ValkeyOptions(port=port, tls=True, ca_file=str(folder / "nothing")),
                ValkeyOptions(port=port, tls=True, ca_file=str(folder / "log")),
            ):
                async with opened(options) as store:
                    with pytest.raises(RemoteStoreError):
                        await store.ping(0.5)


async def test_a_cluster(folder: Path) -> None:
    with valkey_cluster(folder) as nodes:
        async with opened(ValkeyOptions(port=nodes[1].port, cluster=True)) as store:
            await store.ping(DEADLINE_S)
            await assert_works(store)
            writes = [new_write(64, 20_000) for _ in range(60)]
            await store.put(writes, 0, DEADLINE_S)
            assert all(node.ask(b"DBSIZE") not in (b":0\r\n",) for node in nodes)
            moving = slot_of(PREFIX + writes[0].name)
            await _move_slot(nodes, moving)
            names = [write.name for write in writes]
            assert (await store.exists(names, DEADLINE_S))[1:] == [
                slot_of(PREFIX + name) != moving for name in names[1:]
            ]
            await store.put(writes, 0, DEADLINE_S)
            reads = [read_of(write) for write in writes]
            assert await found(store, reads) == [True] * 60
            assert_read(reads, writes)
            nodes[0].process.freeze()
            with pytest.raises(RemoteStoreError, match="has not ended"):
                await store.get(reads, 0.3)
            nodes[0].process.thaw()
            assert await found(store, reads) == [True] * 60
            # The node that is configured stands still: the others tell where their objects are.
            nodes[1].process.freeze()
            with pytest.raises(RemoteStoreError, match="has not ended"):
                await store.get(reads, 0.3)
            there = [await _can_get(store, read) for read in reads[:12]]
            assert any(there) and not all(there)
            nodes[1].process.thaw()
            assert await found(store, reads) == [True] * 60
        async with opened(ValkeyOptions(port=nodes[0].port)) as store:
            with pytest.raises(RemoteStoreError, match=r"MOVED.*set cluster"):
                await store.put([new_write(10) for _ in range(40)], 0, DEADLINE_S)


async def test_no_cluster(shared_valkey: ValkeyServer) -> None:
    async with opened(ValkeyOptions(port=shared_valkey.port, cluster=True)) as store:
        with pytest.raises(RemoteStoreError, match="cluster support disabled"):
            await store.exists([new_name()], DEADLINE_S)


async def test_foreign_values(shared_valkey: ValkeyServer) -> None:
    async with opened(ValkeyOptions(port=shared_valkey.port)) as store:
        reads = [read_of(new_write(64, 20_000)) for _ in range(5)]
        keys = [PREFIX + read.name for read in reads]
        shared_valkey.ask(b"HSET", keys[0], b"a", b"b")
        shared_valkey.ask(b"SET", keys[1], b"short")
        shared_valkey.ask(b"SET", keys[2], b"")
        shared_valkey.ask(b"SETRANGE", keys[3], b"9000000", b"long")
        shared_valkey.ask(b"SET", keys[4], b"x" * 20_064)
        assert await found(store, reads) == [False, False, False, False, True]
        assert bytes(reads[4].into[1]) == b"x" * 20_000


NONSENSE = [
    b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    b"$5\r\nshort\r\n",
    b"*3\r\n:1\r\n:2\r\n:3\r\n",
    b"$-2\r\n",
    b"$999999999999\r\n",
    b"$two\r\n",
    b":12\r\n",
    b"+OK\r\n+OK\r\n",
    b"%1\r\n+a\r\n+b\r\n",
    b"$100064\r\n" + bytes(100_064) + b"xx",
    b"\x00" * 50_000,
    b"-\xff\xfe\r\n",
    b"",
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=lambda data: repr(data[:12]))
async def test_a_server_that_lies(nonsense: bytes) -> None:
    connections: list[asyncio.StreamWriter] = []

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.read(1 << 16)
        writer.write(nonsense)
        await reader.read(1 << 16)
        writer.close()

    server = await asyncio.start_server(lie, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for cluster in (False, True):
        calls: list[Callable[[ObjectStore], Awaitable[object]]] = [
            lambda store: store.ping(0.1),
            lambda store: store.exists([new_name(), new_name()], 0.1),
            lambda store: store.get([read_of(new_write(64, 100_000))], 0.1),
            lambda store: store.put([new_write(64, 10)], 0, 0.1),
            lambda store: store.delete([new_name()], 0.1),
        ]
        for call in calls:
            async with opened(ValkeyOptions(port=port, cluster=cluster)) as store:
                try:
                    outcome = await call(store)
                except RemoteStoreError:
                    continue
                assert outcome in (None, [None], [5], [False, False])
    server.close()
    for connection in connections:  # what nobody reads any more is still to be sent
        connection.transport.abort()
        with suppress(ConnectionError):
            await connection.wait_closed()


async def test_a_slow_network(shared_valkey: ValkeyServer) -> None:
    """1 s each way: one round trip a call, and a pipeline's parts do not wait for each other. Two would take 4 s."""
    with SlowLink("127.0.0.1", shared_valkey.port, latency_s=1.0) as link:
        async with opened(ValkeyOptions(port=link.port)) as store:
            await asyncio.gather(*(store.ping(DEADLINE_S) for _ in range(8)))  # all connections are made
            await store.exists([new_name()], DEADLINE_S)  # and the script is known
            writes = [new_write(64, 500_000) for _ in range(16)]
            took_s = []
            for call in (
                store.put(writes, 0, DEADLINE_S),
                store.exists([new_name() for _ in range(4096)], DEADLINE_S),
                store.get([read_of(write) for write in writes], DEADLINE_S),
            ):
                began_s = time.monotonic()
                await call
                took_s.append(time.monotonic() - began_s)
            assert all(2.0 <= each_s < 4.0 for each_s in took_s), took_s


async def test_the_loop_stays_free(shared_valkey: ValkeyServer) -> None:
    """What a call of 64 MiB or of 4096 names holds the event loop for at most."""
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            began_s = time.thread_time()  # other processes may have the core
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - began_s)

    async with opened(ValkeyOptions(port=shared_valkey.port)) as store:
        writes = [new_write(64, 2 << 20) for _ in range(32)]
        names = [new_name() for _ in range(4096)]
        watching = asyncio.ensure_future(watch())
        await store.put(writes, 0, DEADLINE_S)
        await store.get([read_of(write) for write in writes], DEADLINE_S)
        await store.exists(names, DEADLINE_S)
        watching.cancel()
        await store.delete([write.name for write in writes], DEADLINE_S)
    assert longest_s < 0.1


def test_slots() -> None:
    assert slot_of(b"123456789") == 0x31C3  # the check value of the cluster specification
    assert slot_of(b"a{123456789}b") == 0x31C3
    assert slot_of(b"{}123456789") == slot_of(b"{}123456789") != 0x31C3
    asked = Endpoint("seed", 1)
    text = b"id 10.0.0.1:30004@31004,host,shard-id=x master - 0 0 4 connected 0-99 200 [93-<-ab]\nid2 :7@1 myself,master - 0 0 1 connected 100\nid3 h:8@1 slave id 0 0 1 connected\n"  # fmt: skip  # noqa: E501
    slots = parse_nodes(text, asked)
    assert len(slots) == SLOTS
    assert (slots[0], slots[100], slots[200], slots[201]) == (
        Endpoint("host", 30004), Endpoint("seed", 7), Endpoint("host", 30004), None)  # fmt: skip
    for bad in (b"one", b"id h:x@1 master - 0 0 4 connected 1", b"id h:1@1 master - 0 0 4 connected 0-99999", b"\xff"):
        with pytest.raises(RemoteStoreError, match="CLUSTER NODES"):
            parse_nodes(bad, asked)


@pytest.mark.parametrize(
    "wrong", [{"connections": 0}, {"cluster": True, "db": 1}, {"cluster": True, "unix_socket": "/s"}, {"username": "a"}]
)
def test_options_that_contradict_each_other(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"set|remove"):
        ValkeyOptions(**wrong)  # type: ignore[arg-type]


async def _can_get(store: ObjectStore, read: Read) -> bool:
    try:
        return await found(store, [read], 0.15) == [True]
    except RemoteStoreError:
        return False


async def _move_slot(nodes: list[ValkeyServer], slot: int) -> None:
    """Gives a slot to a node that has not had it. The objects in it are lost."""
    ids = [node.ask(b"CLUSTER", b"MYID").split(b"\r\n")[1] for node in nodes]
    slots = parse_nodes(nodes[0].ask(b"CLUSTER", b"NODES").split(b"\r\n", 1)[1].rstrip(b"\r\n"), Endpoint("", 0))
    owner = slots[slot]
    assert owner is not None
    target = next(index for index, node in enumerate(nodes) if node.port != owner.port)
    source = next(node for node in nodes if node.port == owner.port)
    source.ask(b"CLUSTER", b"FLUSHSLOT", b"%d" % slot)
    for key in source.ask(b"CLUSTER", b"GETKEYSINSLOT", b"%d" % slot, b"100").split(b"\r\n")[2::2]:
        if key:
            source.ask(b"DEL", key)
    for node in (nodes[target], *nodes):
        assert node.ask(b"CLUSTER", b"SETSLOT", b"%d" % slot, b"NODE", ids[target]).startswith(b"+OK")
