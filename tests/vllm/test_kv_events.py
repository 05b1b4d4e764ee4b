"""The daemon's KV events, taken for vLLM's own: its classes decode them, and encode the same bytes."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from vllm.distributed import kv_events as theirs
from vllm.v1.core.kv_cache_utils import to_event_extra_keys

from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, NamespaceSpec, PartSpec
from prefixd.server.kv_events import event_messages as ours
from prefixd.server.kv_events.block_hashes import block_hash
from prefixd.server.kv_events.event_messages import MEDIA

WAIT_MS = 60_000
NAMES = ("KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch")
CONFIG = ("array_like", "omit_defaults", "tag", "tag_field", "frozen", "gc", "forbid_unknown_fields")


@pytest.mark.parametrize("name", NAMES)
def test_the_classes_are_the_same(name: str) -> None:
    """Fields, their order, their names on the wire and their defaults; how the class is tagged and laid out."""
    our, their = getattr(ours, name), getattr(theirs, name)
    told = [
        [(field.name, field.encode_name, field.default, field.default_factory) for field in msgspec.structs.fields(one)]
        for one in (our, their)
    ]
    assert told[0] == told[1]
    for option in CONFIG:
        assert getattr(our.__struct_config__, option) == getattr(their.__struct_config__, option), option


def test_the_values_that_vllm_has_names_for() -> None:
    assert ours.END_OF_REPLAY == theirs.ZmqEventPublisher.END_SEQ
    assert (MEDIA["gpu"], MEDIA["cpu"]) == (theirs.MEDIUM_GPU, theirs.MEDIUM_CPU)


class Subscriber:
    """Decodes with vLLM's classes, and has vLLM's encoder make the same bytes of what it decoded."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._decoder = msgspec.msgpack.Decoder(theirs.KVEventBatch)
        self._encoder = msgspec.msgpack.Encoder()
        self._events: deque[Any] = deque()

    def hear(self) -> Any:
        """The next event."""
        while not self._events:
            assert self._socket.poll(WAIT_MS)
            _, _, payload = self._socket.recv_multipart()
            batch = self._decoder.decode(payload)
            assert self._encoder.encode(batch) == payload
            assert batch.data_parallel_rank == 0  # as of a vLLM without data parallelism
            self._events += batch.events
        return self._events.popleft()


def test_the_events_of_a_daemon(folder: Path) -> None:
    """Stored in memory and on disk, with a salt, continued, removed: each is the one that vLLM would make of it."""
    endpoint = f"ipc://{folder}/events"
    settings = {"cpu.bytes": "4MiB", "disk.bytes": "16MiB", "events.endpoint": endpoint, "cache.write_back": "false"}
    tokens = list(range(500, 516))
    with (
        DaemonProcess(settings, directory=folder) as daemon,
        Client(daemon.address) as client,
        zmq.Context() as context,
    ):
        router = Subscriber(context, endpoint)
        # What the daemon began with is in nobody's ears, unless it began late; this is for the new subscriber.
        assert router.hear() == theirs.AllBlocksCleared()
        cache = client.register(NamespaceSpec("m", 4, (PartSpec("kv", 0, 512),), salt=b"tenant"))
        seed = int.from_bytes(cache.namespace_id, "little")
        chain = BlockChain(np.asarray(tokens, "<u4").tobytes(), 4, seed)
        hashes = [block_hash(cache.namespace_id, chain.key(i)) for i in range(4)]
        cache.store(tokens[:12], np.zeros(3 * 512, np.uint8))
        first = theirs.BlockStored(
            block_hashes=hashes[:3],
            parent_block_hash=None,
            token_ids=tokens[:12],
            block_size=4,
            lora_id=None,
            medium=theirs.MEDIUM_CPU,
            lora_name=None,
            extra_keys=to_event_extra_keys([(("cache_salt", "tenant"),), None, None]),
            locality="LOCAL",
        )
        while (heard := router.hear()) == theirs.AllBlocksCleared():
            pass
        assert heard == first
        client.flush()
        assert router.hear() == msgspec.structs.replace(first, medium="STORAGE")
        cache.store(tokens, np.zeros(4 * 512, np.uint8))
        assert router.hear() == theirs.BlockStored(
            block_hashes=hashes[3:],
            parent_block_hash=hashes[2],
            token_ids=tokens[12:],
            block_size=4,
            lora_id=None,
            medium=theirs.MEDIUM_CPU,
            lora_name=None,
            extra_keys=to_event_extra_keys([None]),
            locality="LOCAL",
        )
        client.evict(namespace_id=cache.namespace_id)
        assert router.hear() == theirs.BlockRemoved(hashes, theirs.MEDIUM_CPU, locality="LOCAL")
        assert router.hear() == theirs.BlockRemoved(hashes[:3], "STORAGE", locality="LOCAL")
        client.drain(shutdown=True)
        assert router.hear() == theirs.AllBlocksCleared()


def test_a_batch_of_every_event_encodes_alike() -> None:
    """With a value in each field, not only in those that the daemon fills."""
    values = {
        "block_hashes": [1, (1 << 64) - 1],
        "parent_block_hash": 5,
        "token_ids": [0, 1 << 31],
        "block_size": 1,
        "lora_id": 3,
        "medium": "CPU",
        "lora_name": "adapter",
        "extra_keys": [("salt", b"bytes"), None],
        "group_idx": 2,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": 7,
        "locality": "LOCAL",
        "ownership": "tier",
        "session_id": "s",
    }
    encoded = []
    for module in (ours, theirs):
        events = [
            kind(**{field: values[field] for field in kind.__struct_fields__})
            for kind in (module.BlockStored, module.BlockRemoved, module.AllBlocksCleared)
        ]
        encoded.append(msgspec.msgpack.encode(module.KVEventBatch(1.5, events, 3)))
    assert encoded[0] == encoded[1]
    assert set(values) == set(theirs.BlockStored.__struct_fields__)
