"""vLLM 0.29: `install` adds two functions of 0.30 to its scheduler.

**Failed loads.** A connector of 0.29 reports a failed load by its blocks, and the scheduler reads one block table only:
with several KV cache groups it raises ValueError. A connector of 0.30 reports the request, which vLLM computes from the
beginning (`KVConnectorTransferResults.failed_recving`); that is right with windows too.

**Block tables.** A step of 0.29 has the tables of requests with new blocks only. A step of 0.30 has the table of every
request (`KVConnectorBlockState.resolve_block_ids`): a block that a step fills may be older than the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from prefixd.integrations.vllm.geometry import has_window

NAMES = frozenset(
    {
        "vllm.v1.core.sched.scheduler:Scheduler._build_kv_connector_meta",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids",
        "vllm.v1.core.sched.scheduler:Scheduler._update_requests_with_invalid_blocks",
        "vllm.v1.core.sched.scheduler:Scheduler.kv_cache_config",
    }
)
CALLED = frozenset({"get_finished", "get_block_ids_with_load_errors"})


class ReleaseConnector(KVConnectorBase_V1, SupportsHMA):
    """Reports ended loads as this release expects; PrefixdConnector has `loads_ended` and `blocks_failed`."""

    _failed_blocks: frozenset[int] = frozenset()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, failed = self.loads_ended()
        self._failed_blocks = frozenset().union(*failed.values())
        return None, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, frozenset()
        return {*failed, *self.blocks_failed()}


def install() -> None:
    """Changes vLLM's scheduler class, once."""
    if hasattr(Scheduler, "_taught_by_prefixd"):
        return
    Scheduler._taught_by_prefixd = True
    _show_every_table()
    _recompute_failed_requests()


def _show_every_table() -> None:
    build = Scheduler._build_kv_connector_meta

    def build_with_tables(self: Any, connector: Any, scheduler_output: Any) -> Any:
        if scheduler_output.kv_connector_block_state is not None:
            scheduler_output.kv_connector_block_state.resolve_block_ids = self.kv_cache_manager.get_block_ids
        return build(self, connector, scheduler_output)

    Scheduler._build_kv_connector_meta = build_with_tables


def _recompute_failed_requests() -> None:
    of_one_table = Scheduler._update_requests_with_invalid_blocks

    def update(
        self: Any,
        requests: Iterable[Any],
        invalid_block_ids: set[int],
        num_scheduled_tokens: dict[str, int],
        evict_blocks: bool = True,
    ) -> Any:
        def lacks_bytes(request: Any) -> bool:
            tables = self.kv_cache_manager.get_block_ids(request.request_id)
            return not invalid_block_ids.isdisjoint(block for table in tables for block in table)

        groups = self.kv_cache_config.kv_cache_groups
        requests = list(requests)
        # `evict_blocks`: running requests, on loads of another connector that the step has computed on. vLLM undoes
        # those, or raises its ValueError, which it raises also where none of them failed.
        one_table = len(groups) == 1 and (evict_blocks or not has_window(groups[0].kv_cache_spec))
        if one_table or (evict_blocks and any(map(lacks_bytes, requests))):
            return of_one_table(self, requests, invalid_block_ids, num_scheduled_tokens, evict_blocks)
        failed, tokens = set(), 0
        for request in requests:
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and lacks_bytes(request):
                failed.add(request.request_id)
                tokens += request.num_computed_tokens
                request.num_computed_tokens = 0
        return failed, tokens, set()

    Scheduler._update_requests_with_invalid_blocks = update
