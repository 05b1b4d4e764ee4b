"""Blocks and pins survive a clean restart after any eviction: the index's file may end before its last page."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, NamespaceSpec, PartSpec

pytestmark = pytest.mark.slow

BLOCK_TOKENS, BLOCK_BYTES = 16, 4096


def store(client: Client, name: str, prompts: int, rng: random.Random) -> list[list[int]]:
    """Durable prompts of 1 to 40 blocks; their tokens."""
    cache = client.register(NamespaceSpec(name, BLOCK_TOKENS, (PartSpec("kv", 0, BLOCK_BYTES),)))
    stored = []
    for _ in range(prompts):
        blocks = rng.randint(1, 40)
        tokens = [rng.randrange(50_000) for _ in range(blocks * BLOCK_TOKENS)]
        cache.store(tokens, rng.randbytes(blocks * BLOCK_BYTES), durable=True)
        stored.append(tokens)
    return stored


def blocks_of(client: Client, name: str, prompts: Sequence[Sequence[int]]) -> list[int]:
    cache = client.register(NamespaceSpec(name, BLOCK_TOKENS, (PartSpec("kv", 0, BLOCK_BYTES),)))
    return [cache.match(tokens).blocks for tokens in prompts]


@pytest.mark.parametrize("evict", ["namespace", "all"])
def test_what_was_durable_is_there_after_an_eviction_and_a_clean_restart(evict: str) -> None:
    rng = random.Random(7)
    with DaemonProcess({"cpu.bytes": "64MiB", "disk.bytes": "256MiB"}) as daemon:
        with Client(daemon.address) as client:
            store(client, "old", 30, rng)
            new = store(client, "new", 6, rng)
            if evict == "namespace":
                ids = {each.namespace.name: each.namespace_id for each in client.stats().namespaces}
                of_new = client.prefixes(ids["new"]).prefixes
                for prefix in of_new[:2]:
                    assert client.pin(prefix.key).durable
                pinned = {prefix.key for prefix in of_new[:2]}
                client.evict(namespace_id=ids["old"])
            else:
                client.evict(all=True)
                new, pinned = store(client, "new", 3, rng), set()
        assert daemon.stop() == 0
        daemon.start()
        with Client(daemon.address) as client:
            assert blocks_of(client, "new", new) == [len(tokens) // BLOCK_TOKENS for tokens in new]
            assert {prefix.key for prefix in client.prefixes().prefixes if prefix.pinned} == pinned
            assert not client.check_integrity().violations
