"""Makes the namespace of a pool, with a name of everything that must be equal to use a page elsewhere.

Reads SGLang's configuration objects and imports nothing of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import xxhash

from prefixd.base.codec_names import CodecName
from prefixd.base.errors import ConfigError
from prefixd.base.model_fingerprint import fingerprint
from prefixd.client import NamespaceSpec, PartSpec
from prefixd.integrations.engine.naming.arguments import content_of
from prefixd.integrations.engine.options import codec_for
from prefixd.integrations.engine.pages_by_key.chains import BLOCK_TOKENS
from prefixd.integrations.sglang.arguments import TABLE, arguments_of
from prefixd.integrations.sglang.environment import environment_in_name
from prefixd.integrations.sglang.log import log
from prefixd.integrations.sglang.page_shapes import page_shape
from prefixd.integrations.sglang.pool_pages import PoolPages
from prefixd.settings import default_data_dir

KV = "kv"
MAMBA = "mamba"
VERIFY = "verify=key"
"""Part of every name: prefixd compares the pages' keys, not token ids, which SGLang does not hand over."""

_LONGEST = 80
_OWN_ON_EVERY_RANK = ("MHA", "Mamba")
_LAYOUT_SAYS_ALL = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
"""Pools with pages that are rows of keys and values: layout, kind, sizes and dtype describe them. Pages of other pools
may differ between versions of SGLang."""


def model_of(model_name: str | None, given: str | None, server_args: Any) -> str:
    """A name that only the same weights have: a folder with a digest of its content, or a name with a commit.

    Args:
        model_name: as SGLang serves it.
        given: the option `model`.
        server_args: SGLang's `ServerArgs`; None outside a server.
    """
    started_with = None if server_args is None else str(server_args.model_path)
    for name in (given, started_with, model_name):
        if name and Path(name).expanduser().is_dir():
            folder = Path(name).expanduser()
            try:
                return f"{folder.name}@{fingerprint(folder, default_data_dir())}"
            except ConfigError:  # no weights of the usual kinds
                return f"{folder.name}@{content_of(name)}"
    if given or started_with is None:
        return given or model_name or ""
    if Path(started_with).expanduser().is_file():  # as GGUF is
        return f"{Path(started_with).name}@{content_of(started_with)}"
    commit = _commit(started_with, server_args.revision)
    if commit is None:
        log.warning(
            "of which version the weights of %s are cannot be told: pages are this engine's alone, until it is started "
            'again; give SGLang the model\'s folder, or its commit as --revision, or set "model"',
            started_with,
        )
    return f"{started_with}@{commit or uuid4().hex}"


def arguments_in_name(server_args: Any) -> dict[str, Any]:
    """SGLang's arguments and environment that go into the name of every namespace; empty outside a server. Reads the
    files of adapters. Raises ConfigError for a refused argument."""
    if server_args is None:
        return {}
    facts = TABLE.facts(arguments_of(server_args))
    environment = environment_in_name()
    return facts | {"environment": environment} if environment else facts


def _commit(name: str, revision: str | None) -> str | None:
    """The commit of a model of the hub that SGLang has loaded."""
    if revision and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # no name of a model of the hub
        return None
    commit = Path(found).parent.name if isinstance(found, str) else ""
    return commit if re.fullmatch("[0-9a-f]{40}", commit) else None


def is_shared(config: Any, pool: Any, pool_name: str) -> bool:
    """Whether all tensor-parallel ranks have the same pages of a pool, so that one rank writes for all: pools of MLA
    models, except states and heads."""
    kinds = [kind.__name__ for kind in type(pool).__mro__]
    own = pool_name == MAMBA or any(kind.startswith(_OWN_ON_EVERY_RANK) for kind in kinds)
    return bool(config.is_mla_model) and not own


def spec_of(
    config: Any,
    model: str,
    arguments: Mapping[str, Any],
    pool_name: str,
    pages: PoolPages,
    version: str,
    *,
    strict: bool,
    codec: CodecName | None = None,
) -> NamespaceSpec:
    """The namespace of one pool on one rank.

    Args:
        config: SGLang's `HiCacheStorageConfig`.
        model: from `model_of`.
        arguments: from `arguments_in_name`.
        pool_name: "kv", or the name of another pool, as "swa".
        pages: how the pool's pages are copied.
        version: SGLang's; part of the name for pools that do not describe how their bytes lie in a page.
        strict: makes the version part of the name for all pools.
        codec: the option.
    """
    pool = pages.pool
    shape = page_shape(pages)
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
        "arguments": arguments,
        "version": version if strict or type(pool).__name__ not in _LAYOUT_SAYS_ALL else "",
        "verify": VERIFY,
    }
    digest = xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True, default=str).encode())
    people = (Path(model.partition("@")[0]).name or "model")[:_LONGEST]
    rank = "every rank" if shared else f"rank {config.tp_rank}"
    return NamespaceSpec(
        name=f"sglang/{people}/{pool_name}/{VERIFY}/{digest}",
        block_tokens=BLOCK_TOKENS,
        parts=(PartSpec(pool_name, 0, pages.page_bytes, shape=shape),),
        dtype=facts["dtype"].removeprefix("torch."),
        layout=f"{facts['layout']}, {pages.packing}, page of {pages.page_tokens} tokens, {rank} of {config.tp_size}",
        codec=codec_for(codec, [shape], log),
    )
