"""prefixd below vLLM's own offloading: a secondary tier of its `OffloadingConnector`.

    {"type": "PrefixdTier", "module_path": "prefixd.integrations.vllm.offloading"}

vLLM copies between the GPU and its host pool; the tier copies between that pool and the daemon's memory.
docs/vllm.md is the user's guide.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PrefixdTier"]


def __getattr__(name: str) -> Any:
    if name != "PrefixdTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    from prefixd.base.extras import require
    from prefixd.integrations.engine.contract import imports_of
    from prefixd.integrations.vllm.offloading.tier_releases import check_release
    from prefixd.integrations.vllm.releases import WORKS_WITH

    require("vllm", name)
    check_release()
    with imports_of("vLLM", vllm.__version__, WORKS_WITH):
        from prefixd.integrations.vllm.offloading.secondary_tier import PrefixdTier

    return PrefixdTier
