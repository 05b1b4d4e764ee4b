"""What is announced against what is so, step by step; and a subscriber that does not keep up."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import zmq

from prefixd.base.rules.rules import RecurrentState, SlidingWindow
from prefixd.base.tenancy.tenants import COMMON
from prefixd.cache import (
    Namespace,
    NamespaceSpec,
    PartSpec,
    TieredCache,
    Trie,
)
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import CPU, DISK, REMOTE, TIERS
from prefixd.cache.rules import FullAttention
from prefixd.server.kv_events import announced_rows, announcer, pending_removals
from prefixd.server.kv_events.block_hashes import block_hash
from prefixd.server.kv_events.event_messages import (
    MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KVEventBatch,
)
from prefixd.server.kv_events.publishing import publisher as publisher_module
from prefixd.server.kv_events.publishing import router_events
from prefixd.server.kv_events.publishing.publisher import EventCounters, Publisher
from prefixd.settings import EventSettings
from tests.cache.index.entering import enter_chain
from tests.rig import OpenCache
from tests.tries import is_removable, remove_row, used_rows
from tests.waiting import until

STATE = RecurrentState()
ON = EventSettings(endpoint="ipc:///nowhere")


class Router:
    """Stands in for the sockets: believes what it is told, and is strict about it."""

    def __init__(self, settings: EventSettings, subscribed: Callable[[], None]) -> None:
        self.counters = EventCounters()
        self.blocks: set[tuple[str, int]] = set()
        self.prompts: dict[int, int] = {}  # of every hash ever told, all tokens up to its block's end (`continued`)
        self.batches: list[Sequence[Event]] = []
        self.topics: list[bytes] = []

    def publish(self, topic: bytes, events: Sequence[Event]) -> None:
        self.batches.append(events)
        self.topics.append(topic)
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.blocks.clear()
                case BlockRemoved(hashes, medium):
                    for key in hashes:
                        self.blocks.remove((medium, key))
                case BlockStored(hashes, parent, tokens, width):
                    known = {key for _, key in self.blocks}
                    assert parent is None or parent in known, "its parent was not told"
                    assert len(tokens) == width * len(hashes) == width * len(event.extra_keys or ())
                    for place, key in enumerate(hashes):
                        assert (event.medium, key) not in self.blocks, "told twice"
                        self.blocks.add((event.medium, key))
                        before = 0 if parent is None else self.prompts[parent]
                        prompt = continued(before, tokens[place * width : (place + 1) * width])
                        assert self.prompts.setdefault(key, prompt) == prompt
                        parent = key

    def close(self) -> None:
        pass

    @property
    def believed(self) -> set[tuple[str, int]]:
        """By their tokens; a block that is known by two hashes is believed twice."""
        assert len(set(self.prompts.values())) == len(self.prompts), "the same tokens have two hashes"
        return {(medium, self.prompts[key]) for medium, key in self.blocks}


@pytest.fixture
async def cache(tmp_path: Path) -> Any:
    opened = OpenCache(tmp_path / "disk", disk_bytes=1 << 20)
    yield opened.cache
    await opened.close(check=False)  # its rows have no slots


def hash_of(namespace: Namespace, trie: Trie, row: int) -> int:
    return block_hash(namespace.id, trie.key(row))


def matchable(namespace: Namespace, trie: Trie) -> set[tuple[str, int]]:
    return {
        (medium, hash_of(namespace, trie, row))
        for row in used_rows(trie).tolist()
        for tier, medium in enumerate(MEDIA.values())
        if trie.has(row, tier) and trie.offered & (1 << tier)
    }


def continued(before: int, tokens: Sequence[int]) -> int:
    """Stands for all tokens of a prompt that goes on with these."""
    return hash((before, tuple(tokens)))


def engine_blocks(trie: Trie, width: int) -> set[tuple[str, int]]:
    """What routers should believe: of each tier, the prompts that end with an engine's block of one of its blocks."""
    ends: dict[int, list[int]] = {}

    def ends_in(row: int) -> list[int]:
        if row not in ends:
            parent, tokens = int(trie.parent[row]), trie.tokens[row].tolist()
            before, ends[row] = 0 if parent < 0 else ends_in(parent)[-1], []
            for place in range(0, trie.block_tokens, width):
                before = continued(before, tokens[place : place + width])
                ends[row].append(before)
        return ends[row]

    return {
        (medium, end)
        for row in used_rows(trie).tolist()
        for tier, medium in enumerate(MEDIA.values())
        if trie.has(row, tier) and trie.offered & (1 << tier)
        for end in ends_in(row)
    }


@pytest.mark.parametrize(("seed", "width"), [(0, 6), (1, 6), (2, 2), (3, 2), (4, 1), (5, 1)])
async def test_what_was_told_is_what_is_so(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch, seed: int, width: int
) -> None:
    """Rows are used again, blocks come back under other rows, a tier goes and comes, in the middle of small turns; with
    blocks of six tokens and an engine that has so many, two or one, so that they begin alike."""
    monkeypatch.setattr(router_events, "Publisher", Router)
    for module, name, value in (
        (announcer, "_TURN_ROWS", 5),
        (announcer, "_TURN_COUNTED", 15),
        (pending_removals, "_TURN_HASHES", 4),
        (announcer, "_TURN_BLOCKS", 9),
        (announced_rows, "_WINDOW", 6),
        (pending_removals, "_TURN_FORGOTTEN", 3),
    ):
        monkeypatch.setattr(module, name, value)
    namespace = cache.register(NamespaceSpec("m", 6, (PartSpec("a", 0, 8), PartSpec("b", 0, 8))))
    trie = cache.trie(namespace)
    now_s = [0.0]  # stands still at the end: nothing is announced again once the disk is out of service
    settings = ON.model_copy(update={"block_tokens": width, "again_s": 1.0})
    events = router_events.KVEvents(cache, settings, lambda: now_s[0])
    router: Any = events._publisher
    cache.observe(events._mark_changed)
    events.announce_all()
    choose = random.Random(seed)

    def grow() -> None:
        """A prompt of few different tokens, so that what was removed comes back."""
        prompt = np.array([choose.randrange(10) == 0 for _ in range(6 * choose.randrange(1, 8))], "<u4")
        chain = cache.chain(namespace, prompt.tobytes())
        tier = choose.randrange(REMOTE)  # of this host
        for row in enter_chain(trie, chain, namespace.root, namespace.ordinal):
            for part in (0, 1):  # first it is torn
                trie.put_copies(np.array([row]), tier, np.array([[1 if at == part else -1 for at in range(2)]]), 0.0)
                if choose.random() < 0.1:
                    events._run_turn()

    def shrink() -> None:
        rows = used_rows(trie).tolist()
        choose.shuffle(rows)
        for row in rows[: choose.randrange(1, 12)]:
            if is_removable(trie, row):  # a leaf goes everywhere
                for tier in range(TIERS):
                    trie.drop_copies(np.array([row]), tier)
                if not trie.any_part[row]:
                    remove_row(trie, row)
            elif any(trie.has(row, tier) for tier in range(TIERS)):
                tiers = [tier for tier in range(TIERS) if trie.has(row, tier)]
                if len(tiers) > 1:
                    trie.drop_copies(np.array([row]), choose.choice(tiers))

    for _ in range(300):
        now_s[0] += 0.05
        choose.choice((grow, grow, shrink))()
        if choose.random() < 0.02:
            events.announce_all()
        for _ in range(choose.randrange(4)):
            events._run_turn()
        if choose.random() < 0.1:
            while events._run_turn():
                pass
            assert router.believed == engine_blocks(trie, width)
    while events._run_turn():
        pass
    assert router.believed == engine_blocks(trie, width) and len(router.blocks) > 20
    # The disk goes out of service: what is nowhere else is nowhere, and all of it is back later.
    trie.offer(DISK, False)
    while events._run_turn():
        pass
    assert router.believed == engine_blocks(trie, width)
    assert not any(medium == "STORAGE" for medium, _ in router.blocks)
    assert max(sum(len(e.block_hashes) for e in batch if isinstance(e, BlockRemoved)) for batch in router.batches) <= 4


@pytest.mark.parametrize("lasting", [True, False])
async def test_of_several_groups_those_count_that_every_prefix_needs(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    """Windows and states come and go, and the block stays announced; where there are no others, any of them counts."""
    monkeypatch.setattr(router_events, "Publisher", Router)
    parts = (PartSpec("full", 0, 8, None if lasting else SlidingWindow(9)), PartSpec("state", 0, 8, STATE))
    namespace = cache.register(NamespaceSpec("m", 2, parts))
    trie = cache.trie(namespace)
    events = router_events.KVEvents(cache, ON)
    router: Any = events._publisher
    cache.observe(events._mark_changed)
    rows = enter_chain(trie, cache.chain(namespace, np.arange(8, dtype="<u4").tobytes()), namespace.root)

    def told() -> list[bool]:
        while events._run_turn():
            pass
        return [("CPU", hash_of(namespace, trie, row)) in router.blocks for row in rows.tolist()]

    trie.put_copies(rows, CPU, np.array([[1, 2], [3, -1], [5, -1], [7, 8]]), 0.0)
    assert told() == [True] * 4
    trie.drop_copies(rows, CPU, trie.groups[1].mask)
    assert told() == [True] * 4
    trie.put_copies(rows[-1:], CPU, np.array([[-1, 9]]), 0.0)
    assert told() == [True] * 4
    trie.drop_copies(rows[2:], CPU, trie.groups[0].mask)
    assert told() == [True, True, False, not lasting]
    if lasting:  # else the last block's parent is nowhere, and a strict router refuses it
        events.announce_all()
        assert told() == [True, True, False, False]


async def test_turns_are_bounded(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much comes at once: a turn tells of few blocks, and consecutive ones in one event."""
    monkeypatch.setattr(router_events, "Publisher", Router)
    namespace = cache.register(NamespaceSpec("m", 64, (PartSpec("a", 0, 8),)))
    trie = cache.trie(namespace)
    chain = cache.chain(namespace, np.arange(64 * 3000, dtype="<u4").tobytes())
    rows = enter_chain(trie, chain, namespace.root, namespace.ordinal)
    trie.put_copies(rows, DISK, np.arange(len(chain))[:, None], 0.0)
    events = router_events.KVEvents(cache, ON)
    router: Any = events._publisher
    events.announce_all()
    while events._run_turn():
        pass
    assert router.batches[0] == [AllBlocksCleared()]
    stored = router.batches[1:]
    assert all(len(batch) == 1 for batch in stored)
    assert [len(batch[0].block_hashes) for batch in stored] == [512] * 23 + [4 * 3000 - 23 * 512]
    assert [key for batch in stored for key in batch[0].block_hashes[3::4]] == [
        block_hash(namespace.id, chain.key(i)) for i in range(3000)
    ]
    assert {batch[0].block_size for batch in stored} == {16}
    trie.drop_copies(rows, DISK)
    events._mark_changed(trie, rows)
    while events._run_turn():
        pass
    removed = [batch for batch in router.batches if isinstance(batch[0], BlockRemoved)]
    assert not router.blocks and not len(events._engine_blocks)
    assert max(len(event.block_hashes) for batch in removed for event in batch) <= 4096


async def test_announcements_do_not_overtake_each_other(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subscribers that come one after the other cannot keep an announcement from its end."""
    monkeypatch.setattr(router_events, "Publisher", Router)
    monkeypatch.setattr(announcer, "_TURN_BLOCKS", 1)
    namespace = cache.register(NamespaceSpec("m", 1, (PartSpec("a", 0, 8),)))
    trie = cache.trie(namespace)
    for token in range(4):
        chain = cache.chain(namespace, np.array([token], "<u4").tobytes())
        trie.put_copies(enter_chain(trie, chain, namespace.root, namespace.ordinal), DISK, np.array([[token]]), 0.0)
    events = router_events.KVEvents(cache, ON, iter(range(0, 100_000, 1000)).__next__)
    router: Any = events._publisher
    most = 0
    for _ in range(12):
        events.announce_all()
        events._run_turn()
        most = max(most, len(router.blocks))
    assert most == 4
    while events._run_turn():
        pass
    assert router.blocks == matchable(namespace, trie)


@pytest.mark.parametrize("took_s", [0.0, 3.0])
async def test_subscribers_that_come_all_the_time_make_nobody_hear_everything_all_the_time(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch, took_s: float
) -> None:
    """137 in 8 s took 21 MiB to each router that was subscribed. Announcing takes a tenth of the time at most."""
    monkeypatch.setattr(router_events, "Publisher", Router)
    namespace = cache.register(NamespaceSpec("m", 1, (PartSpec("a", 0, 8),)))
    trie, chain = cache.trie(namespace), cache.chain(namespace, bytes(4))
    trie.put_copies(enter_chain(trie, chain, namespace.root, namespace.ordinal), DISK, np.array([[0]]), 0.0)
    now = 0.0

    def publish(self: Any, topic: bytes, said: Sequence[Event]) -> None:
        nonlocal now
        now += took_s if isinstance(said[0], BlockStored) else 0.0
        self.batches.append(said)

    monkeypatch.setattr(Router, "publish", publish)
    events = router_events.KVEvents(cache, ON.model_copy(update={"again_s": 5.0}), lambda: now)
    router: Any = events._publisher
    begun = []
    while now < 100.0:
        events.announce_all()
        said = len(router.batches)
        while events._run_turn():
            pass
        begun += [now] if len(router.batches) > said else []
        now += 8 / 137
    apart_s = max(5.0, 10 * took_s)
    assert len(begun) == pytest.approx(100.0 / apart_s, abs=2)
    assert all(later - earlier >= apart_s - took_s for earlier, later in pairwise(begun))


async def test_a_subscriber_that_had_to_wait_hears_everything_without_another_event(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_events, "Publisher", Router)
    events = router_events.KVEvents(cache, ON.model_copy(update={"again_s": 0.05}))
    router: Any = events._publisher
    events.start()
    for announced in (1, 2, 3):
        await until(lambda most=announced: len(router.batches) >= most)
        events.announce_all()
    await events.stop()


CLAIMED = {"name": "llama", "block_tokens": 1, "parts": (PartSpec("a", 0, 2),)}


@pytest.mark.parametrize(
    ("spec", "named", "told"),
    [
        ({}, ("default/*",), True),
        ({"tenant": "mallory"}, ("default/*",), False),  # two bytes under another one's model
        ({"tenant": "mallory"}, (), False),
        ({"tenant": "alice"}, ("alice/ll*",), True),
        ({"tenant": "alice"}, ("alice/qwen",), False),
        ({"tenant": "alice", "salt": b"s"}, ("alice/llama",), True),
        ({"tenant": "mallory", "worker": True}, (), True),  # what this daemon's worker computed is so
        ({"worker": True, "name": "llama-images"}, ("default/*",), False),  # of drawn ids, which are in no prompt
        ({"name": "llama-images"}, ("default/*",), True),  # a client's own
        ({"tenant": COMMON}, ("default/*",), False),
        ({"tenant": COMMON}, ("(common)/*",), True),
    ],
)
async def test_whose_blocks_are_told(
    cache: TieredCache,
    monkeypatch: pytest.MonkeyPatch,
    spec: dict[str, Any],
    named: tuple[str, ...],
    told: bool,
) -> None:
    """And when they go, or everything is told anew."""
    monkeypatch.setattr(router_events, "Publisher", Router)
    events = router_events.KVEvents(
        cache, ON.model_copy(update={"namespaces": named, "topic": "kv@{tenant}@{namespace}"})
    )
    router: Any = events._publisher
    cache.observe(events._mark_changed)
    namespace = cache.register(NamespaceSpec(**{**CLAIMED, **spec}))
    trie, chain = cache.trie(namespace), cache.chain(namespace, bytes(4))
    rows = enter_chain(trie, chain, namespace.root, namespace.ordinal)
    trie.put_copies(rows, DISK, np.array([[0]]), 0.0)
    events.announce_all()
    while events._run_turn():
        pass
    assert router.blocks == (matchable(namespace, trie) if told else set())
    trie.drop_copies(rows, DISK)
    while events._run_turn():
        pass
    assert not router.blocks
    topic = f"kv@{namespace.spec.tenant}@{namespace.spec.name}".encode()
    assert router.topics == ([topic] * 3 if told else [])


async def test_every_topic_begins_with_all_blocks_cleared(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a namespace which was not known when the announcement began."""
    monkeypatch.setattr(router_events, "Publisher", Router)
    events = router_events.KVEvents(cache, ON.model_copy(update={"topic": "kv@{namespace}"}))
    router: Any = events._publisher
    cache.observe(events._mark_changed)
    cache.register(NamespaceSpec("early", 1, (PartSpec("a", 0, 8),)))
    events.announce_all()
    events._run_turn()
    namespace = cache.register(NamespaceSpec("late", 1, (PartSpec("a", 0, 8),)))
    trie, chain = cache.trie(namespace), cache.chain(namespace, bytes(4))
    trie.put_copies(enter_chain(trie, chain, namespace.root, namespace.ordinal), DISK, np.array([[0]]), 0.0)
    events._run_turn()
    assert router.topics == [b"kv@early", b"kv@late", b"kv@late"]
    assert router.batches[:2] == [[AllBlocksCleared()]] * 2
    assert router.blocks == matchable(namespace, trie)


async def test_a_context_that_does_not_end_is_left_to_itself(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_CLOSE_S", 0.05)
    publisher = Publisher(EventSettings(endpoint=f"ipc://{folder}/events"), lambda: None)
    go_on, destroy = threading.Event(), publisher._context.destroy
    monkeypatch.setattr(publisher._context, "destroy", lambda linger: (go_on.wait(60), destroy(linger)))
    publisher.close()
    assert "not closed after 0.05 s" in caplog.text
    go_on.set()
    await asyncio.to_thread(_ended, "kv-events-end")


def _ended(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("bound", ["batches", "bytes"])
async def test_a_subscriber_that_does_not_read(bound: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It misses batches and can see that; others miss nothing, nobody waits, it is counted and logged once."""
    endpoint, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    joined: asyncio.Queue[None] = asyncio.Queue()
    event = BlockStored([1], None, list(range(1 << 16)), 1 << 16, None, "CPU", None)
    nbytes = len(msgspec.msgpack.encode(KVEventBatch(1.5, [event], 0)))
    limits = {"buffer_batches": 40, "buffer_bytes": 1 << 30}
    if bound == "bytes":
        limits = {"buffer_batches": 10_000, "buffer_bytes": 41 * nbytes - 1}
    settings = EventSettings(endpoint=endpoint, replay_endpoint=replay, queue_batches=100, **limits)
    publisher = Publisher(settings, lambda: joined.put_nowait(None), clock=lambda: 1.5)
    with zmq.Context() as context:
        slow, fast = context.socket(zmq.SUB), context.socket(zmq.SUB)
        asking = context.socket(zmq.DEALER)
        try:
            for one in (slow, fast):
                one.setsockopt(zmq.LINGER, 0)
                one.setsockopt(zmq.RCVHWM, 1)
                one.subscribe(b"")
                one.connect(endpoint)
                await asyncio.wait_for(joined.get(), 60)
            sent = 0
            while not publisher.counters.overruns or sent < 200:
                publisher.publish(b"t", [event])
                assert int.from_bytes((await receive(fast))[1], "big") == sent
                sent += 1
                assert sent < 5000
            assert publisher.counters.batches == publisher.counters.events == sent
            heard = [int.from_bytes((await receive(slow))[1], "big") for _ in range(50)]
            while heard[-1] == heard[-2] + 1:  # until the gap; what was missed does not come, what is new does
                if not slow.poll(100):
                    publisher.publish(b"t", [event])
                    sent += 1
                    await receive(fast)
                else:
                    heard.append(int.from_bytes(slow.recv_multipart()[1], "big"))
            assert len([record for record in caplog.records if "behind" in record.message]) == 1
            # It asks for what it missed and gets what is still there.
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(replay)
            asking.send_multipart((b"", (heard[-2] + 1).to_bytes(8, "big")))
            again = []
            while (message := await receive(asking))[2] != b"\xff" * 8:
                again.append(int.from_bytes(message[2], "big"))
            assert again == list(range(sent - 40, sent))
            # The next time that it stops to read is counted anew.
            while publisher.counters.overruns < 2:
                publisher.publish(b"t", [event])
                await receive(fast)
                sent += 1
                assert sent < 5000
        finally:
            for one in (slow, fast, asking):
                one.close(linger=0)
            publisher.close()


async def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """A message, while the event loop runs on."""
    await until(lambda: socket.poll(0))
    return socket.recv_multipart()


async def test_what_only_a_shared_store_has_is_not_announced(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_events, "Publisher", Router)
    namespace = cache.register(NamespaceSpec("m", 2, (PartSpec("kv", 0, 8),)))
    trie = cache.trie(namespace)
    events = router_events.KVEvents(cache, ON)
    router: Any = events._publisher
    cache.observe(events._mark_changed)
    rows = enter_chain(trie, cache.chain(namespace, np.arange(4, dtype="<u4").tobytes()), namespace.root)
    trie.put_copies(np.array(rows), REMOTE, np.array([[1], [2]]), 0.0)
    trie.put_copies(np.array(rows[:1]), CPU, np.array([[1]]), 0.0)
    while events._run_turn():
        pass
    assert router.blocks == {(MEDIA["cpu"], hash_of(namespace, trie, rows[0]))}


@pytest.mark.parametrize(
    ("named", "name", "match"),
    [
        ("default/*", "default/any/thing [8]", True),
        ("default/*", "acme/any", False),
        ("acme/llama[8b]", "acme/llama[8b]", True),
        ("acme/llama[8b]", "acme/llama8", False),
        ("acme/[!a]?", "acme/[!a]x", True),
        ("acme/[!a]?", "acme/bx", False),
        ("acme/[*]", "acme/[a-z]", True),
        ("acme/a]b", "acme/a]b", True),
        ("(common)/m.1", "(common)/m.1", True),
        ("(common)/m.1", "(common)/mx1", False),
        ("acme/m", "acme/m2", False),
    ],
)
def test_only_an_asterisk_and_a_question_mark_stand_for_others(named: str, name: str, match: bool) -> None:
    assert (router_events.pattern_of_names(["x/y", named]).match(name) is not None) == match
    assert router_events.pattern_of_names([]).match(name) is None


async def test_blocks_that_cannot_be_divided_are_told_as_they_are(
    cache: TieredCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says so, once a size."""
    monkeypatch.setattr(router_events, "Publisher", Router)
    events = router_events.KVEvents(cache, ON)
    router: Any = events._publisher
    cache.observe(events._mark_changed)
    for salt in (b"", b"s"):
        namespace = cache.register(NamespaceSpec("m", 24, (PartSpec("kv", 0, 8),), salt))
        trie = cache.trie(namespace)
        chain = cache.chain(namespace, np.arange(48, dtype="<u4").tobytes())
        rows = enter_chain(trie, chain, namespace.root, namespace.ordinal)
        trie.put_copies(rows, DISK, np.array([[1], [2]]), 0.0)
    while events._run_turn():
        pass
    stored = [event for batch in router.batches for event in batch if isinstance(event, BlockStored)]
    assert [(event.block_size, len(event.block_hashes)) for event in stored] == [(24, 2)] * 2
    assert [record.message for record in caplog.records if "blocks of 24 tokens" in record.message] == [
        "blocks of 24 tokens cannot be divided into blocks of events.block_tokens = 16 and are announced whole; a "
        "router that counts in other blocks does not find them"
    ]


async def test_a_trie_that_gets_another_geometry(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was told of its former blocks is told to be gone, though nobody looked at it in between."""
    monkeypatch.setattr(router_events, "Publisher", Router)
    monkeypatch.setattr(announcer, "_TURN_COUNTED", 4)
    events = router_events.KVEvents(cache, ON)
    router: Any = events._publisher
    cache.observe(events._mark_changed)
    namespace = cache.register(NamespaceSpec("m", 32, (PartSpec("kv", 0, 8),)))
    trie = cache.trie(namespace)
    rows = enter_chain(trie, cache.chain(namespace, bytes(32 * 4 * 5)), namespace.root, namespace.ordinal)
    trie.put_copies(rows, DISK, np.arange(5)[:, None], 0.0)
    while events._run_turn():
        pass
    assert len(router.blocks) == 10
    trie.drop_copies(rows, DISK)
    remove_row(trie, int(rows[-1]))  # and what it continued
    trie.reshape(64, (8,), [FullAttention()])
    rows = enter_chain(trie, BlockChain(bytes(64 * 4), 64, 7), namespace.root, namespace.ordinal)
    trie.put_copies(rows, DISK, np.array([[3]]), 0.0)
    while events._run_turn():
        pass
    assert len(router.blocks) == len(events._engine_blocks) + 1 == 4


async def test_a_turn_looks_only_where_something_changed(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client chooses how many tries there are."""
    monkeypatch.setattr(router_events, "Publisher", Router)
    events = router_events.KVEvents(cache, ON)
    cache.observe(events._mark_changed)
    namespaces = [cache.register(NamespaceSpec("m", 4, (PartSpec("kv", 0, 8 + size),))) for size in range(40)]
    while events._run_turn():
        pass
    looked: list[int] = []
    of = events._rows_of
    monkeypatch.setattr(events, "_rows_of", lambda trie: (looked.append(trie.ordinal), of(trie))[1])
    for namespace in namespaces[7:9]:
        trie, chain = cache.trie(namespace), cache.chain(namespace, bytes(16))
        trie.put_copies(enter_chain(trie, chain, namespace.root, namespace.ordinal), CPU, np.array([[0]]), 0.0)
    while events._run_turn():
        pass
    assert set(looked) == {cache.trie(namespace).ordinal for namespace in namespaces[7:9]}
    assert len(cast(Any, events._publisher).blocks) == 2


async def test_all_tries_together_have_a_turns_rows(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many large ones that changed would hold the loop for as long as there are."""
    monkeypatch.setattr(router_events, "Publisher", Router)
    monkeypatch.setattr(announcer, "_TURN_ROWS", 1)
    events = router_events.KVEvents(cache, ON)
    cache.observe(events._mark_changed)
    namespaces = [cache.register(NamespaceSpec("m", 4, (PartSpec("kv", 0, 8 + size),))) for size in range(3)]
    while events._run_turn():
        pass
    for namespace in namespaces:
        trie, chain = cache.trie(namespace), cache.chain(namespace, bytes(16))
        trie.put_copies(enter_chain(trie, chain, namespace.root, namespace.ordinal), CPU, np.array([[0]]), 0.0)
    looked: list[int] = []
    compare = events._compare_changed_rows
    monkeypatch.setattr(
        events, "_compare_changed_rows", lambda trie, of: (looked.append(trie.ordinal), compare(trie, of))[1]
    )
    assert events._run_turn() and len(looked) == 1
    while events._run_turn():
        pass
    assert len(cast(Any, events._publisher).blocks) == 3
