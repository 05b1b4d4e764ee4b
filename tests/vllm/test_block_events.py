"""What the daemon tells of its blocks, as events with vLLM's hashes; without engine and daemon."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash, maybe_convert_block_hash

from prefixd.client import NamespaceSpec, PartSpec
from prefixd.integrations.engine.geometry import Geometry, Group
from prefixd.integrations.vllm import kv_events
from prefixd.integrations.vllm.kv_events import BlockEvents
from prefixd.v1.cache_pb2 import TIER_CPU, TIER_DISK, BlockChange

SPEC = NamespaceSpec("m", 8, (PartSpec("group0", 0, 64),))
ID = bytes(range(8))
HASH = get_hash_fn_by_name("sha256")
GEOMETRY = Geometry((Group(0, 4, 32),), 8, 4, 1, "vllm")


class Told:
    """An engine's events over a link that a test drives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        init_none_hash(HASH)
        monkeypatch.setattr(kv_events, "_PAUSE_S", 0.0)
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
        if self.events is not None and work.__name__ == "forget":
            asyncio.run(work())
        return Future()

    def tell(self, **change: Any) -> list[Any]:
        """The events that come of a change."""
        if "tokens" in change:
            change["token_ids"] = np.asarray(change.pop("tokens"), "<u4").tobytes()
        asyncio.run(self.events._apply(BlockChange(namespace_id=ID, **change)))
        return self.events.take()


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
    assert told.events._known == 0


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
    assert told.events.take() == [removed(hashes(*range(8)), "STORAGE")]
    assert told.tell(stored=[2], tokens=range(8, 16), tier=TIER_DISK) == []


def test_other_hashes_than_vllms_are_not_told(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    told.tell(stored=[1], tokens=range(8), tier=TIER_CPU)
    request = SimpleNamespace(mm_features=[], block_hashes=[b"other"], all_token_ids=list(range(8)))
    told.events.arrived(SPEC, request)
    assert told.events.take() == [removed(hashes(*range(8)))]
    assert told.tell(stored=[2], tokens=range(8, 16), tier=TIER_CPU) == []
    assert told.events._wrong


def test_the_daemon_waits_for_what_vllm_has_not_taken(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_WAITING", 1)
    monkeypatch.setattr(kv_events, "_PAUSE_S", 0.001)

    async def tell() -> None:
        for number in (1, 2):
            change = BlockChange(namespace_id=ID, stored=[number], token_ids=bytes(32 * number), tier=TIER_CPU)
            change.token_ids = np.full(8, number, "<u4").tobytes()
            async with asyncio.timeout(0.1):
                await told.events._apply(change)

    with pytest.raises(TimeoutError):
        asyncio.run(tell())
    assert len(told.events.take()) == 1 and not told.events.waiting


def test_extra_keys_of_a_salt(told: Told) -> None:
    """In the first block alone, as vLLM hashes and tells it."""
    salted = NamespaceSpec("m", 8, (PartSpec("group0", 0, 64),), salt=b"s")
    told.events._link.spec_of = lambda identity: salted
    request = SimpleNamespace(
        mm_features=[], block_hashes=[], all_token_ids=[], lora_request=None, cache_salt="s", prompt_embeds=None
    )
    told.events.arrived(salted, request)
    (event,) = told.tell(stored=[1], tokens=range(8), tier=TIER_CPU)
    assert event.extra_keys == [("s",), None] and event.block_hashes != hashes(*range(8))


def test_a_block_whose_parent_is_not_told_of_any_more(told: Told) -> None:
    told.tell(tier=TIER_CPU, stored=[1, 2], tokens=range(1, 17))
    told.tell(tier=TIER_CPU, removed=[1])
    assert told.tell(tier=TIER_DISK, stored=[2], parent=1, tokens=range(9, 17)) == []
    assert told.tell(tier=TIER_CPU, removed=[2]) == [removed(hashes(*range(1, 17))[2:])]
