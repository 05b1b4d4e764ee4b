"""Lists and inspections in pages, over a cache that others change meanwhile; their limits, and how long they take."""

from __future__ import annotations

import asyncio
import gc
import math
import struct
import time
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.base.long_work.pacer import Pacer
from prefixd.base.rules.rules import SlidingWindow
from prefixd.cache import NamespaceSpec, PartSpec, TieredCache, Trie
from prefixd.cache.index.trie import CPU, DISK, NO_SLOT, Rows
from prefixd.server.prefixes import prefix_info, prefix_keys, prefix_pages
from prefixd.server.prefixes.prefix_info import LIMIT, inspect_prefix
from prefixd.server.prefixes.prefix_keys import Prefix, find_prefix
from prefixd.server.prefixes.prefix_pages import list_prefixes
from prefixd.server.prefixes.prompt_lookup import PromptLookup
from prefixd.v1 import admin_pb2 as pb
from tests.rig import OpenCache

RNG = np.random.default_rng(0)
TOKENS = 4
SPECS = [NamespaceSpec(name, TOKENS, (PartSpec("full", 0, 4096),)) for name in ("first", "second")]
SPECS.append(NamespaceSpec("third", 2 * TOKENS, (PartSpec("full", 0, 4096),)))  # a trie of its own


@pytest.fixture
async def cache() -> AsyncIterator[TieredCache]:
    opened = OpenCache(cpu_bytes=1 << 20, clock=lambda: 1000.0)
    homes = [opened.cache.register(spec) for spec in SPECS]
    yield opened.cache
    assert [home.ordinal for home in homes] == [0, 1, 2]
    await opened.close(check=False)


def enter(cache: TieredCache, namespace: int, blocks: int, used_s: float, parent: int | None = None) -> Rows:
    """A prompt of so many blocks, last used then. Its slots are nobody's: nothing here reads bytes."""
    home = cache.namespaces.at(namespace)
    trie = cache.trie(home)
    keys = RNG.integers(0, 256, (blocks, 16), np.uint8)
    tokens = np.arange(blocks * trie.block_tokens, dtype=np.uint32).reshape(blocks, -1)
    rows, _ = trie.insert_path(home.root if parent is None else parent, namespace, keys, tokens, used_s)
    trie.put_copies(rows, CPU, rows[:, None] * 4096, used_s)
    trie.touch(rows, used_s)
    return rows


async def all_pages(cache: TieredCache, limit: int, namespace_id: bytes = b"", **more: Any) -> list[pb.PrefixInfo]:
    found: list[pb.PrefixInfo] = []
    token = b""
    while True:
        request = pb.ListPrefixesRequest(limit=limit, page_token=token, namespace_id=namespace_id, **more)
        page = await list_prefixes(cache, request)
        assert len(page.prefixes) == limit or not page.next_page_token
        found += page.prefixes
        token = page.next_page_token
        if not token:
            return found


def keys(found: Sequence[pb.PrefixInfo]) -> list[str]:
    return [info.key for info in found]


@pytest.mark.parametrize("slice_rows", [5, 1 << 14])
@pytest.mark.parametrize("limit", [1, 3, 7, 50])
async def test_pages_have_every_prefix_once_and_the_latest_first(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch, limit: int, slice_rows: int
) -> None:
    monkeypatch.setattr(prefix_keys, "_SLICE_ROWS", slice_rows)
    monkeypatch.setattr(prefix_pages, "_SLICE_ROWS", slice_rows)
    rng = np.random.default_rng(limit)
    expected: list[tuple[float, int, int, str]] = []
    for number in range(50):
        used_s = float(rng.integers(0, 6))  # many were used at the same time
        namespace = number % 3
        rows = enter(cache, namespace, int(rng.integers(1, 4)), used_s)
        trie = cache.trie(cache.namespaces.at(namespace))
        expected.append((-used_s, trie.ordinal, int(rows[-1]), trie.key(int(rows[-1])).hex()))
    found = await all_pages(cache, limit)
    assert keys(found) == [key for *_, key in sorted(expected)]
    assert (await list_prefixes(cache, pb.ListPrefixesRequest())).total == 50
    mine = await all_pages(cache, limit, cache.namespaces.at(1).id)
    assert keys(mine) == [info.key for info in found if info.namespace_name == "second"]


async def test_a_page_that_grows_too_large_ends_early(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    for prompt in range(10):
        enter(cache, 0, 2, float(prompt))
    monkeypatch.setattr("prefixd.server.prefixes.prefix_pages._PAGE_BYTES", 1)
    found: list[str] = []
    token = b""
    for _ in range(10):
        page = await list_prefixes(cache, pb.ListPrefixesRequest(page_token=token))
        found += keys(page.prefixes)
        token = page.next_page_token
        assert bool(token) == (len(found) < 10)
    assert len(set(found)) == 10


async def test_a_prefix_used_between_two_pages_moves_and_the_others_stay(cache: TieredCache) -> None:
    trie = cache.tries[0]
    rows = [int(enter(cache, 0, 1, float(used_s))[0]) for used_s in range(10)]
    first = await list_prefixes(cache, pb.ListPrefixesRequest(limit=4))
    trie.touch(np.array(rows[:1]), 50.0)
    await asyncio.sleep(0)
    second = await list_prefixes(cache, pb.ListPrefixesRequest(limit=9, page_token=first.next_page_token))
    assert keys(first.prefixes) == [trie.key(row).hex() for row in rows[:5:-1]]
    assert keys(second.prefixes) == [trie.key(row).hex() for row in rows[5:0:-1]]
    assert second.next_page_token == b""


async def test_nothing_is_an_empty_page(cache: TieredCache) -> None:
    page = await list_prefixes(cache, pb.ListPrefixesRequest())
    assert (len(page.prefixes), page.total, page.next_page_token) == (0, 0, b"")


@pytest.mark.parametrize("slice_rows", [3, 1 << 14])
async def test_a_prefix_ends_with_the_last_block_that_can_be_had(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch, slice_rows: int
) -> None:
    """What continues it has lost its bytes, and is kept."""
    monkeypatch.setattr(prefix_keys, "_SLICE_ROWS", slice_rows)
    monkeypatch.setattr(prefix_pages, "_SLICE_ROWS", slice_rows)
    rows = enter(cache, 0, 7, 100.0)
    enter(cache, 0, 2, 50.0, parent=int(rows[2]))
    trie = cache.tries[0]
    trie.retain(rows[5:])
    trie.drop_copies(rows[5:], CPU)
    listed = await list_prefixes(cache, pb.ListPrefixesRequest())
    assert [info.blocks for info in listed.prefixes] == [5, 5]
    assert listed.prefixes[0].key == trie.key(int(rows[4])).hex()
    assert listed.total == 2


async def test_what_was_listed_counts_its_blocks(cache: TieredCache) -> None:
    rows = enter(cache, 0, 7, 100.0)
    trie = cache.tries[0]
    trie.drop_copies(rows[:1], CPU)
    trie.hold(rows[3:5], CPU)
    trie.pinned[rows] = True
    (info,) = (await list_prefixes(cache, pb.ListPrefixesRequest())).prefixes
    assert (info.blocks, info.tokens, info.cpu_blocks, info.disk_blocks) == (7, 7 * TOKENS, 6, 0)
    assert (info.held, info.pinned, info.idle_s, info.nbytes) == (1, True, 900.0, 7 * 4096)


@pytest.mark.parametrize(
    "request_of",
    [
        pb.ListPrefixesRequest(limit=LIMIT + 1),
        pb.ListPrefixesRequest(limit=(1 << 32) - 1),
        pb.ListPrefixesRequest(page_token=b"x"),
        pb.ListPrefixesRequest(order=9),  # type: ignore[arg-type]
        pb.ListPrefixesRequest(page_token=bytes(21)),
        pb.ListPrefixesRequest(page_token=struct.pack("<dIQ", math.nan, 0, 0)),
        pb.ListPrefixesRequest(page_token=struct.pack("<dIQ", math.inf, 0, 0)),
    ],
)
async def test_what_no_page_can_be_is_refused(cache: TieredCache, request_of: pb.ListPrefixesRequest) -> None:
    enter(cache, 0, 3, 1.0)
    with pytest.raises(InvalidArgumentError):
        await list_prefixes(cache, request_of)


@pytest.mark.parametrize("row", [0, (1 << 64) - 1])
async def test_a_token_of_any_numbers_does_no_harm(cache: TieredCache, row: int) -> None:
    enter(cache, 0, 3, 1.0)
    token = struct.pack("<dIQ", -1e300, (1 << 32) - 1, row)
    assert len((await list_prefixes(cache, pb.ListPrefixesRequest(page_token=token))).prefixes) == 0


async def test_inspect_has_every_block_in_pages(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_keys, "_PATH_ROWS", 7)
    rows = enter(cache, 0, 30, 1.0)
    trie = cache.tries[0]
    key = trie.key(int(rows[-1])).hex()
    whole = await inspect_prefix(cache, pb.InspectRequest(key=key[:12]))
    assert whole.prefix.blocks == len(whole.blocks) == 30
    assert [block.key for block in whole.blocks] == [trie.key(row).hex() for row in rows.tolist()]
    assert [token for block in whole.blocks for token in block.token_ids] == list(range(30 * TOKENS))
    parts = [
        await inspect_prefix(cache, pb.InspectRequest(key=key, first_block=start, limit=11))
        for start in (0, 11, 22, 33)
    ]
    assert [len(part.blocks) for part in parts] == [11, 11, 8, 0]
    assert [block for part in parts for block in part.blocks] == list(whole.blocks)


async def test_a_page_of_blocks_is_bounded_in_blocks_and_in_tokens(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    trie = cache.tries[0]
    key = trie.key(int(enter(cache, 0, LIMIT + 5, 1.0)[-1])).hex()
    assert len((await inspect_prefix(cache, pb.InspectRequest(key=key))).blocks) == LIMIT
    with pytest.raises(InvalidArgumentError, match=f"at most {LIMIT}"):
        await inspect_prefix(cache, pb.InspectRequest(key=key, limit=LIMIT + 1))
    monkeypatch.setattr(prefix_info, "_TOKENS_LIMIT", 3 * TOKENS + 1)
    assert len((await inspect_prefix(cache, pb.InspectRequest(key=key))).blocks) == 3
    monkeypatch.setattr(prefix_info, "_TOKENS_LIMIT", 1)
    assert len((await inspect_prefix(cache, pb.InspectRequest(key=key))).blocks) == 1


@pytest.mark.parametrize("slice_rows", [3, 1 << 14])
async def test_a_prefix_is_found_by_its_digits(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch, slice_rows: int
) -> None:
    monkeypatch.setattr(prefix_keys, "_SLICE_ROWS", slice_rows)
    monkeypatch.setattr(prefix_pages, "_SLICE_ROWS", slice_rows)
    rows = enter(cache, 0, 20, 1.0)
    enter(cache, 2, 5, 1.0)
    trie = cache.tries[0]
    for digits in (5, 8, 31, 32):
        found = await find_prefix(cache, trie.key(int(rows[13])).hex()[:digits].upper())
        assert (found.trie, found.row) == (trie, rows[13])
    with pytest.raises(InvalidArgumentError, match="hex digits"):
        await find_prefix(cache, "abc")
    with pytest.raises(NotFoundError):
        await find_prefix(cache, "0" * 32)
    same = np.frombuffer(trie.key(int(rows[13]))[:15] + b"\0", np.uint8).reshape(1, 16)
    trie.insert_path(cache.namespaces.at(0).root, 0, same, np.zeros((1, TOKENS), np.uint32), 0.0)
    with pytest.raises(InvalidArgumentError, match="2 prefixes"):
        await find_prefix(cache, trie.key(int(rows[13])).hex()[:30])


async def test_of_blocks_with_one_key_the_namespace_says_which_is_meant(cache: TieredCache) -> None:
    trie, key = cache.tries[0], bytes(range(16))
    homes = [cache.namespaces.at(0), cache.namespaces.at(1)]
    rows = []
    for home in homes:
        tokens = np.zeros((1, TOKENS), np.uint32)
        found, _ = trie.insert_path(home.root, home.ordinal, np.frombuffer(key, np.uint8)[None], tokens, 0.0)
        rows += found.tolist()
    with pytest.raises(InvalidArgumentError) as error:
        await find_prefix(cache, key.hex())
    for home, row in zip(homes, rows, strict=True):
        named = f"{home.id.hex()}/{key.hex()}"
        assert named in str(error.value)
        assert (await find_prefix(cache, named)).row == row
        assert (await find_prefix(cache, named[:-4])).row == row
    with pytest.raises(NotFoundError, match="no prefix has the key"):
        await find_prefix(cache, f"{homes[0].id.hex()}/{'1' * 32}")
    with pytest.raises(NotFoundError, match="0123 is not registered"):
        await find_prefix(cache, "0123/" + key.hex())
    with pytest.raises(InvalidArgumentError, match="'xyz' is no namespace's id in hex"):
        await find_prefix(cache, "xyz/" + key.hex())


def drop(trie: Trie, rows: Rows) -> None:
    trie.drop_copies(rows, CPU)
    trie.remove_all(rows[::-1])


async def test_a_prefix_that_goes_meanwhile_is_not_found(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_keys, "_PATH_ROWS", 2)
    monkeypatch.setattr(prefix_info, "Pacer", lambda: Pacer(1))
    monkeypatch.setattr(prefix_pages, "Pacer", lambda: Pacer(1))
    rows = enter(cache, 0, 30, 1.0)
    trie = cache.tries[0]
    key = trie.key(int(rows[-1])).hex()
    path = asyncio.create_task(Prefix.of(trie, int(rows[-1])).path(Pacer(1)))
    inspection = asyncio.create_task(inspect_prefix(cache, pb.InspectRequest(key=key)))
    listing = asyncio.create_task(list_prefixes(cache, pb.ListPrefixesRequest()))
    for _ in range(4):
        await asyncio.sleep(0)
    drop(trie, rows)
    enter(cache, 1, 30, 2.0)  # its rows have others' blocks now
    for task in (path, inspection):
        with pytest.raises(NotFoundError):
            await task
    assert keys((await listing).prefixes) != [key]


async def test_the_event_loop_is_not_held_by_a_long_prompt_or_many_prefixes(cache: TieredCache) -> None:
    long = enter(cache, 0, 60_000, 1.0)
    stem = enter(cache, 1, 500, 1.0)
    for _ in range(2000):
        enter(cache, 1, 1, 2.0, parent=int(stem[-1]))
    trie = cache.tries[0]
    key = trie.key(int(long[-1])).hex()
    for call in (
        lambda: list_prefixes(cache, pb.ListPrefixesRequest(limit=LIMIT)),
        lambda: inspect_prefix(cache, pb.InspectRequest(key=key[:10])),
        lambda: inspect_prefix(cache, pb.InspectRequest(key=key, first_block=50_000)),
    ):
        whole, longest = await cpu_time_of(call())
        assert longest < max(0.02, whole / 5), f"{longest * 1e3:.1f} of {whole * 1e3:.1f} ms in one callback"


async def cpu_time_of(work: object) -> tuple[float, float]:
    """CPU time of a coroutine, and the longest stretch of it between two turns of others."""
    assert asyncio.iscoroutine(work)
    gc.collect()  # none is due in what is measured
    longest, begin = 0.0, time.thread_time()
    task = asyncio.ensure_future(work)
    while not task.done():
        before = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - before)
    await task
    return time.thread_time() - begin, longest


async def test_a_prefix_is_shown_group_by_group(cache: TieredCache) -> None:
    window = SlidingWindow(TOKENS + 1)
    ranks = [(PartSpec("full", rank, 4096), PartSpec("window", rank, 512, window)) for rank in (0, 1)]
    home = cache.register(NamespaceSpec("hybrid", TOKENS, (*ranks[0], *ranks[1])))
    trie, rows = cache.trie(home), enter(cache, home.ordinal, 3, 10.0)
    trie.drop_copies(rows[:2], CPU, 0b10)
    trie.put_copies(rows[1:2], DISK, np.array([[NO_SLOT, 4096, NO_SLOT, 4608]]), 10.0)
    trie.put_copies(rows[:1], DISK, np.array([[0, 4096, NO_SLOT, NO_SLOT]]), 10.0)  # one rank's only
    shown = await inspect_prefix(cache, pb.InspectRequest(key=trie.key(int(rows[-1])).hex()))
    assert [[(entry.tier - 1, list(entry.groups)) for entry in block.there] for block in shown.blocks] == [
        [(CPU, [0])],
        [(CPU, [0]), (DISK, [1])],
        [(CPU, [0, 1])],
    ]
    assert [list(block.tiers) for block in shown.blocks] == [[], [], [CPU + 1]]
    assert [block.nbytes for block in shown.blocks] == [8192, 9216, 9216]
    full, last = shown.prefix.groups
    assert (list(full.names), full.parts, full.rule, full.block_bytes) == (["full"], 2, "full attention", 8192)
    assert (list(last.names), last.parts, last.block_bytes) == (["window"], 2, 1024)
    assert last.rule == "sliding window of 5 tokens"
    assert (full.blocks, last.blocks, shown.prefix.nbytes) == (3, 2, 3 * 8192 + 2 * 1024)
    listed = await list_prefixes(cache, pb.ListPrefixesRequest(namespace_id=home.id))
    assert listed.prefixes[0].groups == shown.prefix.groups


async def test_a_namespace_with_one_group_is_shown_as_ever(cache: TieredCache) -> None:
    rows = enter(cache, 0, 2, 10.0)
    key = cache.trie(cache.namespaces.at(0)).key(int(rows[-1])).hex()
    shown = await inspect_prefix(cache, pb.InspectRequest(key=key))
    assert [(list(block.tiers), block.nbytes) for block in shown.blocks] == [([CPU + 1], 4096)] * 2
    (group,) = shown.prefix.groups
    assert (group.rule, group.blocks, shown.prefix.nbytes) == ("full attention", 2, 8192)


async def test_prefixes_of_a_worker_name_its_model(cache: TieredCache) -> None:
    own = NamespaceSpec("5f1e", TOKENS, (PartSpec("full", 0, 4096),), worker=True)
    specs = [own, own.for_images(TOKENS, own.parts[0]), NamespaceSpec("5f1e", TOKENS, own.parts)]
    homes = [cache.register(spec) for spec in specs]
    infos = [pb.PrefixInfo(namespace_id=home.id) for home in homes]
    host: Any = SimpleNamespace(namespace_name="5f1e", name="llama")
    PromptLookup(cache, {"llama": host}).add_models([*infos, pb.PrefixInfo(namespace_id=b"forgotten")])
    assert [info.model for info in infos] == ["llama", "llama", ""]


@pytest.mark.parametrize("limit", [2, 50])
async def test_the_largest_or_those_with_most_hits_come_first(cache: TieredCache, limit: int) -> None:
    rng = np.random.default_rng(limit)
    sizes: list[tuple[int, int, int, str]] = []
    hits: list[tuple[int, int, int, str]] = []
    for number in range(20):
        namespace, count = number % 3, int(rng.integers(0, 4))
        rows = enter(cache, namespace, int(rng.integers(1, 6)), 1.0)
        trie = cache.trie(cache.namespaces.at(namespace))
        sizes.append((-len(rows), trie.ordinal, int(rows[-1]), trie.key(int(rows[-1])).hex()))
        middle = int(rows[len(rows) // 2])  # where another prompt left this one
        trie.hits[middle] = count
        if count:
            hits.append((-count, trie.ordinal, middle, trie.key(middle).hex()))
    largest = await all_pages(cache, limit, order=pb.ListPrefixesRequest.ORDER_SIZE)
    assert keys(largest) == [key for *_, key in sorted(sizes)]
    found = await all_pages(cache, limit, order=pb.ListPrefixesRequest.ORDER_HITS)
    assert [(-info.hits, info.key) for info in found] == [(count, key) for count, _, _, key in sorted(hits)]


async def test_a_row_that_is_used_again_has_no_hits(cache: TieredCache) -> None:
    rows = enter(cache, 0, 2, 1.0)
    trie = cache.trie(cache.namespaces.at(0))
    trie.hits[rows] = 7
    trie.drop_copies(rows, CPU)
    trie.remove_all(rows)
    again = enter(cache, 0, 2, 2.0)
    assert set(again.tolist()) == set(rows.tolist()) and not trie.hits[again].any()
