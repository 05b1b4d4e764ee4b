"""Two hosts and a store between them: what one has shared the other finds, and never a wrong byte."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixd.base.rules.rules import SlidingWindow
from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.cache.background.forgetting import find_subtree, forget
from prefixd.cache.index.trie import CPU, REMOTE
from prefixd.cache.remote import Remote, RemoteOptions, health, lookups, sharing
from prefixd_swap import RemoteStoreError
from prefixd_swap.stores.sealed import HEAD_BYTES, Seal
from tests.cache.remote.memory_store import MemoryStore
from tests.rig import WAIT_S, Rig
from tests.waiting import until

PROMPT = [1, 2, 3, 4, 5]


@asynccontextmanager
async def two_hosts(path: Path, **how: object) -> AsyncIterator[tuple[Rig, Rig, MemoryStore, MemoryStore]]:
    """Rigs A and B, each with its own client of one store, and the clients."""
    stores = MemoryStore(), MemoryStore()
    stores[1].objects = stores[0].objects
    settings: dict[str, object] = {"cpu": 16} | how
    rigs = [Rig(path / name, remote=store, **settings) for name, store in zip("ab", stores, strict=True)]
    try:
        yield *rigs, *stores
    finally:
        for store in stores:
            store.held = False
        for rig in rigs:
            await rig.close()


def remote_of(rig: Rig) -> Remote:
    assert rig.cache.mover.remote is not None
    return rig.cache.mover.remote


async def look_up(rig: Rig, prompt: Sequence[int]) -> None:
    await remote_of(rig).lookups.look_up(rig.trie, rig.namespace, rig.chain(prompt))


async def share(rig: Rig) -> None:
    assert await remote_of(rig).sharing.write_all()


async def test_a_cold_host_finds_what_another_has_shared(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, store, _):
        await a.put(PROMPT)
        await share(a)
        assert len(store.objects) == len(PROMPT)
        assert await b.get([*PROMPT, 6]) == len(PROMPT)  # every byte is compared
        assert b.tiers(PROMPT, CPU) == [True] * len(PROMPT)
        assert b.cache.counters.hit_tokens[REMOTE] == 2 * len(PROMPT)


async def test_one_call_asks_about_a_prompt(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, cpu=64) as (a, b, _, store):
        await a.put(list(range(40)))
        await share(a)
        await b.get(list(range(60)))
        assert store.asked == [60]


async def test_a_no_is_remembered_for_a_while(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, _, store):
        assert await b.get(PROMPT) == 0
        b.clock.now -= 1  # `get` lets a second pass
        assert await b.get(PROMPT) == 0
        assert store.asked == [5]
        assert remote_of(b).lookups.counters.remembered == 1
        await a.put(PROMPT)
        await share(a)
        assert await b.get(PROMPT) == 5


async def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, _, store):
        for rig in (a, b):
            await rig.put(PROMPT)
            await share(rig)
        assert store.puts == 0
        assert b.tiers(PROMPT, REMOTE) == [True] * 5


@pytest.mark.parametrize("other", ["salt", "name", "geometry"])
async def test_another_namespace_finds_nothing(tmp_path: Path, other: str) -> None:
    async with two_hosts(tmp_path) as (a, b, _, _):
        await a.put(PROMPT)
        await share(a)
        spec = a.namespace.spec
        parts = (PartSpec("kv", 0, 8192),) if other == "geometry" else spec.parts
        theirs = NamespaceSpec(
            "other" if other == "name" else spec.name, spec.block_tokens, parts, b"s" if other == "salt" else b""
        )
        assert await b.get(PROMPT, namespace=b.cache.register(theirs)) == 0


def torn(value: bytearray) -> None:
    del value[-1]


def longer(value: bytearray) -> None:
    value += b"\0"


def altered(value: bytearray) -> None:
    value[-7] ^= 1


def altered_identity(value: bytearray) -> None:
    value[20] ^= 1


def altered_tag(value: bytearray) -> None:
    value[HEAD_BYTES - 9] ^= 1


def altered_checksum(value: bytearray) -> None:
    value[HEAD_BYTES - 1] ^= 1


def foreign(value: bytearray) -> None:
    value[:8] = b"somebody"


def old(value: bytearray) -> None:
    value[8] += 1


DAMAGES = {
    torn: None,
    longer: None,
    altered: "altered",
    altered_identity: "foreign",
    altered_tag: "altered",
    altered_checksum: "altered",
    foreign: "foreign",
    old: "old",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
async def test_an_object_that_is_not_what_was_sealed_is_a_miss(
    tmp_path: Path, damage: Callable[[bytearray], None], encrypt: bool
) -> None:
    seal = Seal(b"a secret of tests", b"a key of tests!!" if encrypt else None)
    async with two_hosts(tmp_path, seal=seal) as (a, b, store, _):
        await a.put(PROMPT)
        await share(a)
        names = list(store.objects)
        value = bytearray(store.objects[names[2]])
        damage(value)
        store.objects[names[2]] = bytes(value)
        assert await b.get(PROMPT) == 2
        kind = DAMAGES[damage]
        assert dict(remote_of(b).tier.bad_objects) == ({} if kind is None else {kind: 1})
        assert b.cache.mover.lost["not served: missing or wrong in the shared store"] == 1
        b.check()


async def test_an_object_under_another_name_is_a_miss(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, store, _):
        await a.put(PROMPT)
        await share(a)
        names = list(store.objects)
        store.objects[names[1]] = store.objects[names[0]]
        assert await b.get(PROMPT) == 1


async def test_who_lacks_the_secret_finds_nothing_and_writes_nothing_that_is_found(tmp_path: Path) -> None:
    store = MemoryStore()
    thief = Rig(tmp_path / "thief", cpu=16, remote=store, seal=Seal(b"a guessed secret"))
    honest = Rig(tmp_path / "honest", cpu=16, remote=store)
    try:
        await thief.put(PROMPT)
        await share(thief)
        assert await honest.get(PROMPT) == 0
        await honest.put(PROMPT)
        await share(honest)
        assert len(store.objects) == 10
        await thief.cache.close()
    finally:
        await honest.close()


async def test_an_encrypted_payload_cannot_be_read_in_the_store(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, seal=Seal(b"a secret of tests", b"a key of tests!!")) as (a, b, store, _):
        await a.put([1])
        await share(a)
        (value,) = store.objects.values()
        assert a.content(a.namespace, a.chain([1]), 0) not in value
        assert a.chain([1]).token_ids not in value
        checksum = int(a.trie.checksums[a.rows([1])[0], 0])
        assert checksum and checksum.to_bytes(8, "little") not in value, "it would tell whose guess is right"
        assert await b.get([1]) == 1


async def test_a_store_that_is_away_is_out_of_service_until_it_answers(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, _, store):
        tasks = remote_of(b).start()
        await a.put(PROMPT)
        await share(a)
        store.away = True
        assert await b.get(PROMPT) == 0
        assert "away" in b.cache.tiers.troubles.of_tier(remote_of(b).tier)
        calls = len(store.asked)
        assert await b.get([7]) == 0 and await b.put([7]) == (1, 0)
        assert len(store.asked) == calls  # nobody asks it
        store.away = False
        await until(lambda: remote_of(b).tier.readable)
        b.clock.now += 10
        assert await b.get(PROMPT) == 5
        assert not b.cache.tiers.troubles.of_tier(remote_of(b).tier)
        await until(lambda: remote_of(b).sharing.written >= 1)
        assert not any(task.done() for task in tasks)


async def test_bytes_that_change_in_memory_while_the_store_is_away_are_served_by_nobody(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, store, _):
        tasks = remote_of(a).start()
        store.away = True
        assert await a.get(PROMPT) == 0 and not remote_of(a).tier.writable
        await a.put(PROMPT)
        await a.cache.mover.checksums.wait_for_all()
        shared = a.cache.tiers.shared
        address = int(shared.addresses(a.trie.slots[a.rows(PROMPT)[2:3], shared.level])[0, 0])
        ctypes.c_uint8.from_address(address).value ^= 1
        store.away = False
        await until(lambda: remote_of(a).sharing.written == len(PROMPT))
        assert await b.get(PROMPT) == 2
        assert not any(task.done() for task in tasks)


async def test_blocks_that_only_a_store_has_are_not_matched_while_it_is_away(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, _, store):
        await a.put(PROMPT)
        await share(a)
        await look_up(b, PROMPT)
        assert len(b.rows(PROMPT)) == 5
        store.away = True
        assert await b.get(PROMPT) == 0
        assert b.rows(PROMPT) == []


async def test_a_frozen_store_costs_one_timeout(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, options=RemoteOptions(lookup_s=0.05)) as (a, b, _, store):
        await a.put(PROMPT)
        await share(a)
        store.latency_s, before = 60.0, store.calls
        assert await b.get(PROMPT) == 0
        await until(lambda: not remote_of(b).tier.readable)  # the call may have begun after `get` had given it up
        assert store.calls == before + 1


async def test_a_slow_answer_is_for_those_who_ask_later(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, options=RemoteOptions(lookup_s=0.01)) as (a, b, _, store):
        await a.put(PROMPT)
        await share(a)
        store.held = True
        assert await b.get(PROMPT) == 0
        assert remote_of(b).lookups.counters.unanswered == 1
        store.held = False
        await until(lambda: len(b.rows(PROMPT)) == 5)
        assert await b.get(PROMPT) == 5


async def test_a_full_store_is_still_read(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, _, store):
        await a.put(PROMPT)
        await share(a)
        store.full = True
        await b.put([9])
        assert not await remote_of(b).sharing.write_all()
        assert "full" in b.cache.tiers.troubles.of_tier(remote_of(b).tier)
        assert await b.get(PROMPT) == 5
        assert not remote_of(b).tier.writable


async def test_a_store_that_is_full_is_a_trouble_until_it_takes_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, seconds in ((health, "FULL_S", 1.0), (sharing, "_RETRY_S", 0.02), (sharing, "_SCAN_S", 0.01)):
        monkeypatch.setattr(module, name, seconds)
    async with two_hosts(tmp_path) as (_, b, _, store):
        store.full = True
        tasks = remote_of(b).start()
        await b.put([9])
        trouble = b.cache.tiers.troubles
        await until(lambda: "remote tier" in trouble)
        began = next(iter(trouble)).since_s
        for _ in range(2):  # it is tried again and again, and stays one trouble
            await until(lambda: remote_of(b).tier.writable)
            await b.put([b.clock.now])
            await until(lambda: not remote_of(b).tier.writable)
        assert next(iter(trouble)).since_s == began
        store.full = False
        await until(lambda: "remote tier" not in trouble)
        assert not any(task.done() for task in tasks)


@pytest.mark.parametrize("learns", ["a write", "a question of the pause"])
async def test_a_store_that_is_away_is_back_as_soon_as_it_answers_whoever_learns_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learns: str
) -> None:
    """Not after the pause for one that refuses writes."""
    monkeypatch.setattr(health, "FULL_S", 3600.0)
    monkeypatch.setattr(sharing, "_RETRY_S", 0.02)
    async with two_hosts(tmp_path) as (a, b, _, store):
        await a.put(PROMPT)
        await share(a)
        tasks = remote_of(b).start()
        await b.put([8])
        await until(lambda: remote_of(b).sharing.written == 1)
        put = store.put

        async def goes_away(*_: object) -> None:
            store.away = True
            raise RemoteStoreError("the connection is broken, as the test says")

        if learns == "a write":
            monkeypatch.setattr(store, "put", goes_away)
        store.full = learns != "a write"
        await b.put([9])
        if store.full:
            await until(lambda: not remote_of(b).tier.writable)
            assert remote_of(b).tier.readable
            store.away = True
            assert await b.get(PROMPT) == 0  # which asks it
        await until(lambda: not remote_of(b).tier.readable)
        monkeypatch.setattr(store, "put", put)
        store.away = store.full = False
        await until(lambda: remote_of(b).tier.readable)
        b.clock.now += 10
        assert await b.get(PROMPT) == 5
        await until(lambda: remote_of(b).tier.writable and remote_of(b).sharing.written >= 2)
        # The pause is there again for one that refuses.
        store.full = True
        await b.put([10])
        await until(lambda: not remote_of(b).tier.writable)
        await asyncio.sleep(0.1)
        assert remote_of(b).tier.readable and not remote_of(b).tier.writable
        assert not any(task.done() for task in tasks)


@pytest.mark.parametrize("turns", range(5))
async def test_the_background_work_ends_as_the_store_fails(tmp_path: Path, turns: int) -> None:
    async with two_hosts(tmp_path) as (_, b, _, store):
        tasks = remote_of(b).start()
        store.full = True
        await b.put([9])
        await until(lambda: not remote_of(b).tier.writable)
        await asyncio.sleep(0.05)  # it pauses
        remote_of(b).health.failed(RemoteStoreError("gone, as the test says"))
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await remote_of(b).stop()
        assert all(task.done() for task in tasks)


async def test_what_the_store_has_lost_is_forgotten_and_found_again(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, store, _):
        await a.put(PROMPT)
        await share(a)
        await look_up(b, PROMPT)
        kept = dict(store.objects)
        store.objects.clear()
        assert await b.get(PROMPT) == 0
        store.objects.update(kept)
        b.clock.now += 61
        assert await b.get(PROMPT) == 5


async def test_blocks_that_nobody_asks_for_are_forgotten(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, options=RemoteOptions(known_s=60, lookup_s=WAIT_S)) as (a, b, _, _):
        await a.put(PROMPT)
        await share(a)
        await look_up(b, PROMPT)
        assert await remote_of(b).known.forget_old() == 0
        assert remote_of(b).known.blocks == 5
        b.clock.now += 61
        assert await remote_of(b).known.forget_old() == 5
        assert b.rows(PROMPT) == [] and remote_of(b).tier.entered_parts == 0


async def test_no_more_blocks_are_known_than_the_limit(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, options=RemoteOptions(known_blocks=3, lookup_s=WAIT_S)) as (a, b, _, _):
        await a.put(PROMPT)
        await share(a)
        await look_up(b, PROMPT)
        assert len(b.rows(PROMPT)) == 3


async def test_a_pinned_block_keeps_its_last_copy_here(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, cpu=2) as (a, _, _, _):
        await a.put([1, 2])
        await share(a)
        a.trie.pinned[a.rows([1, 2])] = True
        with pytest.raises(Exception, match="CPU tier"):
            await a.put([3, 4])
        assert a.tiers([1, 2], CPU) == [True, True]


async def test_a_block_that_was_shared_leaves_without_being_written_to_disk(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, cpu=2) as (a, _, _, _):
        await a.put([1, 2])
        await share(a)
        await a.put([3, 4])
        assert a.tiers([1, 2], CPU) == [False, False] and a.tiers([1, 2], REMOTE) == [True, True]
        assert not a.cache.mover.lost
        assert await a.get([1, 2]) == 2


@pytest.mark.parametrize("policy", ["reused", "pinned", "none"])
async def test_only_what_the_policy_names_is_shared(tmp_path: Path, policy: str) -> None:
    async with two_hosts(tmp_path, options=RemoteOptions(share=policy, lookup_s=WAIT_S)) as (a, _, store, _):  # type: ignore[arg-type]
        for prompt in ([1, 2], [3, 4]):
            await a.put(prompt)
        if policy == "reused":
            a.clock.now += 5
            await a.get([1, 2])
        if policy == "pinned":
            a.trie.pinned[a.rows([1, 2])[-1]] = True
        if policy == "none":
            await asyncio.wait_for(remote_of(a).sharing.run(), 5)
        else:
            await share(a)
        assert len(store.objects) == (0 if policy == "none" else 2)


async def test_windows_are_found_where_a_prefix_needs_them(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, cpu=64) as (a, b, store, _):
        parts = (PartSpec("full", 0, 4096), PartSpec("window", 0, 4096, SlidingWindow(4)))
        homes = [rig.cache.register(NamespaceSpec("windows", 2, parts)) for rig in (a, b)]
        await a.put(PROMPT, namespace=homes[0])
        await share(a)
        # Of windows only the last two blocks' bytes are wanted.
        assert len(store.objects) == 5 + 2
        assert await b.get([*PROMPT, 6], namespace=homes[1]) == 5
        assert await b.get(PROMPT[:3], namespace=homes[1]) == 0


async def test_blocks_of_the_gpu_tier_are_shared_and_found(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, gpu=8) as (a, b, _, _):
        rows = await a.put_gpu(PROMPT)
        await share(a)
        assert await b.get(PROMPT) == 5
        a.unhold(rows, a.cache.tiers.compute)


async def test_what_only_the_store_has_is_stored_here_when_somebody_has_computed_it(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, _, _):
        await a.put(PROMPT)
        await share(a)
        await look_up(b, PROMPT)
        assert await b.put(PROMPT) == (5, 0)
        assert b.tiers(PROMPT, CPU) == [True] * 5


async def test_what_could_be_used_again_is_not_written_anew(tmp_path: Path) -> None:
    """Deleting it first would take it from all hosts."""
    async with two_hosts(tmp_path) as (a, b, shared, store):
        await a.put(PROMPT)
        await share(a)
        await look_up(b, PROMPT)
        kept = dict(shared.objects)
        shared.objects.clear()
        assert await b.get(PROMPT) == 0
        shared.objects.update(kept)
        b.clock.now += 61
        assert await b.get(PROMPT) == 5
        async for _ in forget(b.cache.mover, await find_subtree(b.trie, b.rows(PROMPT)[0])):
            pass
        await b.put(PROMPT)
        await share(b)
        assert store.puts == 0 and b.tiers(PROMPT, REMOTE) == [True] * 5


async def test_what_is_evicted_stays_in_the_store_unless_asked(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, store, _):
        for prompt in (PROMPT, [7, 8]):
            await a.put(prompt)
        await share(a)
        blocks = await find_subtree(a.trie, a.rows([7, 8])[0])
        async for _ in forget(a.cache.mover, blocks):
            pass
        assert len(store.objects) == 7 and a.rows([7, 8]) == []
        assert await a.get([7, 8]) == 2  # it is found there again
        a.trie.pinned[a.rows(PROMPT)[1]] = True
        blocks = await find_subtree(a.trie, a.rows(PROMPT)[0])
        async for _ in forget(a.cache.mover, blocks, shared=True):
            pass
        assert len(store.objects) == 4, "two of the prompt are needed here, and are left to others"
        assert await b.get(PROMPT) == 2


async def test_a_store_that_refuses_writes_is_read_all_the_same(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, _, store):
        await a.put(PROMPT)
        await share(a)
        store.read_only = True
        await b.put([9])
        assert not await remote_of(b).sharing.write_all()
        assert remote_of(b).tier.readable and not remote_of(b).tier.writable
        assert "read only" in b.cache.tiers.troubles.of_tier(remote_of(b).tier)
        assert await b.get(PROMPT) == 5


async def test_a_long_prompt_is_forgotten_whole(tmp_path: Path) -> None:
    long = list(range(700))
    async with two_hosts(tmp_path, cpu=1024, options=RemoteOptions(known_s=60, lookup_s=WAIT_S)) as (a, b, store, _):
        await a.put(long)
        await share(a)
        await look_up(b, long)
        assert len(b.rows(long)) == 700
        b.clock.now += 61
        assert await remote_of(b).known.forget_old() == 700
        assert b.rows(long) == [] and remote_of(b).known.blocks == 0
        await look_up(b, long)
        store.objects.clear()
        await remote_of(b).known.forget_all()
        assert b.rows(long) == []


async def test_the_first_failed_piece_of_a_load_ends_it(tmp_path: Path) -> None:
    long = list(range(1200))
    async with two_hosts(tmp_path, cpu=2048) as (a, b, _, store):
        await a.put(long)
        await share(a)
        await look_up(b, long)
        store.latency_s, before = 60.0, store.gets
        assert await b.get(long) == 0
        assert store.gets - before <= 6, "as many as are under way at a time"
        assert not remote_of(b).tier.readable


@pytest.mark.parametrize("policy", ["reused", "pinned"])
async def test_what_is_used_or_pinned_later_is_shared_then(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_SCAN_S", 0.01)
    async with two_hosts(tmp_path, options=RemoteOptions(share=policy, lookup_s=WAIT_S)) as (a, _, store, _):  # type: ignore[arg-type]
        remote_of(a).start()
        await a.put(PROMPT)
        await asyncio.sleep(0.1)
        assert not store.objects
        a.clock.now += 5
        if policy == "reused":
            await a.get(PROMPT)
        else:
            a.trie.pinned[a.rows(PROMPT)[-1]] = True
        a.clock.now += 5
        await until(lambda: len(store.objects) == 5)


async def test_a_prompt_that_is_not_answered_counts_once(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, options=RemoteOptions(lookup_s=0.01)) as (_, b, _, store):
        store.latency_s = 60.0
        assert await b.get(PROMPT) == 0
        await remote_of(b).lookups.close()
        assert remote_of(b).lookups.counters.unanswered == 1


async def test_what_could_not_be_used_is_written_anew_where_a_store_takes_no_name_twice(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, store, other):
        store.once = other.once = True
        await a.put(PROMPT)
        await share(a)
        for name, value in store.objects.items():
            store.objects[name] = value[:-1] + bytes([value[-1] ^ 1])
        assert await b.get(PROMPT) == 0
        await b.put(PROMPT)
        await share(b)
        c = Rig(tmp_path / "c", cpu=16, remote=store)
        assert await c.get(PROMPT) == 5
        await c.close()


@pytest.mark.parametrize("damage", [torn, longer, altered], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize(("later_s", "looks"), [(10.0, True), (10.0, False), (100.0, False)])
async def test_what_could_not_be_used_is_written_anew_however_late(
    tmp_path: Path, damage: Callable[[bytearray], None], later_s: float, looks: bool
) -> None:
    async with two_hosts(tmp_path) as (a, b, store, _):
        await a.put(PROMPT)
        await share(a)
        for name, value in store.objects.items():
            damage(content := bytearray(value))
            store.objects[name] = bytes(content)
        assert await b.get(PROMPT) == 0
        b.clock.now += later_s
        if looks:  # for one that asks for the prompt, or reserves it
            await look_up(b, PROMPT)
        await b.put(PROMPT)
        await share(b)
        c = Rig(tmp_path / "c", cpu=16, remote=store)
        assert await c.get(PROMPT) == 5
        await c.close()


async def test_what_another_host_has_written_anew_is_left_alone(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, b, store, other):
        await a.put(PROMPT)
        await share(a)
        kept = dict(store.objects)
        for name, value in kept.items():
            store.objects[name] = value[:-1]
        assert await b.get(PROMPT) == 0
        store.objects.update(kept)
        b.clock.now += 61
        assert await b.get(PROMPT) == 5, "they are good again"
        async for _ in forget(b.cache.mover, await find_subtree(b.trie, b.rows(PROMPT)[0])):
            pass
        await b.put(PROMPT)
        await share(b)
        assert other.puts == 0 and store.objects == kept


async def test_what_the_store_does_not_delete_is_not_evicted_here(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (a, _, store, _):
        await a.put(PROMPT)
        await share(a)
        store.away = True
        with pytest.raises(RemoteStoreError):
            async for _ in forget(a.cache.mover, await find_subtree(a.trie, a.rows(PROMPT)[0]), shared=True):
                pass
        assert len(a.rows(PROMPT)) == 5
        store.away = False
        async for _ in forget(a.cache.mover, await find_subtree(a.trie, a.rows(PROMPT)[0]), shared=True):
            pass
        assert not store.objects and a.rows(PROMPT) == []


async def test_a_prompt_longer_than_one_call_is_asked_about_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "ASKED_AT_ONCE", 16)
    async with two_hosts(tmp_path, cpu=64) as (a, b, _, store):
        await a.put(list(range(40)))
        await share(a)
        assert await b.get(list(range(50))) == 40
        assert store.asked == [16, 16, 16]
