"""What must be equal for the bytes of a page to be usable elsewhere, as the name of a namespace.

Reads SGLang's configuration objects (0.5.23) and imports nothing of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from prefixd.client import NamespaceSpec, PartSpec
from prefixd.errors import ConfigError
from prefixd.integrations.sglang.chains import BLOCK_TOKENS
from prefixd.integrations.sglang.pool_pages import PoolPages
from prefixd.model_fingerprint import fingerprint
from prefixd.settings import default_data_dir

KV = "kv"
MAMBA = "mamba"
VERIFY = "verify=key"
"""Said in every namespace: prefixd compares the pages' keys, and not token ids, which SGLang does not hand over."""

_LONGEST = 80
_OWN_ON_EVERY_RANK = ("MHA", "Mamba")


def model_of(model_name: str | None, given: str | None, started_with: str | None) -> str:
    """What tells a model's weights from others.

    Args:
        model_name: as SGLang serves it.
        given: the option `model`.
        started_with: SGLang's `--model-path`, where it can be seen.
    """
    for name in (given, started_with, model_name):
        if name and Path(name).is_dir():
            try:
                return f"{Path(name).name}@{fingerprint(Path(name), default_data_dir())}"
            except ConfigError:  # no weights of the kinds that are read by content
                return name
    return given or started_with or model_name or ""


def is_shared(config: Any, pool: Any, pool_name: str) -> bool:
    """Whether all tensor-parallel ranks have the same pages of a pool, so that one of them writes for all: MLA's
    latents and what goes with them, but neither states nor heads."""
    kinds = [kind.__name__ for kind in type(pool).__mro__]
    own = pool_name == MAMBA or any(kind.startswith(_OWN_ON_EVERY_RANK) for kind in kinds)
    return bool(config.is_mla_model) and not own


def spec_of(config: Any, model: str, pool_name: str, pages: PoolPages, versions: str) -> NamespaceSpec:
    """The namespace of one pool on one rank.

    Args:
        config: SGLang's `HiCacheStorageConfig`.
        model: see `model_of`.
        pool_name: "kv", or the name of another pool, as "swa".
        pages: how the pool's pages are made.
        versions: of what decides how bytes lie in a page.
    """
    pool = pages.pool
    shared = is_shared(config, pool, pool_name)
    facts = {
        "model": model,
        "served": config.model_name,
        "pool": pool_name,
        "kind": type(pool).__name__,
        "dtype": str(getattr(pool, "dtype", "")),
        "layout": str(getattr(pool, "layout", "")),
        "packing": pages.packing,
        "page tokens": pages.page_tokens,
        "page bytes": pages.page_bytes,
        "layers": [getattr(pool, name, None) for name in ("start_layer", "end_layer", "layer_num")],
        "heads": [getattr(pool, name, None) for name in ("head_num", "head_dim", "v_head_dim")],
        "latent": [getattr(pool, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim")],
        "mla": bool(config.is_mla_model),
        "tp": ["every rank" if shared else config.tp_rank, config.tp_size],
        "pp": [config.pp_rank, config.pp_size],
        "cp": [getattr(config, "attn_cp_rank", 0), getattr(config, "attn_cp_size", 1)],
        "dcp": [getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)],
        "format": str(getattr(pool, "storage_format_tag", None) or ""),
        "versions": versions,
        "verify": VERIFY,
    }
    digest = xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True, default=str).encode())
    people = (Path(model.partition("@")[0]).name or "model")[:_LONGEST]
    rank = "every rank" if shared else f"rank {config.tp_rank}"
    return NamespaceSpec(
        name=f"sglang/{people}/{pool_name}/{VERIFY}/{digest}",
        block_tokens=BLOCK_TOKENS,
        parts=(PartSpec(pool_name, 0, pages.page_bytes),),
        dtype=facts["dtype"].removeprefix("torch."),
        layout=f"{facts['layout']}, {pages.packing}, page of {pages.page_tokens} tokens, {rank} of {config.tp_size}",
    )
