"""What a release of SGLang lacks, or has anew, is told in one line when the backend is loaded."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest

import prefixd.integrations.sglang
from benchmarks.engines.sglang_without_gpu import sglang
from prefixd.base.errors import ConfigError
from prefixd.integrations.sglang import contract

storage = sglang("srt.mem_cache.hicache_storage")


def test_this_release_has_what_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    assert version("sglang") == contract.VERSION
    assert contract.RELEASE.__name__.endswith("v" + contract.VERSION.replace(".", "_"))
    contract.check()
    assert not caplog.records


def test_the_rank_that_writes_for_all() -> None:
    fields = dict(tp_size=2, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, enable_storage_metrics=False)
    for mla, rank, writes in [(True, 0, True), (True, 1, False), (False, 0, True), (False, 1, True)]:
        config = storage.HiCacheStorageConfig(
            tp_rank=rank, is_mla_model=mla, is_page_first_layout=True, model_name="m", **fields
        )
        assert contract.RELEASE.is_storage_writer(config) is writes


def test_a_release_that_lacks_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sglang("srt.runtime_context"), "get_server_args")
    monkeypatch.delattr(storage.HiCacheStorage, "batch_get_v1")
    with pytest.raises(ConfigError) as told:
        prefixd.integrations.sglang.PrefixdHiCache  # noqa: B018
    message = str(told.value)
    assert "\n" not in message
    assert f"SGLang {contract.VERSION} lacks what prefixd needs of it" in message
    for name in ("HiCacheStorage.batch_get_v1", "sglang.srt.runtime_context:get_server_args", "0.5.22 or 0.5.23"):
        assert name in message


def test_a_release_with_a_new_method(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(storage.HiCacheStorage, "batch_pin", lambda self, keys: None, raising=False)
    assert prefixd.integrations.sglang.PrefixdHiCache is not None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "HiCacheStorage.batch_pin" in record.getMessage() and os.linesep not in record.getMessage()
