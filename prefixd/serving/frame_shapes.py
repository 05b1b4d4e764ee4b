"""How keys and values lie in a part of a block of the daemon's own worker, as other tiers than the GPU tier have it."""

from __future__ import annotations

from prefixd.worker_protocol.protocol import GroupShape
from prefixd_swap.codecs.part_shape import DTYPE_BYTES, PartShape
from prefixd_swap.group_shape import Layout
from prefixd_swap.padded_rows import PaddedRows


def frame_shape(
    group: GroupShape, dtype: str, layout: Layout, block_tokens: int, nbytes: int, rows: PaddedRows | None
) -> PartShape | None:
    """The shape of a part; None for states and latents, if there is padding, or if the part begins or ends inside a
    token.

    With the layout "token" a part has some tokens of the block, all layers of each. With "layer" it must have the whole
    block (`KvGeometry`, `BlockLayers`).

    Args:
        group: of the part.
        dtype: of the numbers.
        layout: of the block.
        block_tokens: tokens of a block.
        nbytes: of the part, packed; in each part of a block as many, unless there is padding.
        rows: how they are padded on the GPU; None: they are not, or the part has the padding too.
    """
    if not group.kv_heads or dtype not in DTYPE_BYTES:
        return None
    if (rows is None and group.token_stride) or (rows is not None and rows.offset):
        return None
    token_bytes = group.layers * 2 * group.kv_heads * group.head_dim * DTYPE_BYTES[dtype]
    tokens, rest = divmod(nbytes, token_bytes)
    if rest or not 1 <= tokens <= block_tokens or (layout == "layer" and tokens != block_tokens):
        return None
    sizes = (group.layers, tokens, group.kv_heads, group.head_dim)
    if layout == "layer":
        return PartShape(dtype, *sizes, ("layer", "token", "kv", "head", "channel"))
    return PartShape(dtype, *sizes, ("token", "layer", "kv", "head", "channel"))
