"""Which environment variables of an engine go into the name."""

from __future__ import annotations

import logging

import pytest

from prefixd.integrations.engine.naming.environment import EnvironmentTable

LOG = logging.getLogger("prefixd.tests.environment")
TABLE = EnvironmentTable(
    "ENGINE_",
    in_name={"kernels": "ENGINE_MATH ENGINE_LOG_PROBABILITIES"},
    harmless={"logs": "ENGINE_LOG_* OTHER_ADDRESS", "places": "ENGINE_PORT"},
)


def counted(**environ: str) -> list[str]:
    return TABLE.counted(environ, ["ENGINE_MATH", "ENGINE_PORT", "OTHER_ADDRESS", "OTHER_MATH"], LOG)


def test_what_is_set_counts_unless_it_is_known_to_be_harmless(caplog: pytest.LogCaptureFixture) -> None:
    assert counted(ENGINE_MATH="0", ENGINE_PORT="1", ENGINE_LOG_LEVEL="debug", OTHER_ADDRESS="x", PATH="/bin") == [
        "ENGINE_MATH"
    ]
    assert counted(ENGINE_LOG_PROBABILITIES="1") == ["ENGINE_LOG_PROBABILITIES"], "by its own place, not its family's"
    assert counted(NVIDIA_TF32_OVERRIDE="1") == ["NVIDIA_TF32_OVERRIDE"]
    assert not caplog.records


def test_one_that_is_not_known_counts_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert counted(ENGINE_NEW="", OTHER_MATH="1", ANOTHER="1", ENGINE_MATH="1") == [
        "ENGINE_MATH",
        "ENGINE_NEW",
        "OTHER_MATH",
    ]
    assert [record.getMessage() for record in caplog.records if "ENGINE_NEW, OTHER_MATH;" in record.getMessage()]
    assert "ENGINE_MATH" not in caplog.text


def test_what_kubernetes_sets_for_a_service_of_such_a_name_is_not_the_engines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = {
        "ENGINE_ROUTER_SERVICE_HOST": "10.0.0.7",
        "ENGINE_ROUTER_SERVICE_PORT": "80",
        "ENGINE_ROUTER_SERVICE_PORT_HTTP": "80",
        "ENGINE_ROUTER_PORT": "tcp://10.0.0.7:80",
        "ENGINE_ROUTER_PORT_80_TCP": "tcp://10.0.0.7:80",
        "ENGINE_ROUTER_PORT_80_TCP_ADDR": "10.0.0.7",
    }
    assert counted(**service) == []
    assert not caplog.records
