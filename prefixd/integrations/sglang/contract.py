"""The names that prefixd uses of every release of SGLang, and the methods of the class that it derives from."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

from prefixd.integrations.engine.contract import BaseClass, Contract, names_in
from prefixd.integrations.sglang.log import log
from prefixd.integrations.sglang.releases import RELEASES


def sglang_version() -> str:
    """The installed version; "unknown" for sources on the path."""
    try:
        return version_of("sglang")
    except PackageNotFoundError:
        return "unknown"


_STORAGE = "sglang.srt.mem_cache.hicache_storage:"

NAMES = frozenset[str]().union(
    names_in(
        f"{_STORAGE}HiCacheStorageConfig.",
        "tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size dp_rank is_mla_model model_name extra_config "
        "enable_storage_metrics",
    ),
    names_in(f"{_STORAGE}HiCacheStorageExtraInfo.", "prefix_keys"),
    names_in(f"{_STORAGE}PoolHitPolicy.", "ALL_PAGES TRAILING_PAGES"),
    names_in(f"{_STORAGE}PoolName.", "KV"),
    names_in(f"{_STORAGE}PoolTransfer.", "name keys host_indices hit_policy"),
    names_in(f"{_STORAGE}PoolTransferResult.", "kv_hit_pages extra_pool_hit_pages restorable_prefix_pages"),
    names_in(
        "sglang.srt.mem_cache.pool_host.base:HostKVCache.",
        "layout dtype page_size start_layer end_layer get_data_page get_dummy_flat_data_page set_from_flat_data_page",
    ),
    names_in("sglang.srt.mem_cache.pool_host.mha:MHATokenToKVPoolHost.", "get_page_buffer_meta"),
    names_in("sglang.srt.mem_cache.pool_host.mla:MLATokenToKVPoolHost.", "get_page_buffer_meta"),
    names_in(
        "sglang.srt.observability.metrics_collector:StorageMetrics.",
        "prefetch_pgs backup_pgs prefetch_bandwidth backup_bandwidth",
    ),
    names_in("sglang.srt.arg_groups.overrides:", "resolution_result"),
    names_in("sglang.srt.environ:", "EnvField Envs"),
    names_in("sglang.srt.runtime_context:", "get_server_args"),
)

CALLED = names_in(
    "",
    "register_mem_pool_host register_mem_host_pool_v2 batch_exists batch_exists_v2 batch_get_v1 batch_get_v2 "
    "batch_set_v1 batch_set_v2 exists get batch_get set batch_set clear get_stats",
)

# The default is right for prefixd: its namespaces are registered pool by pool.
KNOWN = names_in("", "on_host_pools_registered")

VERSION = sglang_version()
RELEASE = RELEASES.module_of(VERSION)
"""The module of the installed release."""


def check() -> None:
    """Checks that SGLang has the names that PrefixdHiCache uses. Raises ConfigError."""
    base = BaseClass(f"{_STORAGE}HiCacheStorage", CALLED, KNOWN)
    Contract("SGLang", VERSION, RELEASES.works_with, NAMES | RELEASE.NAMES, (base,)).check(log)
