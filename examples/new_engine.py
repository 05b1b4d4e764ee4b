"""A whole engine on prefixd in one file: it finds, loads, computes and stores, and goes on without the daemon.

    prefixd serve &                                  # a sidecar
    python examples/new_engine.py                    # twice: the second run computes one block
    python examples/new_engine.py --address unix:/run/prefixd/prefixd.sock

The "model" is a few lines of numpy: the KV of a block depends on all tokens up to its end, as a transformer's does, so
wrong bytes would be seen. docs/new_engine.md explains the calls and their errors.
"""

from __future__ import annotations

import argparse
import logging

import numpy as np

from prefixd.client import (
    Cache,
    Client,
    ClientError,
    ExhaustedError,
    LeaseLost,
    NamespaceSpec,
    PartSpec,
    ServerUnavailable,
)

BLOCK_TOKENS, BLOCK_BYTES = 16, 64 << 10
NAMESPACE = NamespaceSpec("toy-model-1", BLOCK_TOKENS, (PartSpec("attention", 0, BLOCK_BYTES),), dtype="uint8")
log = logging.getLogger("engine")


def compute(tokens: list[int], kv: np.ndarray, first: int) -> int:
    """Fills blocks of `kv` from `first` on; returns how many were computed."""
    for block in range(first, len(kv)):
        seen = tokens[: (block + 1) * BLOCK_TOKENS]
        kv[block] = np.random.default_rng(seen).integers(0, 256, BLOCK_BYTES, np.uint8)
    return len(kv) - first


def load(cache: Cache, tokens: list[int], kv: np.ndarray) -> int:
    """Copies what is cached into the first blocks of `kv`; returns how many can be used."""
    try:
        with cache.acquire(tokens) as lease:  # blocks on disk are read first
            lease.copy_into(kv[: lease.blocks])  # one copy out of shared memory
            blocks = lease.blocks
        return blocks  # only here are the bytes proved: the lease could be given back
    except (LeaseLost, ExhaustedError, ServerUnavailable) as error:  # a miss, not a failure
        log.warning("computing the whole prompt: %s", error)
        return 0


def store(cache: Cache, tokens: list[int], kv: np.ndarray) -> int:
    """Gives the daemon the blocks that it does not have; returns how many of the prompt it has then."""
    stored = 0
    try:
        while True:  # a reservation may be shorter than the prompt where room is short
            with cache.reserve(tokens) as reservation:
                if not reservation.blocks:
                    return len(kv)  # all is cached
                first = reservation.first_block
                if first < stored:  # the daemon's memory is shorter than the prompt: what was stored is evicted again
                    return stored
                reservation.copy_from(kv[first : first + reservation.blocks])
                reservation.commit()  # visible from here on
                stored = first + reservation.blocks
    except (LeaseLost, ExhaustedError, ServerUnavailable) as error:
        log.warning("the first %d blocks are stored, the others are computed again one day: %s", stored, error)
        return stored


def main() -> None:
    """Serves one prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="the daemon; by default its default socket")
    parser.add_argument("--blocks", type=int, default=32, help="length of the prompt")
    options = parser.parse_args()
    logging.basicConfig(format="%(name)s: %(message)s")
    tokens = list(range(options.blocks * BLOCK_TOKENS))
    kv = np.empty((options.blocks, BLOCK_BYTES), np.uint8)
    loaded = stored = 0
    try:
        with Client(options.address, name="toy engine", memory="shared", timeout_s=5.0) as client:
            cache = client.register(NAMESPACE)
            # The last token has to be computed to have logits: its block is not asked for.
            loaded = load(cache, tokens[:-1], kv)
            computed = compute(tokens, kv, loaded)
            stored = store(cache, tokens, kv)
    except ClientError as error:  # no daemon, or one that refuses: an engine goes on without
        log.warning("without a cache: %s", error)
        computed = compute(tokens, kv, loaded)
    expected = np.empty_like(kv)
    compute(tokens, expected, 0)
    print(f"{loaded} blocks loaded, {computed} computed, {stored} cached; right: {bool((kv == expected).all())}")


if __name__ == "__main__":
    main()
