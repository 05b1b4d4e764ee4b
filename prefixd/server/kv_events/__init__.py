"""KV events: the daemon announces the blocks of each tier to routers (in vLLM's wire format) and to engines."""

from __future__ import annotations

from prefixd.server.kv_events.block_watch import BlockWatch
from prefixd.server.kv_events.publishing.router_events import KVEvents
from prefixd.server.kv_events.watches import Watches

__all__ = ["BlockWatch", "KVEvents", "Watches"]
