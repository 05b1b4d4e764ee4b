"""How keys and values lie in prefixd's parts, from the tensors of pages that vLLM has allocated.

A part has layer after layer, within a layer run after run, within a run one page after the other (`group_pages.py`).
The tensors of layers are views [blocks, heads, tokens, keys and values] of memory in another order:

    tokens before heads in a page    (layer, token, head, kv, channel)
    heads before tokens in a page    (layer, head, token, kv, channel), if a part has one page of each layer
    heads apart, a run for each      (layer, head, token, kv, channel)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from prefixd.client import PartShape
from prefixd.integrations.engine.copying.group_pages import GroupPages
from prefixd.integrations.engine.geometry import Geometry, Group

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def part_shape(
    geometry: Geometry, group: Group, pages: GroupPages, tensors: Sequence[torch.Tensor]
) -> PartShape | None:
    """The shape of a group's part on one rank; None if the part is no dense array, or its layers differ.

    Args:
        geometry: how prefixd blocks are made of vLLM's.
        group: the group.
        pages: the group's memory.
        tensors: of its layers, whose pages have the keys and then the values of each token and head.
    """
    first = tensors[0]
    if first.dim() != 4 or any(
        (each.shape[1:], each.stride(), each.dtype) != (first.shape[1:], first.stride(), first.dtype)
        for each in tensors
    ):
        return None
    if first.dtype not in _DTYPES or first.shape[3] % 2 or first.stride(3) != 1:
        return None
    outer = _outer_axes(first, {len(layer) for layer in pages.layers}, group.block_tokens, geometry.block_tokens)
    if outer is None:
        return None
    heads, channels = first.shape[1], first.shape[3] // 2
    shape = PartShape(
        _DTYPES[first.dtype], len(tensors), geometry.block_tokens, heads, channels, ("layer", *outer, "kv", "channel")
    )
    numbers = shape.layers * shape.tokens * heads * 2 * channels
    return shape if numbers * first.element_size() == group.page_bytes else None


def _outer_axes(
    tensor: torch.Tensor, runs: set[int], page_tokens: int, part_tokens: int
) -> tuple[Literal["token", "head"], Literal["token", "head"]] | None:
    """The order of tokens and heads in a layer of a part; None if neither is outside the other.

    Args:
        tensor: the layer's. Its blocks are smaller than a page where vLLM's kernels take smaller ones.
        runs: the numbers of runs of a page, of all layers.
        page_tokens: tokens of a page.
        part_tokens: tokens of a part.
    """
    _, heads, tokens, numbers = tensor.shape
    of_block, of_head, of_token, _ = tensor.stride()
    if runs == {1}:
        one_piece = tokens == page_tokens or of_block == heads * tokens * numbers
        if of_token == heads * numbers and (heads == 1 or of_head == numbers) and one_piece:
            return "token", "head"
        if (of_head, of_token) == (tokens * numbers, numbers) and tokens == part_tokens:
            return "head", "token"
    elif runs == {heads} and of_token == numbers and (tokens == page_tokens or of_block == tokens * numbers):
        return "head", "token"
    return None
