"""Reads how much of a waiting prompt vLLM's own cache holds, without changing its order or statistics."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.kv_cache_interface import FullAttentionSpec

from prefixd.integrations.engine.waiting.ordering import held_blocks


class LocalPrefixes:
    """Asks vLLM's block pools for the blocks of a prompt: touches no block, records no statistics.

    The result is an estimate for ordering requests and takes some microseconds a request; vLLM makes its own exact and
    linear look-up when it schedules one. A bisection finds the end of the prefix in a group with full attention. The
    other groups (sliding windows, states) must have the block that ends there; otherwise nothing counts as held.

    Args:
        kv_cache_manager: vLLM's `KVCacheManager`.
    """

    def __init__(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager
        groups = [m for m in kv_cache_manager.coordinator.single_type_managers if m.kv_cache_spec.prefix_cacheable]
        full = [group for group in groups if isinstance(group.kv_cache_spec, FullAttentionSpec)]
        self._lead = (full or groups or [None])[0]
        self._others = [group for group in groups if group is not self._lead]

    def tokens(self, request: Any, last: int = 0) -> int:
        """Tokens of a `vllm.v1.request.Request`, from the first on, that vLLM holds; `last` is the previous result."""
        lead = self._lead
        if lead is None or not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        # vLLM computes at least the last token of a prompt, for it needs the logits.
        blocks = (request.num_tokens - 1) // lead.block_size
        hashes = _hashes(request, lead)
        pool, group_ids = lead.block_pool, [lead.kv_cache_group_id]
        held = held_blocks(
            lambda i: pool.get_cached_block(hashes[i], group_ids) is not None,
            min(blocks, len(hashes)),
            min(last // lead.block_size, blocks, len(hashes)),
        )
        tokens: int = held * lead.block_size
        for group in self._others:
            end = tokens // group.block_size
            if (
                not end
                or group.block_pool.get_cached_block(_hashes(request, group)[end - 1], [group.kv_cache_group_id])
                is None
            ):
                return 0
        return tokens


def _hashes(request: Any, group: Any) -> Any:
    """The hashes of the prompt's blocks at the block size of a group."""
    return resolve_block_hashes(request.block_hashes, group.block_pool.hash_block_size, group.block_size)
