"""How keys and values lie inside vLLM's pages: a digest for the name of the model, and whether they lie plainly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash

from prefixd.client import PartShape
from prefixd.integrations.vllm.log import log

_PROBED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Packing:
    """How keys and values lie in the memory of one rank."""

    digest: str
    """Differs where bytes of the same keys and values differ."""
    shapes: tuple[PartShape | None, ...] = ()
    """Of the parts of each group; None where the daemon cannot find keys and values."""


class Written(NamedTuple):
    """What a layer's backend makes of known keys and values."""

    digest: str
    plain: bool
    """The keys of each token and head, and then its values."""


class Probed(NamedTuple):
    """The result of `probe_pages`."""

    digest: str
    plain: frozenset[str]
    """Layers of which a page [heads, tokens, 2 * channels] has the keys and then the values of each token and head."""


def probe_pages(vllm_config: Any, kv_caches: Mapping[str, Any], versions: str) -> Probed:
    """Finds out how keys and values lie inside a page on this rank: by shapes, backends, processor, and the bytes that
    the backend writes for known keys and values.

    Args:
        vllm_config: vLLM's.
        kv_caches: its tensors of pages, by layer.
        versions: of vLLM and torch; they count if a backend's bytes cannot be read.
    """
    context = vllm_config.compilation_config.static_forward_context
    written: dict[str, Written | None] = {}
    facts: list[object] = [torch.backends.cpu.get_cpu_capability()]
    plain: list[str] = []
    for name, tensor in sorted(kv_caches.items()):
        layer = context.get(name)
        backend = getattr(layer, "get_attn_backend", None)
        # Strides beyond a block (heads, in one layout) grow with the number of blocks, which differs between two starts
        # of an engine on a GPU. How far blocks are apart does not count where other layers' pages lie between them.
        page = min(tensor.stride(0), math.prod(tensor.shape[1:]))
        inside = [page, *(stride if stride <= tensor.stride(0) else "outside" for stride in tensor.stride()[1:])]
        seen = repr(
            (
                (tuple(tensor.shape[1:]), inside, str(tensor.dtype), str(tensor.device.type)),
                f"{backend().__module__}.{backend().__qualname__}" if backend else "",
                getattr(layer, "isa", ""),
                torch.cuda.get_device_capability(tensor.device) if tensor.device.type == "cuda" else "",
            )
        )
        if seen not in written:
            written[seen] = _written(layer, tensor, vllm_config.model_config.dtype)
        of_layer = written[seen]
        facts.append((seen, versions if of_layer is None else of_layer.digest))
        if of_layer is not None and of_layer.plain:
            plain.append(name)
    return Probed(xxhash.xxh3_128_hexdigest(repr(facts).encode()), frozenset(plain))


def _written(layer: Any, pages: torch.Tensor, dtype: torch.dtype) -> Written | None:
    """What a layer's backend writes for known keys and values, in memory like that of `pages`; None if the backend
    lacks vLLM's common call."""
    update = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    heads, key_size = getattr(layer, "num_kv_heads", None), getattr(layer, "head_size", None)
    if update is None or heads is None or key_size is None:
        return None
    order = sorted(range(pages.dim()), key=pages.stride, reverse=True)
    shape = [_PROBED_TOKENS + 1, *pages.shape[1:]]  # enough where a block has one token
    memory = torch.zeros([shape[dim] for dim in order], dtype=pages.dtype, device=pages.device)
    scratch = memory.permute([order.index(dim) for dim in range(pages.dim())])

    def known(size: int, factor: int) -> torch.Tensor:
        """[tokens, heads, size] of small whole numbers, which every dtype represents."""
        count = _PROBED_TOKENS * heads * size
        numbers = torch.arange(count, dtype=torch.int64) * factor % 127 + 1
        return numbers.reshape(_PROBED_TOKENS, heads, size).to(dtype).to(pages.device)

    keys, values = known(key_size, 37), known(getattr(layer, "head_size_v", None) or key_size, 53)
    slots = torch.arange(_PROBED_TOKENS, dtype=torch.int64, device=pages.device)
    try:
        update(layer, keys, values, scratch, slots)
    except (TypeError, AttributeError, ValueError, RuntimeError, AssertionError) as error:
        log.info("prefixd: how %s packs pages cannot be seen, so the version counts: %s", type(layer).__name__, error)
        return None
    digest = xxhash.xxh3_128_hexdigest(memory.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return Written(digest, _is_plain(scratch, keys, values))


def _is_plain(scratch: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the pages of `scratch`, [blocks, heads, tokens, numbers], have the keys and then the values of each token
    and head, as they are, and zeros elsewhere. keys, values: [tokens, heads, channels]."""
    if scratch.dim() != 4 or keys.shape != values.shape or scratch.dtype != keys.dtype:
        return False
    blocks, heads, tokens, numbers = scratch.shape
    if (heads, numbers) != (keys.shape[1], 2 * keys.shape[2]):
        return False
    expected = torch.zeros((blocks * tokens, heads, numbers), dtype=keys.dtype, device=keys.device)
    expected[: len(keys)] = torch.cat([keys, values], dim=-1)
    return torch.equal(scratch, expected.reshape(blocks, tokens, heads, numbers).transpose(1, 2))
