"""Saves of a step begin once, and after all of it was submitted: vLLM asks for ended loads before a draft computes."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from prefixd.integrations.vllm import PrefixdConnector
from prefixd.integrations.vllm.step_messages import Orders
from prefixd.integrations.vllm.worker_half import WorkerHalf


@pytest.fixture
def connector() -> Any:
    worker = WorkerHalf.__new__(WorkerHalf)
    worker._saved_step, worker._ordinal, worker._transfers = -1, None, Mock()
    worker._transfers.take_received.return_value = (set(), {})
    made = PrefixdConnector.__new__(PrefixdConnector)
    made._worker = worker
    return made


def began(connector: Any) -> int:
    count: int = connector._worker._transfers.save.call_count
    return count


def test_a_step_that_computes_saves_when_vllm_waits_for_saves(connector: Any) -> None:
    connector.bind_connector_metadata(Orders(saves=[Mock()], step=1))
    connector.loads_ended()
    assert began(connector) == 0, "a draft may still have to compute its part of the blocks"
    connector.wait_for_save()
    assert began(connector) == 1


def test_a_step_that_computes_nothing_saves_once_in_every_release(connector: Any) -> None:
    connector.bind_connector_metadata(Orders(saves=[Mock()], idle=True, step=2))
    connector.loads_ended()
    assert began(connector) == 1
    connector.wait_for_save()
    assert began(connector) == 1
