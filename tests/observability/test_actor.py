"""Which request acts, for evictions and for the log."""

from __future__ import annotations

import asyncio

import pytest

from prefixd.observability.actor import DaemonTask, acting, current_actor, current_request, failed_in, log_fields
from prefixd.observability.request_log import end_with_error
from prefixd.observability.request_record import RequestRecord


async def test_tasks_that_begin_inside_act_for_the_same_request() -> None:
    async def who() -> str:
        await asyncio.sleep(0)
        return current_request()

    with acting("r1"):
        task = asyncio.create_task(who())
        assert current_request() == "r1"
    assert current_request() == "" and await task == "r1"


@pytest.mark.parametrize("task", DaemonTask)
def test_a_task_of_the_daemon_is_no_request(task: DaemonTask) -> None:
    with acting("r1"), acting(task):
        assert (current_actor(), current_request()) == (task, "")


def test_a_request_may_have_the_name_of_a_task() -> None:
    with acting("write-back"):
        assert current_request() == "write-back"


def test_an_unexpected_error_tells_in_which_request_it_occurred() -> None:
    record, error = RequestRecord(id="r7"), RuntimeError("a defect")
    end_with_error(record, error, 1.0)
    assert log_fields(error) == {"request_id": "r7"} and log_fields(ValueError()) == {}
    failed_in("r8", error)
    assert log_fields(error) == {"request_id": "r8"}
