"""KV events in vLLM's wire format, so that a cache-aware router reads prefixd's events as it reads an engine's.

A message has three frames: the topic, a sequence number (8 bytes, big-endian), and msgpack of
`[ts, [event, ...], data_parallel_rank]`. An event is a map with the name of its class under `type`; fields that have
their default are left out. The classes here have the fields of those in `vllm.distributed.kv_events`, in the same
order: a test compares them with vLLM's own.
"""

from __future__ import annotations

import msgspec

MEDIA = {"gpu": "GPU", "cpu": "CPU", "disk": "STORAGE"}
"""vLLM's names of media, by the names of prefixd's tiers."""
LOCALITY = "LOCAL"
"""Says that a block is on this host."""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of all events."""


class BlockStored(KVCacheEvent):
    """Consecutive blocks of one prefix are in a medium.

    Attributes:
        block_hashes: 64-bit integers.
        parent_block_hash: hash of the block before them; None for the first block of a prefix.
        token_ids: tokens of all the blocks, `block_size` for each.
        extra_keys: one entry for each block; the salt with a prefix's first block.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str | bytes, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks are no longer in a medium."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """No block is announced any more: events before this one no longer apply."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Holds the events of one message; `ts` is in seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
