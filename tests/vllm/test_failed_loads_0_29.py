"""What vLLM 0.29's scheduler does with failed loads, once prefixd has taught it; on the scheduler of this release."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from prefixd.integrations.vllm.releases import v0_29

BLOCK = 16
UPDATE = "_update_requests_with_invalid_blocks"


class FullAttentionSpec:
    block_size = BLOCK


class SlidingWindowSpec:
    block_size, sliding_window = BLOCK, 128


@pytest.fixture(autouse=True)
def taught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(Scheduler, UPDATE)
    monkeypatch.setattr(Scheduler, UPDATE, original)  # put back after the test
    v0_29._recompute_failed_requests()
    assert getattr(Scheduler, UPDATE) is not original


def update(groups: list[Any], status: RequestStatus, failed: set[int]) -> tuple[set[str], int]:
    """Of a request with four blocks in each group: which requests are computed again, and from which token on."""
    tables = tuple([10 * group + block for block in range(4)] for group in range(len(groups)))
    request = SimpleNamespace(
        request_id="r",
        status=status,
        num_computed_tokens=65,
        num_cached_tokens=64,
        num_external_computed_tokens=64,
    )
    scheduler = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in groups]),
        kv_cache_manager=SimpleNamespace(get_block_ids=lambda _request_id: tables),
        block_size=BLOCK,
    )
    running = status == RequestStatus.RUNNING
    affected, _, _ = getattr(Scheduler, UPDATE)(scheduler, [request], failed, {"r": 1} if running else {}, running)
    return affected, request.num_computed_tokens


WINDOW, FULL = SlidingWindowSpec(), FullAttentionSpec()
LOADING, RUNNING = RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.RUNNING


@pytest.mark.parametrize("groups", [[WINDOW], [FULL, WINDOW], [FULL, FULL]])
def test_a_failed_load_of_prefixds_is_computed_from_the_beginning(groups: list[Any]) -> None:
    assert update(groups, LOADING, {2}) == ({"r"}, 0)
    assert update(groups, LOADING, {77}) == (set(), 65)


@pytest.mark.parametrize("groups", [[WINDOW], [FULL]])
def test_what_a_step_has_computed_on_is_vllms_to_undo(groups: list[Any]) -> None:
    """Loads of another connector, which a step waits for itself."""
    assert update(groups, RUNNING, {2}) == ({"r"}, 2 * BLOCK)


def test_with_several_groups_vllm_ends_instead_of_going_on_with_wrong_bytes() -> None:
    assert update([FULL, WINDOW], RUNNING, {77}) == (set(), 65)
    with pytest.raises(ValueError):
        update([FULL, WINDOW], RUNNING, {12})
