"""PrefixdConnector for a vLLM on a CPU whose pages are plain, as attention on GPUs has them.

vLLM's attention for CPUs packs keys for its instruction set, so that no lossy codec can find them. Loaded by vLLM in
place of the connector (`"kv_connector_module_path"`), this module replaces how that attention writes and reads pages:
[heads, tokens, keys and then values], computed with torch. For full attention only, and slow.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from prefixd.integrations.vllm.connector import PrefixdConnector

__all__ = ["PrefixdConnector"]


def _write(
    _impl: Any, _layer: Any, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes keys and values, [tokens, heads, channels], to their slots of pages [blocks, heads, tokens, numbers]."""
    used = slots >= 0
    slots, numbers = slots[used], torch.cat([keys, values], dim=-1)[: len(slots)][used]
    pages[slots // pages.shape[2], :, slots % pages.shape[2]] = numbers


def _attend(
    impl: Any,
    _layer: Any,
    queries: torch.Tensor,
    _keys: torch.Tensor,
    _values: torch.Tensor,
    pages: torch.Tensor,
    metadata: Any,
    output: torch.Tensor,
    **_scales: Any,
) -> torch.Tensor:
    """Attention of each request's new tokens to all of its tokens up to them; `metadata` is None for warming up."""
    if metadata is None:
        return output
    starts = metadata.query_start_loc.tolist()
    for number, length in enumerate(metadata.seq_lens.tolist()):
        begin, end = starts[number : number + 2]
        blocks = metadata.block_table[number, : -(-length // pages.shape[2])].long()
        rows = pages[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
        keys, values = rows.chunk(2, dim=-1)
        seen = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
        result = torch.nn.functional.scaled_dot_product_attention(
            queries[begin:end].transpose(0, 1), keys, values, attn_mask=seen, scale=impl.scale, enable_gqa=True
        )
        output[begin:end] = result.transpose(0, 1).reshape(output[begin:end].shape)
    return output


CPUAttentionBackendImpl.do_kv_cache_update = _write
CPUAttentionBackendImpl.forward = _attend
