"""What the daemon tells of its blocks, as events with vLLM's hashes; without engine and daemon."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash, maybe_convert_block_hash

from prefixd.client import ExhaustedError, NamespaceSpec, PartSpec
from prefixd.integrations.engine.geometry import Geometry, Group
from prefixd.integrations.vllm.kv_events import block_events
from prefixd.integrations.vllm.kv_events.block_events import BlockEvents
from prefixd.v1.cache_pb2 import TIER_CPU, TIER_DISK, BlockChange
from tests import waiting

SPEC = NamespaceSpec("m", 8, (PartSpec("group0", 0, 64),))
ID = bytes(range(8))
HASH = get_hash_fn_by_name("sha256")
GEOMETRY = Geometry((Group(0, 4, 32),), 8, 4, 1, "vllm")


class Told:
    """An engine's events over a link that a test drives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        init_none_hash(HASH)
        monkeypatch.setattr(block_events, "_PAUSE_S", 0.0)
        config = SimpleNamespace(
            cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
            model_config=SimpleNamespace(get_vocab_size=lambda: 1000),
        )
        link: Any = SimpleNamespace(spawn=self._spawn, start=self._spawn, report=lambda done: None)
        link.spec_of = lambda identity: SPEC if identity == ID else None
        self.events: Any = None
        self.events = BlockEvents(config, link, GEOMETRY, 2)
        self.events.begin(SPEC)

    def _spawn(self, work: Any) -> Future[None]:
        if self.events is not None and work.__name__ == "_remove_all":
            asyncio.run(work())
        return Future()

    def tell(self, **change: Any) -> list[Any]:
        """The events that come of a change."""
        if "tokens" in change:
            change["token_ids"] = np.asarray(change.pop("tokens"), "<u4").tobytes()
        asyncio.run(self.events._apply(BlockChange(namespace_id=ID, **change)))
        return self.events.take_events()


def hashes(*tokens: int) -> list[Any]:
    """vLLM's of blocks of four tokens, where it has a hash for every two."""
    found, before = [], None
    for end in range(2, len(tokens) + 1, 2):
        before = hash_block_tokens(HASH, before, tokens[end - 2 : end], None)
        found += [maybe_convert_block_hash(before)] if end % 4 == 0 else []
    return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def stored(keys: list[Any], parent: Any, tokens: list[int], medium: str = "CPU") -> BlockStored:
    return BlockStored(
        block_hashes=keys,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=4,
        lora_id=None,
        medium=medium,
        lora_name=None,
        extra_keys=[None] * len(keys),
        group_idx=0,
        locality="LOCAL",
    )


def removed(keys: list[Any], medium: str = "CPU") -> BlockRemoved:
    return BlockRemoved(keys, medium, group_idx=0, locality="LOCAL")


def test_blocks_that_begin_alike(told: Told) -> None:
    """Of eight tokens each, the second of which parts from the third in its second half."""
    one, other = list(range(16)), [*range(12), 90, 91, 92, 93]
    keys, others = hashes(*one), hashes(*other)
    assert keys[:3] == others[:3] and keys[3] != others[3]
    assert told.tell(stored=[1, 2], tokens=one, tier=TIER_CPU) == [stored(keys, None, one)]
    assert told.tell(stored=[3], parent=1, tokens=other[8:], tier=TIER_CPU) == [stored(others[3:], keys[2], other[12:])]
    assert told.tell(stored=[3], parent=1, tokens=other[8:], tier=TIER_DISK) == [
        stored(others[2:], keys[1], other[8:], "STORAGE")
    ]
    assert told.tell(removed=[2], tier=TIER_CPU) == [removed(keys[3:])]
    assert told.tell(removed=[3], tier=TIER_CPU) == [removed(others[2:])]
    assert told.tell(removed=[3], tier=TIER_DISK) == [removed(others[2:], "STORAGE")]
    assert told.tell(cleared=True) == [removed(keys[:2])]
    assert told.events._blocks._hashed_blocks == 0


def test_what_cannot_be_hashed_is_not_told(told: Told) -> None:
    """Behind a medium, whose ids are drawn, and behind what was not told; nor is its removal."""
    tokens = [*range(8), *range(5000, 5008), *range(8)]
    assert told.tell(stored=[1, 2, 3], tokens=tokens, tier=TIER_CPU) == [
        stored(hashes(*range(8)), None, list(range(8)))
    ]
    assert told.tell(stored=[4], parent=3, tokens=range(8), tier=TIER_CPU) == []
    assert told.tell(removed=[2, 3, 4], tier=TIER_CPU) == []


def test_what_was_told_is_taken_back(told: Told) -> None:
    """When the engine's cache is reset, and when the daemon goes away."""
    told.tell(stored=[1], tokens=range(8), tier=TIER_DISK)
    told.events.reset()
    assert told.events.take_events() == [removed(hashes(*range(8)), "STORAGE")]
    assert told.tell(stored=[2], tokens=range(8, 16), tier=TIER_DISK) == []


def test_other_hashes_than_vllms_are_not_told(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    told.tell(stored=[1], tokens=range(8), tier=TIER_CPU)
    request = SimpleNamespace(mm_features=[], block_hashes=[b"other"], all_token_ids=list(range(8)))
    told.events.note_request(SPEC, request)
    assert told.events.take_events() == [removed(hashes(*range(8)))]
    assert told.tell(stored=[2], tokens=range(8, 16), tier=TIER_CPU) == []
    assert told.events._wrong


def test_the_daemon_waits_for_what_vllm_has_not_taken(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_events, "_WAITING", 1)
    monkeypatch.setattr(block_events, "_PAUSE_S", 0.001)

    async def tell() -> None:
        for number in (1, 2):
            change = BlockChange(namespace_id=ID, stored=[number], token_ids=bytes(32 * number), tier=TIER_CPU)
            change.token_ids = np.full(8, number, "<u4").tobytes()
            async with asyncio.timeout(0.1):
                await told.events._apply(change)

    with pytest.raises(TimeoutError):
        asyncio.run(tell())
    assert len(told.events.take_events()) == 1 and not told.events.waiting


def test_extra_keys_of_a_salt(told: Told) -> None:
    """In the first block alone, as vLLM hashes and tells it."""
    salted = NamespaceSpec("m", 8, (PartSpec("group0", 0, 64),), salt=b"s")
    told.events._link.spec_of = lambda identity: salted
    request = SimpleNamespace(
        mm_features=[], block_hashes=[], all_token_ids=[], lora_request=None, cache_salt="s", prompt_embeds=None
    )
    told.events.note_request(salted, request)
    (event,) = told.tell(stored=[1], tokens=range(8), tier=TIER_CPU)
    assert event.extra_keys == [("s",), None] and event.block_hashes != hashes(*range(8))


def test_a_block_whose_parent_is_not_told_of_any_more(told: Told) -> None:
    told.tell(tier=TIER_CPU, stored=[1, 2], tokens=range(1, 17))
    told.tell(tier=TIER_CPU, removed=[1])
    assert told.tell(tier=TIER_DISK, stored=[2], parent=1, tokens=range(9, 17)) == []
    assert told.tell(tier=TIER_CPU, removed=[2]) == [removed(hashes(*range(1, 17))[2:])]


def request_of(salt: str) -> Any:
    return SimpleNamespace(
        mm_features=[], block_hashes=[], all_token_ids=[], lora_request=None, cache_salt=salt, prompt_embeds=None
    )


class Followed(Told):
    """The same, over a link whose daemon tells what `watch` yields, each time that it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        monkeypatch.setattr(block_events, "_AWAY_S", 0.01)
        self.watches = 0
        self.opened: list[NamespaceSpec] = []

    async def _reopen(self, spec: NamespaceSpec) -> None:
        self.opened.append(spec)

    def follow(
        self,
        watch: Callable[[], AsyncGenerator[BlockChange, None]],
        until: Callable[[], object],
    ) -> None:
        def counted() -> AsyncGenerator[BlockChange, None]:
            self.watches += 1
            return watch()

        async def run() -> None:
            following = asyncio.ensure_future(self.events._follow())
            await waiting.until(until)
            assert following.cancel(), "it has ended"

        link = self.events._link
        link.up, link.reopen, link.watch_blocks = True, self._reopen, counted
        asyncio.run(run())


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Followed:
    return Followed(monkeypatch)


def test_a_change_that_is_not_understood(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    """What was told before is taken back, and the daemon is asked again; one error in the log."""
    caplog.set_level(logging.WARNING)

    async def watch() -> AsyncGenerator[BlockChange, None]:
        tokens = np.arange(8, dtype="<u4").tobytes()
        yield BlockChange(namespace_id=ID, tier=TIER_CPU, stored=[1], token_ids=tokens)
        yield BlockChange(namespace_id=ID, tier=TIER_CPU, stored=[2, 3], token_ids=tokens[:-4])

    followed.follow(watch, lambda: followed.watches > 2)
    keys, tokens = hashes(*range(8)), list(range(8))
    assert followed.events.take_events()[:4] == 2 * [stored(keys, None, tokens), removed(keys)]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info is not None


def test_a_watch_that_is_refused(followed: Followed, caplog: pytest.LogCaptureFixture) -> None:
    """It is asked for less and less often, opens no namespaces, and is told once."""
    caplog.set_level(logging.WARNING)

    async def watch() -> AsyncGenerator[BlockChange, None]:
        raise ExhaustedError("tenant a: 64 calls of WatchBlocks are under way")
        yield

    began_s = time.monotonic()
    followed.follow(watch, lambda: followed.watches > 5)
    assert time.monotonic() - began_s > 0.01 + 0.02 + 0.04 + 0.08 + 0.16
    assert followed.opened == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert all(part in record.getMessage() for part in ("64 calls of WatchBlocks", "events in fewer engines"))


def test_a_watch_that_is_granted_opens_namespaces_again(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the daemon has nothing to tell before."""
    monkeypatch.setattr(block_events, "_ANSWER_S", 0.01)

    async def watch() -> AsyncGenerator[BlockChange, None]:
        await asyncio.sleep(60.0)
        yield BlockChange()

    followed.follow(watch, lambda: followed.opened)
    assert followed.opened == [SPEC] and followed.watches == 1


@pytest.mark.parametrize("cleared", [True, False])
def test_all_is_taken_back_in_slices(told: Told, cleared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM takes it; and before what comes next."""
    monkeypatch.setattr(block_events, "_WAITING", 2)
    told.events._slice_blocks = 4
    tokens = [number for block in range(64) for number in [block, *range(7)]]
    for block in range(64):
        told.tell(stored=[block], tokens=tokens[8 * block : 8 * block + 8], tier=TIER_CPU)

    async def run() -> list[Any]:
        tell = told.events._apply
        clear = tell(BlockChange(namespace_id=ID, cleared=True)) if cleared else told.events._remove_all()
        change = BlockChange(namespace_id=ID, stored=[99], tier=TIER_CPU)
        change.token_ids = np.asarray(tokens[:8], "<u4").tobytes()
        works = [asyncio.ensure_future(clear)]
        await asyncio.sleep(0.0)
        works.append(asyncio.ensure_future(tell(change)))
        events, longest = [], 0
        end_s = time.monotonic() + 20.0
        while not all(work.done() for work in works) or told.events.waiting:
            assert time.monotonic() < end_s
            longest = max(longest, told.events._blocks.waiting)
            events += told.events.take_events()
            await asyncio.sleep(0.001)
        assert longest <= 2
        return events

    *gone, last = asyncio.run(run())
    assert len(gone) == 16 and all(isinstance(event, BlockRemoved) for event in gone)
    assert {key for event in gone for key in event.block_hashes} == {
        key for block in range(64) for key in hashes(*tokens[8 * block : 8 * block + 8])
    }
    assert last == stored(hashes(*tokens[:8]), None, tokens[:8])
    assert told.events._blocks._hashed_blocks == 1 and sum(map(len, told.events._blocks._counts.values())) == 2


def test_namespaces_come_and_go(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each salt one: only those are kept of which blocks are there, and keys of those that came last."""
    monkeypatch.setattr(block_events, "_SPECS", 4)
    monkeypatch.setattr(block_events, "_ANSWER_S", 0.0)
    specs: dict[bytes, NamespaceSpec] = {ID: SPEC}
    told.events._link.spec_of = specs.get
    for number in range(8):
        spec = NamespaceSpec("m", 8, SPEC.parts, salt=b"%d" % number)
        told.events.note_request(SPEC, request_of(""))
        told.events.note_request(spec, request_of(str(number)))
        specs[b"%08d" % number] = spec
        for change in ({"stored": [1], "token_ids": bytes(32)}, {"removed": [1]}):
            asyncio.run(told.events._apply(BlockChange(namespace_id=b"%08d" % number, tier=TIER_CPU, **change)))
        assert [type(event) for event in told.events.take_events()] == [BlockStored, BlockRemoved]
    assert not told.events._namespaces
    assert len(told.events._keys) == 4 and SPEC in told.events._keys
    for number in range(8, 20):
        change = BlockChange(namespace_id=b"%08d" % number, tier=TIER_CPU, stored=[1], token_ids=bytes(32))
        asyncio.run(told.events._apply(change))
    assert not told.events.waiting and len(told.events._foreign) == 4


def test_a_namespace_that_was_not_known_before(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_events, "_ANSWER_S", 0.0)
    told.events._link.spec_of = lambda identity: None
    assert told.tell(stored=[1], tokens=range(8), tier=TIER_CPU) == []
    told.events._link.spec_of = lambda identity: SPEC
    assert told.tell(stored=[2], tokens=range(8), tier=TIER_CPU) == [stored(hashes(*range(8)), None, list(range(8)))]
