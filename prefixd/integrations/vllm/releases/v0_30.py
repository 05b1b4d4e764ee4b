"""vLLM 0.30 and 0.31."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    SupportsHMA,
)

NAMES = frozenset({"vllm.v1.core.sched.output:KVConnectorBlockState.resolve_block_ids"})
CALLED = frozenset({"get_transfer_results", "get_block_ids_with_load_errors", "has_pending_block_frees"})


class ReleaseConnector(KVConnectorBase_V1, SupportsHMA):
    """Reports ended loads as these releases expect."""

    def loads_ended(self) -> tuple[set[str], dict[str, set[int]]]:
        """Requests with ended loads, and by request the engine's blocks of loads that failed as a whole."""
        raise NotImplementedError

    def blocks_failed(self) -> set[int]:
        """Blocks that did not come, of loads that can be used in part."""
        raise NotImplementedError

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        received, failed = self.loads_ended()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=set(failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.blocks_failed()


def tables_of(state: Any) -> Callable[[str], Sequence[Sequence[int]]]:
    """A function from a request's id to its block ids by group, from a step's `kv_connector_block_state`."""
    tables: Callable[[str], Sequence[Sequence[int]]] = state.resolve_block_ids
    return tables


def install() -> None:
    """Does nothing: these releases need no change."""
