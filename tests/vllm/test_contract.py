"""The release that is installed has what prefixd uses; one that lacks a name, or has other methods, is told."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.kv_cache_interface import KVCacheLayout

from prefixd.base.errors import ConfigError
from prefixd.integrations.vllm import PrefixdConnector
from prefixd.integrations.vllm.contract import CALLED, KNOWN, RELEASE, check_connector, check_scheduler


def test_this_release_has_everything(caplog: pytest.LogCaptureFixture) -> None:
    check_connector()
    check_scheduler()
    assert not caplog.records


@pytest.mark.parametrize("asked", [False, True])
def test_vllm_is_asked_for_a_layout_that_it_knows(asked: bool) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=False, use_mla=False),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"cross_layer_blocks": True} if asked else None),
    )
    layout = PrefixdConnector.get_required_kvcache_layout(config)
    assert layout is None if not asked else KVCacheLayout[layout].is_block_outermost


def test_a_release_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kv_cache_utils, "resolve_kv_cache_block_sizes")
    monkeypatch.delattr(KVConnectorBase_V1, "build_connector_worker_meta")
    with pytest.raises(ConfigError) as error:
        check_connector()
    line = str(error.value)
    assert line.startswith(f"vLLM {vllm.__version__} lacks what prefixd needs of it: ") and "\n" not in line
    assert "KVConnectorBase_V1.build_connector_worker_meta, vllm.v1.core.kv_cache_utils:resolve_kv_cache" in line


PLANTED = [
    ("vllm.v1.core.kv_cache_utils", "resolve_kv_cache_block_sizes", "vllm:PrefixdConnector"),
    ("vllm.config", "get_current_vllm_config_or_none", "vllm:PrefixdConnector"),
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "SupportsHMA", "vllm:PrefixdConnector"),  # by RELEASE
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", "vllm:FastestPrefixFirstScheduler"),
    ("vllm.v1.kv_offload.tiering.async_lookup", "AsyncLookupManager", "vllm.offloading:PrefixdTier"),
]
_CHILD = """
import importlib, json, sys
for module, name, wanted in json.loads(sys.argv[1]):
    home = importlib.import_module(module)
    kept = getattr(home, name)
    delattr(home, name)
    where, _, kind = wanted.partition(":")
    try:
        getattr(importlib.import_module(f"prefixd.integrations.{where}"), kind)
        print("nothing was said")
    except Exception as error:
        print(type(error).__name__, error, sep=": ")
    setattr(home, name, kept)
    for ours in [ours for ours in sys.modules if ours.startswith("prefixd.integrations")]:
        del sys.modules[ours]
"""


def test_a_name_that_is_missing_when_vllm_starts_is_told_in_one_line() -> None:
    """In a process that has imported nothing of prefixd yet, as vLLM's own."""
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(PLANTED)], capture_output=True, text=True, check=True, timeout=300
    )
    lines = [line for line in child.stdout.splitlines() if "prefixd" in line or "nothing" in line]
    for line, (_, name, _) in zip(lines, PLANTED, strict=True):
        assert line.startswith(f"ConfigError: vLLM {vllm.__version__} lacks what prefixd needs of it: ")
        assert name in line


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
