"""KV events: what routers and engines are told of the blocks in each tier; to routers in vLLM's wire format."""

from __future__ import annotations

from prefixd.server.kv_events.events import KVEvents
from prefixd.server.kv_events.watch import BlockWatch
from prefixd.server.kv_events.watches import Watches

__all__ = ["BlockWatch", "KVEvents", "Watches"]
