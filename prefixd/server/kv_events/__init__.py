"""KV events: what routers are told of the blocks in each tier, in vLLM's wire format."""

from __future__ import annotations

from prefixd.server.kv_events.announcer import KVEvents

__all__ = ["KVEvents"]
