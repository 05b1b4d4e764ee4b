"""vLLM 0.30 and 0.31."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    SupportsHMA,
)

NAMES = frozenset({"vllm.v1.core.sched.output:KVConnectorBlockState.resolve_block_ids"})
CALLED = frozenset({"get_transfer_results", "get_block_ids_with_load_errors", "has_pending_block_frees"})


class ReleaseConnector(KVConnectorBase_V1, SupportsHMA):
    """Reports ended loads as these releases expect; PrefixdConnector has `loads_ended` and `blocks_failed`."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self.loads_ended()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=set(failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed: set[int] = self.blocks_failed()
        return failed


def install() -> None:
    """Does nothing: these releases need no change."""
