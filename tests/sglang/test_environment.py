"""SGLang's environment variables are in the names of its pages, but those that are known to be harmless."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engines.sglang_without_gpu import sglang
from prefixd.integrations.sglang import environment, namespace_names
from prefixd.integrations.sglang.environment import TABLE, environment_in_name

UNREGISTERED = {
    "SGLANG_BLOCK_NONZERO_RANK_CHILDREN",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_DETOKENIZER_MAX_STATES",
    "SGLANG_DP_RANK",
    "SGLANG_DP_SIZE",
    "SGLANG_GIT_COMMIT",
    "SGLANG_GRPC_ENDPOINT",
    "SGLANG_HEALTH_CHECK_TIMEOUT",
    "SGLANG_HOST_IP",
    "SGLANG_LOCAL_IP_NIC",
    "SGLANG_LOGGING_CONFIG_PATH",
    "SGLANG_NCCL_SO_PATH",
    "SGLANG_NSYS_PROFILING",
    "SGLANG_RUN_ID",
    "SGLANG_SKIP_P2P_CHECK",
    "SGLANG_USE_CPU_ENGINE",
    "SGLANG_USE_RUNAI_MODEL_STREAMER",
    "SGLANG_WAIT_PORT_TIMEOUT",
    "SGLANG_WAIT_WEIGHTS_READY_TIMEOUT",
}
"""What SGLang reads or sets all the same."""


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment_in_name():
        monkeypatch.delenv(name)


def fields() -> dict[str, Any]:
    module = sglang("srt.environ")
    return {field.name: field for field in vars(module.Envs).values() if isinstance(field, module.EnvField)}


def test_nothing_that_the_table_says_has_gone() -> None:
    ours = {name for name in TABLE.names if name.startswith("SGLANG_") and not name.endswith("*")}
    assert ours - {*fields()} == UNREGISTERED


def test_every_variable_that_is_set_counts_unless_it_is_known_to_be_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = set()
    for name, field in fields().items():
        boolean = isinstance(field, sglang("srt.environ").EnvBool)
        monkeypatch.setenv(name, str(int(not environment._default(field))) if boolean else "77")
        if [*environment_in_name()] != [name]:
            harmless.add(name)
        monkeypatch.delenv(name)
    assert harmless and all(name in TABLE for name in harmless), harmless
    assert "SGLANG_FORCE_FP8_MARLIN" not in harmless and "SGLANG_LOG_GC" in harmless


def test_what_is_set_to_its_default_and_what_sglang_sets_itself_do_not_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "true")
    monkeypatch.setenv("SGLANG_OPT_USE_TOPK_V2", str(environment._default(fields()["SGLANG_OPT_USE_TOPK_V2"])))
    monkeypatch.setenv("SGLANG_RUN_ID", "sglang-run-1795783014.1-77")
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", "/pages")
    assert environment_in_name() == {}
    assert not caplog.records
    monkeypatch.setenv("SGLANG_NEW_KERNEL", "")
    assert environment_in_name() == {"SGLANG_NEW_KERNEL": ""}
    assert "SGLANG_NEW_KERNEL; unset those" in caplog.text


def test_a_variable_that_may_change_kv_is_in_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    server_args = sglang("srt.server_args").ServerArgs(model_path="m")
    before = namespace_names.arguments_in_name(server_args)
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
    assert namespace_names.arguments_in_name(server_args) == before | {
        "environment": {"SGLANG_ENABLE_JIT_DEEPGEMM": False}
    }
