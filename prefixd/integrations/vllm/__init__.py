"""vLLM served by prefixd: a KV connector, and a scheduler that lets requests with a near prefix go first.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PrefixdConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "prefixd.integrations.vllm", "kv_load_failure_policy": "recompute"}'

The module's path may be left out where prefixd is installed: plugin.py registers the name with vLLM. Both classes need
vLLM; they are imported at first use, after `contract` has checked vLLM for the names that they need. The other modules
that need no vLLM can be imported without it. docs/vllm.md is the user's guide.
"""

from __future__ import annotations

from typing import Any

_CLASSES = {
    "PrefixdConnector": ("prefixd.integrations.vllm.connector", "check_connector"),
    "FastestPrefixFirstScheduler": ("prefixd.integrations.vllm.scheduling.scheduler", "check_scheduler"),
}
"""By class: its module, and the function of `contract` that checks the names that it needs."""

__all__ = ["FastestPrefixFirstScheduler", "PrefixdConnector"]


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    import vllm

    from prefixd.base.extras import require
    from prefixd.integrations.engine.contract import imports_of
    from prefixd.integrations.vllm.releases import WORKS_WITH

    require("vllm", name)
    module, check = _CLASSES[name]
    with imports_of("vLLM", vllm.__version__, WORKS_WITH):
        getattr(importlib.import_module("prefixd.integrations.vllm.contract"), check)()
        return getattr(importlib.import_module(module), name)
