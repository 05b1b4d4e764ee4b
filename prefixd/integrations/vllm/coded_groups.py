"""KV cache groups whose parts are int8 objects, made of vLLM's pages on the device (the option `codec_on_device`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from prefixd.base.errors import ConfigError
from prefixd.client import PartShape
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


def paged_layers(group: Group, shape: PartShape | None, tensors: Sequence[torch.Tensor]) -> PagedLayers:
    """The caches of a group's layers, as kernels read and write them.

    Args:
        group: as `coded_group` returns it.
        shape: of a part, as `part_shape` finds it.
        tensors: of the layers.

    Raises:
        ConfigError: keys and values do not lie plainly in the pages.
    """
    if shape is None or group.coded_shape is None:
        raise _refusal(group, "has pages in which the connector does not know where keys and values lie")
    known = replace(group.coded_shape, order=shape.order)
    channels = known.channels
    layers = [tensor.transpose(1, 2) for tensor in tensors]  # [blocks, tokens, heads, keys and values]
    halves = tuple((layer[..., :channels], layer[..., channels:]) for layer in layers)
    return PagedLayers(known, halves, group.block_tokens // tensors[0].shape[2])


def _refusal(group: Group, why: str) -> ConfigError:
    return ConfigError(
        f'codec_on_device = "int8": KV cache group {group.index} {why}; leave the option out, or let the daemon code '
        'blocks (`"codec": "int8"`)'
    )
