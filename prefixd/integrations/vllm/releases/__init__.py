"""Code that differs between the releases of vLLM that prefixd works with: a file for each release with a difference.

A file has `NAMES` and `CALLED` for the contract, `ReleaseConnector` (the base class of PrefixdConnector), and
`install`, after which a step's `kv_connector_block_state` has `resolve_block_ids` in every release.
"""

from __future__ import annotations

from prefixd.integrations.engine.releases import Releases
from prefixd.integrations.vllm.log import log

WORKS_WITH = "0.29 to 0.33"

RELEASES = Releases(
    "vLLM",
    __name__,
    WORKS_WITH,
    {(0, 29): "v0_29", (0, 30): "v0_30", (0, 31): "v0_30", (0, 32): "v0_32", (0, 33): "v0_32"},
    "--kv-transfer-config",
    log,
)
