"""The release that is installed has what prefixd uses; one that lacks a name, or has other methods, is told."""

from __future__ import annotations

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.request_queue import RequestQueue

from prefixd.errors import ConfigError
from prefixd.integrations.vllm import PrefixdConnector
from prefixd.integrations.vllm.contract import CALLED, KNOWN, RELEASE, check_connector, check_scheduler


def test_this_release_has_everything(caplog: pytest.LogCaptureFixture) -> None:
    check_connector()
    check_scheduler()
    assert not caplog.records


def test_a_release_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kv_cache_utils, "resolve_kv_cache_block_sizes")
    monkeypatch.delattr(KVConnectorBase_V1, "build_connector_worker_meta")
    with pytest.raises(ConfigError) as error:
        check_connector()
    line = str(error.value)
    assert line.startswith(f"vLLM {vllm.__version__} lacks what prefixd needs of it: ") and "\n" not in line
    assert "KVConnectorBase_V1.build_connector_worker_meta, vllm.v1.core.kv_cache_utils:resolve_kv_cache" in line


@pytest.mark.parametrize("base", [KVConnectorBase_V1, RequestQueue])
def test_a_release_with_a_method_that_is_new(
    base: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(base, "take_blocks_back", lambda self: None, raising=False)
    check_connector()
    check_scheduler()
    (record,) = caplog.records
    assert f"does not know, and leaves at their defaults: {base.__name__}.take_blocks_back;" in record.getMessage()


def test_the_methods_that_are_said_to_be_overridden_are_and_no_others() -> None:
    ours = PrefixdConnector.__mro__[: PrefixdConnector.__mro__.index(KVConnectorBase_V1)]
    overridden = {name for kind in ours for name in vars(kind)}
    called = CALLED | RELEASE.CALLED
    assert called <= overridden
    assert not (KNOWN - called) & overridden
