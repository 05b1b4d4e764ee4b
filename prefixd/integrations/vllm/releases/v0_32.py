"""vLLM 0.32 and 0.33: hits are counted by where they came from."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from prefixd.integrations.vllm.releases import v0_30
from prefixd.integrations.vllm.releases.v0_30 import install
from prefixd_scheduler import Distance

__all__ = ["CALLED", "NAMES", "ReleaseConnector", "install"]

NAMES = v0_30.NAMES
CALLED = v0_30.CALLED | {"get_external_cache_hit_sources"}

_SOURCES = {
    Distance.CPU: CacheHitSource.HOST,
    Distance.DISK: CacheHitSource.DISK,
    Distance.REMOTE: CacheHitSource.EXTERNAL_UNSPECIFIED,
}


class ReleaseConnector(v0_30.ReleaseConnector):
    """As in 0.30, and reports the sources of hits; PrefixdConnector has `hit_distances`."""

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if not num_external_tokens:
            return {}
        return {_SOURCES[far]: tokens for far, tokens in self.hit_distances(request, num_external_tokens).items()}
