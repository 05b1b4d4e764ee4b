"""How keys and values lie in the pages of SGLang's host pools (0.5.23), as prefixd stores them.

A pool of keys and values has one tensor, whose axes `layout` names (`MHATokenToKVPoolHost.init_kv_buffer`):

    layer_first          [2, layers, tokens of the pool, heads, channels]
    page_first           [2, tokens of the pool, layers, heads, channels]
    page_first_direct    [2, pages, layers, tokens, heads, channels]
    page_head            [2, pages, heads, tokens, layers, channels]
"""

from __future__ import annotations

from typing import Any

import torch

from prefixd.client import PartShape
from prefixd.client.kv_axes import Axis
from prefixd.integrations.sglang.pool_pages import BufferPages, FlatPages, PoolPages

_POOL = "MHATokenToKVPoolHost"
"""The pool whose pages have keys and values in one tensor; its subclasses have other bytes."""
_IN_ONE_TENSOR: dict[str, tuple[Axis, ...]] = {
    "layer_first": ("kv", "layer", "token", "head", "channel"),
    "page_first": ("kv", "token", "layer", "head", "channel"),
    "page_first_direct": ("kv", "layer", "token", "head", "channel"),
    "page_head": ("kv", "head", "token", "layer", "channel"),
}
_BY_LAYER: tuple[Axis, ...] = ("layer", "kv", "token", "head", "channel")
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def page_shape(pages: PoolPages) -> PartShape | None:
    """The shape of a page in the arena; None for other pools, for quantized KV, and where the device's rows are not
    those of tokens (`SGLANG_USE_HND_KVCACHE`, AITER), or a release does not tell."""
    pool = pages.pool
    if type(pool).__name__ != _POOL or pool.dtype not in _DTYPES or not _of_tokens(pool):
        return None
    order = _IN_ONE_TENSOR.get(pool.layout)
    if pool.layout == "layer_first" and isinstance(pages, BufferPages):
        order = _BY_LAYER  # SGLang names the buffers layer by layer
    if order is None or not isinstance(pages, BufferPages | FlatPages) or pool.v_head_dim != pool.head_dim:
        return None
    numbers = pool.layer_num * 2 * pages.page_tokens * pool.head_num * pool.head_dim
    if numbers * pool.dtype.itemsize != pages.page_bytes:
        return None
    return PartShape(_DTYPES[pool.dtype], pool.layer_num, pages.page_tokens, pool.head_num, pool.head_dim, order)


def _of_tokens(pool: Any) -> bool:
    """Whether each row of the device's buffers has the heads of one token."""
    infos = getattr(pool, "_buffer_infos", ())
    return bool(infos) and all(str(info.buffers.layout.value).lower() == "nhd" for info in infos)
