"""SGLang 0.5.23."""

from __future__ import annotations

from typing import Any

NAMES = frozenset({"sglang.srt.mem_cache.hicache_storage:HiCacheStorageConfig.is_storage_writer"})


def is_storage_writer(config: Any) -> bool:
    """Whether this rank writes the pages that all ranks of its group have."""
    return bool(config.is_storage_writer)
