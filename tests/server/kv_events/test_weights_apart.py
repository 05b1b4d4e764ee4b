"""Two models of one geometry and different weights: neither is ever served the other's KV, nor said to have it."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixd.base.errors import ConfigError
from prefixd.cache import Namespace
from prefixd.server.kv_events.block_hashes import block_hash
from prefixd.server.kv_events.event_messages import BlockStored, Event
from prefixd.server.kv_events.publishing import router_events
from prefixd.server.kv_events.publishing.publisher import EventCounters
from prefixd.serving.models import model_host
from prefixd.serving.models.models import Models
from prefixd.serving.models.worker_process import WorkerState
from prefixd.settings import EventSettings, Settings
from tests.hello import hello
from tests.rig import BLOCK_TOKENS, PART_BYTES, Rig

HELLO = hello(frame_bytes=PART_BYTES, block_tokens=BLOCK_TOKENS, chunk_bytes=PART_BYTES)
PROMPT = [1, 2, 3]


class Heard:
    """What subscribers of each topic were told is stored."""

    stored: dict[bytes, set[int]]

    def __init__(self, settings: EventSettings, subscribed: Callable[[], None]) -> None:
        self.counters = EventCounters()
        self.stored = defaultdict(set)

    def publish(self, topic: bytes, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.stored[topic].update(event.block_hashes)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def without_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models have none, and trying to load one takes its time."""

    def lacking(directory: Path) -> None:
        raise ConfigError(f"{directory} has no tokenizer")

    monkeypatch.setattr(model_host, "TextCodec", lacking)


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    """Two models whose files differ in nothing but the weights' values: names, sizes and times are the same."""
    made = [tmp_path / name for name in ("base", "tuned")]
    for seed, directory in enumerate(made):
        directory.mkdir()
        for name, data in (("config.json", b"{}"), ("model.safetensors", np.random.default_rng(seed).bytes(4096))):
            (directory / name).write_bytes(data)
            os.utime(directory / name, (1e9, 1e9))
    return made


async def registered(rig: Rig, directories: list[Path]) -> list[Namespace]:
    """The namespaces that a daemon gives these models once their workers have described them."""
    worker = {"model": directories[0], "more_models": str(directories[1])}
    settings = Settings.model_validate(
        {"data_dir": rig.path.parent / "data", "gpu": {"bytes": 16 * PART_BYTES, "device": "cpu"}, "worker": worker}
    )
    models = Models(settings, "cpu", rig.cache, rig.clock)
    hosts = list(models.hosts.values())
    await asyncio.gather(*(host._on_hello(HELLO) for host in hosts))
    for host in hosts:
        host.worker.state = WorkerState.READY
        host.worker._settled.set()
    found = [rig.cache.register((await host._load()).namespace) for host in hosts]
    await models.stop()
    return found


async def test_neither_is_served_the_others_kv(tmp_path: Path, directories: list[Path]) -> None:
    rig = Rig(tmp_path / "disk", cpu=16, disk=32)
    base, tuned = await registered(rig, directories)
    assert rig.cache.trie(base) is rig.cache.trie(tuned), "of one shape; only the keys tell them apart"
    assert base.id != tuned.id and base.seed != tuned.seed
    await rig.put(PROMPT, namespace=base, durable=True)
    assert await rig.get(PROMPT, namespace=tuned) == 0 and rig.rows(PROMPT, tuned) == []
    assert await rig.put([*PROMPT, 4], namespace=tuned, durable=True) == (4, 0), "nothing of it was there"
    assert await rig.get([*PROMPT, 4], namespace=base) == 3, "each its own bytes"
    assert await rig.get([*PROMPT, 4], namespace=tuned) == 4

    await rig.restart()
    assert rig.restored == 7
    base, tuned = await registered(rig, directories)
    assert await rig.get([*PROMPT, 4], namespace=base) == 3
    assert await rig.get([*PROMPT, 4], namespace=tuned) == 4

    # The weights change places: the caches go with the weights, not with the names.
    weights = [directory / "model.safetensors" for directory in directories]
    weights[0].rename(tmp_path / "other")
    weights[1].rename(weights[0])
    (tmp_path / "other").rename(weights[1])
    await rig.restart()
    base, tuned = await registered(rig, directories)
    assert await rig.get([*PROMPT, 4], namespace=base) == 4
    assert await rig.get([*PROMPT, 4], namespace=tuned) == 3
    await rig.close()


@pytest.mark.parametrize("topic", ["kv-{namespace}", "kv"])
async def test_events_tell_their_blocks_apart(
    tmp_path: Path, directories: list[Path], monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    """By topic, or where all have one topic, by hashes."""
    monkeypatch.setattr(router_events, "Publisher", Heard)
    rig = Rig(tmp_path / "disk", cpu=16)
    homes = await registered(rig, directories)
    events = router_events.KVEvents(rig.cache, EventSettings(endpoint="ipc:///nowhere", topic=topic))
    heard: Any = events._publisher
    hashes: list[set[int]] = []
    rig.cache.observe(events._mark_changed)
    for home in homes:
        heard.stored.clear()
        await rig.put(PROMPT, namespace=home)
        while events._run_turn():
            pass
        ((said_on, said),) = heard.stored.items()
        assert said_on.decode() == topic.replace("{namespace}", home.spec.name)
        trie = rig.cache.trie(home)
        assert said == {block_hash(home.id, trie.key(row)) for row in rig.rows(PROMPT, home)}
        hashes.append(said)
    assert len(hashes[0] | hashes[1]) == 2 * len(PROMPT)
    rig.cache.unobserve(events._mark_changed)
    await rig.close()
