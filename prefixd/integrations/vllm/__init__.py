"""vLLM served by prefixd: a KV connector, and a scheduler that lets requests with a near prefix go first.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PrefixdConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "prefixd.integrations.vllm", "kv_load_failure_policy": "recompute"}'

The module's path may be left out where prefixd is installed: plugin.py tells vLLM the name. Both classes need vLLM and
are imported when they are asked for, once `contract` has found in vLLM what they need; the modules beside them that
need no vLLM can be imported without it. See docs/vllm.md.
"""

from __future__ import annotations

from typing import Any

_HOMES = {
    "PrefixdConnector": ("prefixd.integrations.vllm.connector", "check_connector"),
    "FastestPrefixFirstScheduler": ("prefixd.integrations.vllm.scheduling.scheduler", "check_scheduler"),
}
"""Of each class its module, and what of `contract` looks for the names that it needs."""

__all__ = ["FastestPrefixFirstScheduler", "PrefixdConnector"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    import vllm

    from prefixd.base.extras import require
    from prefixd.integrations.engine.contract import imports_of
    from prefixd.integrations.vllm.releases import WORKS_WITH

    require("vllm", name)
    home, check = _HOMES[name]
    with imports_of("vLLM", vllm.__version__, WORKS_WITH):
        getattr(importlib.import_module("prefixd.integrations.vllm.contract"), check)()
        return getattr(importlib.import_module(home), name)
