"""S3: what other hosts see and when, packs that are torn or gone, servers that die, stand still or are slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import obstore
import pytest

from benchmarks.stand_ins.slow_link import SlowLink
from prefixd_swap.errors import RemoteStoreError
from prefixd_swap.stores import S3Options, Write
from prefixd_swap.stores.s3 import s3_store as s3
from prefixd_swap.stores.s3.pack_index import PackIndex
from prefixd_swap.stores.s3.packs import Head, build_head, head_bytes, pack_name, parse_head, parse_name
from prefixd_swap.stores.s3.s3_store import S3Store
from tests.remote.objects import DEADLINE_S, LATE_S, assert_read, found, new_name, new_write, read_of
from tests.remote.processes import free_port
from tests.remote.s3_server import S3Server, s3_server
from tests.waiting import until


class Clock:
    """Seconds since 1970, and what is added to them."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def bucket(shared_s3: S3Server) -> str:
    return shared_s3.new_bucket()


@asynccontextmanager
async def host(options: S3Options, now: Clock | None = None) -> AsyncIterator[S3Store]:
    """One host's store."""
    store = S3Store(options, now or Clock())
    try:
        yield store
    finally:
        await store.close()


async def eventually(store: S3Store, writes: list[Write]) -> None:
    """Waits until a host knows them."""
    async with asyncio.timeout(10):
        while not all(await store.exists([write.name for write in writes], DEADLINE_S)):
            await asyncio.sleep(0.02)


async def read_all(store: S3Store, writes: list[Write]) -> None:
    reads = [read_of(write) for write in writes]
    assert await found(store, reads) == [True] * len(writes)
    assert_read(reads, writes)


async def test_other_hosts_find_them(shared_s3: S3Server, bucket: str) -> None:
    options = shared_s3.options(bucket, pack_bytes=100_000)
    before, after = [new_write(64, 30_000) for _ in range(7)], [new_write(10) for _ in range(3)]
    async with host(options) as first, host(options) as second:
        await first.put(before, 0, DEADLINE_S)
        assert len(shared_s3.paths(bucket)) == 3
        await read_all(second, before)  # its first look has found them
        await first.put(after, 0, DEADLINE_S)
        await eventually(second, after)
        await read_all(second, [*after, *before])
        assert second.skipped_packs == 0


async def test_a_host_whose_clock_differs(shared_s3: S3Server, bucket: str) -> None:
    options, slow, writes = shared_s3.options(bucket), Clock(), [new_write(1000)]
    slow.ahead_s = -60
    async with host(options, slow) as first, host(options) as second:
        await second.exists([new_name()], DEADLINE_S)
        await asyncio.sleep(0.3)
        await first.put(writes, 0, DEADLINE_S)
        await eventually(second, writes)


@pytest.mark.parametrize("step_s", [1e6, -1e6])
async def test_a_host_whose_clock_is_set_and_set_right_again_finds_all(
    shared_s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    monkeypatch.setattr(s3, "_SLACK_S", 0.1)  # 120 s: as long as a host's clock may be wrong without loss
    options, set_clock = shared_s3.options(bucket), Clock()
    before, meanwhile, after = [new_write(1000)], [new_write(1000)], [new_write(1000)]
    async with host(options) as first, host(options, set_clock) as second:
        await first.put(before, 0, DEADLINE_S)
        await eventually(second, before)
        set_clock.ahead_s = step_s
        await until(lambda: second._listed is not None and abs(second._listed[0] / 1000 - time.time() - step_s) <= 1e5)
        await first.put(meanwhile, 0, DEADLINE_S)
        await asyncio.sleep(0.2)  # no less than the slack before the next right listing
        set_clock.ahead_s = 0.0
        await first.put(after, 0, DEADLINE_S)
        await eventually(second, [*before, *meanwhile, *after])


async def test_from_when_on_packs_are_listed(shared_s3: S3Server, bucket: str) -> None:
    async with host(shared_s3.options(bucket, history_s=3000.0)) as store:
        assert store._since_ms(9_000_000, 7.0) == 6_000_000
        store._listed = 9_000_000, 7.0
        for now_s, passed_s, since_s in ((9010, 10, 9000), (9130, 10, 9000), (9131, 10, 6131), (8000, 10, 5000)):
            assert store._since_ms(now_s * 1000, 7.0 + passed_s) == since_s * 1000


async def test_a_pack_from_the_future_hides_nothing(shared_s3: S3Server, bucket: str) -> None:
    options, wrong, writes = shared_s3.options(bucket), Clock(), [new_write(1000)]
    wrong.ahead_s = 1e8
    async with host(options, wrong) as other, host(options) as first, host(options) as second:
        await other.put([new_write(10)], 0, DEADLINE_S)
        await second.exists([new_name()], DEADLINE_S)
        await first.put(writes, 0, DEADLINE_S)
        await eventually(second, writes)


async def test_objects_expire(shared_s3: S3Server, bucket: str) -> None:
    options, now = shared_s3.options(bucket), Clock()
    write, kept = new_write(1000), new_write(1000)
    async with host(options, now) as first, host(options, now) as second:
        await first.put([write], 60, DEADLINE_S)
        await first.put([kept], 0, DEADLINE_S)
        await eventually(second, [write, kept])
        now.ahead_s = 61
        for store in (first, second):
            assert await store.exists([write.name, kept.name], DEADLINE_S) == [False, True]
            assert await found(store, [read_of(write), read_of(kept)]) == [False, True]


async def test_a_pack_is_deleted_with_its_last_object(shared_s3: S3Server, bucket: str) -> None:
    async with host(shared_s3.options(bucket)) as store:
        writes = [new_write(100) for _ in range(3)]
        await store.put(writes, 0, DEADLINE_S)
        await store.delete([write.name for write in writes[:2]], DEADLINE_S)
        assert len(shared_s3.paths(bucket)) == 1
        await store.delete([write.name for write in writes], DEADLINE_S)
        assert shared_s3.paths(bucket) == []


async def test_a_pack_that_is_gone(shared_s3: S3Server, bucket: str) -> None:
    async with host(shared_s3.options(bucket, pack_bytes=10_000)) as store:
        writes = [new_write(6_000) for _ in range(2)]
        await store.put(writes, 0, DEADLINE_S)
        obstore.delete(shared_s3.client(bucket), shared_s3.paths(bucket)[:1])
        there = await found(store, [read_of(write) for write in writes])
        assert sorted(there) == [False, True]
        assert await store.exists([write.name for write in writes], DEADLINE_S) == there


async def test_foreign_and_torn_packs_are_skipped(shared_s3: S3Server, bucket: str) -> None:
    options, client = shared_s3.options(bucket), shared_s3.client(bucket)
    good, now_ms = [new_write(64, 500) for _ in range(4)], round(time.time() * 1000)
    head = build_head(good, now_ms, 0)
    body = head + b"".join(bytes(piece) for write in good for piece in write.pieces)
    flipped = bytearray(body)
    flipped[50] ^= 1
    bad = [b"", b"x", body[:-1], bytes(flipped), head[:-1], b"y" * len(body)]
    for number, data in enumerate(bad):
        obstore.put(client, options.prefix + pack_name(now_ms, bytes([number] * 8), len(good)), data)
    obstore.put(client, options.prefix + "notes.txt", b"nobody's")
    obstore.put(client, options.prefix + "zzz", b"nobody's")
    obstore.put(client, options.prefix + pack_name(now_ms + 1, bytes(8), len(good)), body)  # another time than inside
    async with host(options) as store:
        assert await store.exists([write.name for write in good], DEADLINE_S) == [False] * 4
        assert store.skipped_packs == len(bad) + 1
        obstore.put(client, options.prefix + pack_name(now_ms, b"\xff" * 8, len(good)), body)
        await eventually(store, good)
        await read_all(store, good)
        await asyncio.sleep(0.5)
        assert store.skipped_packs == len(bad) + 1


async def test_neighbours_come_with_one_request(shared_s3: S3Server, bucket: str) -> None:
    with SlowLink("127.0.0.1", shared_s3.port) as link:
        async with host(shared_s3.options(bucket, port=link.port)) as store:
            writes = [new_write(64, 20_000) for _ in range(50)]
            await store.put(writes, 0, DEADLINE_S)
            sent = link.forwarded_bytes[0]
            await read_all(store, writes)
            assert link.forwarded_bytes[0] - sent < 3000  # a signed request takes about 700 bytes


async def test_exists_makes_no_request(shared_s3: S3Server, bucket: str) -> None:
    with SlowLink("127.0.0.1", shared_s3.port) as link:
        async with host(shared_s3.options(bucket, port=link.port, refresh_s=60)) as store:
            await store.exists([new_name()], DEADLINE_S)
            sent = link.forwarded_bytes[0]
            await store.exists([new_name() for _ in range(4096)], DEADLINE_S)
            assert link.forwarded_bytes[0] == sent


async def test_what_is_known_has_a_bound(shared_s3: S3Server, bucket: str) -> None:
    async with host(shared_s3.options(bucket, most_entries=10)) as store:
        writes = [new_write(10) for _ in range(12)]
        await store.put(writes[:10], 0, DEADLINE_S)
        assert await store.exists([writes[0].name], DEADLINE_S) == [True]  # the one that was used last
        await store.put(writes[10:], 0, DEADLINE_S)
        there = await store.exists([write.name for write in writes], DEADLINE_S)
        assert there == [True, False, False, *[True] * 9]


async def test_no_such_bucket(shared_s3: S3Server) -> None:
    async with host(shared_s3.options("nobodys")) as store:
        calls = [store.ping(DEADLINE_S), store.exists([new_name()], DEADLINE_S), store.put([new_write(1)], 0, 5.0)]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, RemoteStoreError) and "no such bucket" in str(outcome)


async def test_nobody_listens(shared_s3: S3Server) -> None:
    async with host(shared_s3.options("any", port=free_port())) as store:
        calls = [store.ping(3.0), store.exists([new_name()], 3.0), store.put([new_write(1)], 0, 3.0)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, RemoteStoreError) for outcome in outcomes), outcomes


def test_options_that_cannot_be() -> None:
    endpoints = [{"endpoint": wrong} for wrong in ("no url", "ftp://a", "http://a", "https://a:b@c")]
    for wrong in (
        {"bucket": ""},
        {"prefix": "a"},
        {"prefix": "/"},
        {"access_key_id": "a"},
        {"pack_bytes": 0},
        *endpoints,
    ):
        with pytest.raises(ValueError, match=r"set"):
            S3Options(**{"bucket": "b", **wrong})  # type: ignore[arg-type]
    assert "geheim" not in repr(S3Options(bucket="b", access_key_id="a", secret_access_key="geheim"))


@pytest.fixture(scope="module")
def own_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that may be frozen and killed; the last test here kills it."""
    with s3_server(tmp_path_factory.mktemp("own_s3")) as server:
        yield server


async def test_a_frozen_server_ends_every_call_at_its_deadline(own_s3: S3Server) -> None:
    options = own_s3.options(own_s3.new_bucket())
    writes = [new_write(64, 300_000) for _ in range(6)]
    async with host(options) as store, host(options) as late:
        await store.put(writes, 0, DEADLINE_S)
        await store.exists([new_name()], DEADLINE_S)
        own_s3.process.freeze()
        began_s = time.monotonic()
        outcomes = await asyncio.gather(
            store.ping(2.0),
            store.get([read_of(write) for write in writes], 2.0),
            store.put([new_write(5 << 20)], 0, 2.0),
            store.delete([write.name for write in writes[:0]], 2.0),
            late.exists([writes[0].name], 2.0),
            return_exceptions=True,
        )
        assert time.monotonic() - began_s < LATE_S
        assert [isinstance(outcome, RemoteStoreError) for outcome in outcomes] == [True, True, True, False, True]
        own_s3.process.thaw()
        await read_all(store, writes)
        await eventually(late, writes)
        await read_all(late, writes)


async def test_the_server_dies_in_the_middle(own_s3: S3Server, folder: Path) -> None:
    with SlowLink("127.0.0.1", own_s3.port) as link:
        async with host(own_s3.options(own_s3.new_bucket(), port=link.port)) as store:
            writes = [new_write(1 << 20) for _ in range(32)]
            await store.put(writes, 0, DEADLINE_S)
            link.bytes_per_s = 2e6
            before = link.forwarded_bytes[1]
            call = asyncio.ensure_future(store.get([read_of(write) for write in writes], 5.0))
            while link.forwarded_bytes[1] < before + (1 << 20):
                assert not call.done()
                await asyncio.sleep(0.01)
            own_s3.process.end()
            with pytest.raises(RemoteStoreError):
                await call
            with pytest.raises(RemoteStoreError):
                await store.put(writes[:1], 0, 3.0)


def test_heads() -> None:
    writes = [new_write(0), new_write(10, 20), new_write(1 << 20)]
    head = build_head(writes, 123, 456)
    total = len(head) + sum(write.nbytes for write in writes)
    parsed = parse_head(head, total)
    assert parsed is not None and len(head) == head_bytes(3)
    assert (parsed.created_ms, parsed.ttl_ms, parsed.lengths) == (123, 456, [0, 30, 1 << 20])
    assert parsed.names == [write.name for write in writes]
    assert parsed.offsets == [len(head), len(head), len(head) + 30]
    assert parse_head(head, total - 1) is None
    for at in range(len(head)):
        flipped = bytearray(head)
        flipped[at] ^= 0x80
        assert parse_head(bytes(flipped), total) is None
        assert parse_head(head[:at], total) is None
    name = pack_name(123, b"\x01" * 8, 3)
    parsed_name = parse_name(name)
    assert parsed_name is not None and (parsed_name.created_ms, parsed_name.head_bytes) == (123, len(head))
    for wrong in ("", "a.pack", name + "x", name.replace(f"{len(head):08x}", "ffffffff"), name.upper()):
        assert parse_name(wrong) is None


def test_the_index_names_a_pack_whose_objects_are_all_deleted() -> None:
    index, names = PackIndex(100), [bytes([number]) * 32 for number in range(3)]
    index.add("a", Head(0, 0, names, [0, 1, 2], [1, 1, 1]))
    assert index.delete(names[0]) is None
    assert index.delete(names[0]) is None
    assert index.delete(names[1]) is None
    emptied = index.delete(names[2])
    assert emptied is not None and emptied.path == "a" and len(index) == 0
