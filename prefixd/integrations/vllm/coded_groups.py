"""KV cache groups whose parts are int8 objects, made of vLLM's pages on the device (the option `codec_on_device`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from prefixd.base.errors import ConfigError
from prefixd.integrations.engine.copying.group_pages import GroupPages
from prefixd.integrations.engine.geometry import Group
from prefixd_swap.codecs import part_shape as swap
from prefixd_swap.codecs.on_device.paged_parts import PagedLayers

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def coded_group(group: Group, specs: Sequence[Any], layers: int, block_tokens: int) -> Group:
    """The group with objects as parts.

    Args:
        group: with exact parts.
        specs: of its layers, vLLM's; one for all of them where they do not differ.
        layers: their number.
        block_tokens: of a prefixd block.

    Raises:
        ConfigError: parts of this group cannot be such objects.
    """
    try:
        from prefixd_swap.codecs.on_device.certified import object_nbytes
    except ImportError as error:
        raise ConfigError(
            f"codec_on_device: a package is missing ({error}); run `pip install 'prefixd[codecs]'`"
        ) from error
    found = {
        (getattr(spec, "num_kv_heads", 0), getattr(spec, "head_size", 0), getattr(spec, "dtype", None))
        for spec in specs
    }
    heads, channels, dtype = next(iter(found))
    if group.state or group.replicated or not heads or not channels:
        raise _refusal(group, "has no keys and values (states or latents)")
    if dtype not in _DTYPES:
        raise _refusal(group, f"is of {str(dtype).removeprefix('torch.')}, not of bfloat16 or float16")
    shape = swap.PartShape(_DTYPES[dtype], layers, block_tokens, heads, channels, swap.AXES)
    if len(found) > 1 or shape.nbytes != group.part_bytes:
        raise _refusal(group, "has layers of several shapes, or pages that are padded, packed or quantized")
    if (nbytes := object_nbytes(shape)) >= shape.nbytes:
        raise _refusal(group, f"has parts of {shape.nbytes} bytes, and objects of them would have {nbytes}")
    return replace(group, part_bytes=nbytes, coded_shape=shape)


def paged_layers(group: Group, pages: GroupPages, tensors: Sequence[torch.Tensor], plain: bool) -> PagedLayers:
    """The caches of a group's layers, as kernels read and write them. Tokens and heads may lie in any order.

    Args:
        group: as `coded_group` returns it.
        pages: its memory.
        tensors: of the layers, ``[blocks, heads, tokens, keys and values]``.
        plain: whether pages have the keys and then the values of each token and head, see `probe_pages`.

    Raises:
        ConfigError: kernels would not find keys and values in the pages.
    """
    shape = group.coded_shape
    assert shape is not None, "coded_group has made it"
    first = tensors[0]
    if not plain or first.dim() != 4 or first.shape[3] != 2 * shape.channels:
        raise _refusal(group, "has pages in which the connector does not know where keys and values lie")
    kernel_blocks = group.block_tokens // first.shape[2]  # vLLM's kernels may read smaller blocks than its tables have
    apart = kernel_blocks * first.stride(0) * first.element_size()
    if any(
        (runs[0].address, runs[0].stride) != (tensor.data_ptr(), apart)
        for runs, tensor in zip(pages.layers, tensors, strict=True)
    ):
        raise _refusal(group, "has pages that lie elsewhere than vLLM's configuration says")
    layers = [tensor.transpose(1, 2) for tensor in tensors]
    halves = tuple((layer[..., : shape.channels], layer[..., shape.channels :]) for layer in layers)
    return PagedLayers(shape, halves, kernel_blocks)


def _refusal(group: Group, why: str) -> ConfigError:
    return ConfigError(
        f'codec_on_device = "int8": KV cache group {group.index} {why}; leave the option out, or let the daemon code '
        'blocks (`"codec": "int8"`)'
    )
