"""What a client does in a day, in a process of its own, with the version of prefixd that PYTHONPATH names; prints one
line of JSON: `python version_client.py ADDRESS store|load shared|streamed`.

It uses only what the version before this one has, too."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import prefixd
from prefixd.client import Client, NamespaceSpec, PartSpec, SlidingWindow

BLOCKS, PART_BYTES = 12, 5000
TOKENS = list(range(7, 7 + 4 * BLOCKS))
BYTES = np.random.default_rng(39).integers(0, 256, 2 * BLOCKS * PART_BYTES, np.uint8)


def specs(memory: str) -> Iterator[NamespaceSpec]:
    """A namespace of full attention, and one with a sliding window."""
    full = PartSpec("full", 0, PART_BYTES)
    yield NamespaceSpec(f"plain {memory}", 4, (full, PartSpec("full", 1, PART_BYTES)), b"salt")
    yield NamespaceSpec(f"window {memory}", 4, (full, PartSpec("window", 0, PART_BYTES, SlidingWindow(8))))


def main(address: str, action: str, memory: str) -> None:
    done = []
    with Client(address, memory=memory) as client:
        for spec in specs(memory):
            cache = client.register(spec)
            if action == "store":
                done.append(cache.store(TOKENS, BYTES).committed)
                continue
            blocks = cache.match(TOKENS).blocks
            into = np.zeros_like(BYTES)
            done.append([blocks, cache.load(TOKENS, into)])
            if memory == "shared":
                with cache.acquire(TOKENS) as lease:
                    done.append(lease.blocks)
        if action == "store":
            client.flush()
        client.check_integrity()
        stats = client.stats()
    version = str(Path(prefixd.__file__).parents[1])
    print(json.dumps({"version": version, "done": done, "namespaces": len(stats.namespaces)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
