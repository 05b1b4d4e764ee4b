"""KV events as vLLM puts them on the wire, so that cache-aware routers read ours as they read an engine's.

A message has three frames: the topic, a sequence number (8 bytes, big-endian), and msgpack of
`[ts, [event, ...], data_parallel_rank]`. An event is a map with its class's name under `type`; fields that have their
default are left out. The classes here have the fields of those in `vllm.distributed.kv_events`, in their order: a test
compares them with vLLM's own.
"""

from __future__ import annotations

import msgspec

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """What all events are."""


class BlockStored(KVCacheEvent):
    """Consecutive blocks of one prefix can be had from a medium.

    Hashes are integers of 64 bits, `token_ids` those of all the blocks, `extra_keys` has an entry a block.
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
    """Blocks can be had from a medium no more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """Nothing that was said before holds."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of one message; `ts` is seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None
