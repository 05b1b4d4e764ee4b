"""SGLang served by prefixd: a storage backend for its hierarchical cache (HiCache).

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "prefixd",
        "module_path": "prefixd.integrations.sglang", "class_name": "PrefixdHiCache", "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": true}'

The class needs SGLang; it is imported at first use, after `contract` has checked SGLang for the names that it needs.
Only `backend` and `stats` import SGLang. docs/sglang.md is the user's guide.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PrefixdHiCache"]


def __getattr__(name: str) -> Any:
    if name != "PrefixdHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prefixd.base.extras import require
    from prefixd.integrations.engine.contract import imports_of
    from prefixd.integrations.sglang.contract import VERSION, check
    from prefixd.integrations.sglang.releases import RELEASES

    require("sglang", name)
    check()
    with imports_of("SGLang", VERSION, RELEASES.works_with):
        from prefixd.integrations.sglang.backend import PrefixdHiCache

    return PrefixdHiCache
