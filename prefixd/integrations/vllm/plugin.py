"""vLLM's name for the connector: `"kv_connector": "PrefixdConnector"` without a module path, also in MultiConnector's
metrics, which know connectors by their names only."""

from __future__ import annotations

from contextlib import suppress


def register() -> None:
    """The entry point in vLLM's group `vllm.general_plugins`; vLLM calls it in every process, maybe several times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector("PrefixdConnector", "prefixd.integrations.vllm", "PrefixdConnector")
