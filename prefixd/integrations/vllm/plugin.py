"""Registers the connector's name with vLLM, for `"kv_connector": "PrefixdConnector"` without a module path and for
MultiConnector's metrics, which know connectors by their names only."""

from __future__ import annotations

from prefixd.integrations.vllm.log import log


def register() -> None:
    """The entry point in vLLM's group `vllm.general_plugins`; vLLM calls it in every process, maybe several times."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector("PrefixdConnector", "prefixd.integrations.vllm", "PrefixdConnector")
    except ValueError:
        pass  # it is registered already
    except Exception as error:  # raising would end every vLLM here; contract.py reports it to users of the connector
        log.debug("prefixd: this vLLM is not told the connector's name: %r", error)
