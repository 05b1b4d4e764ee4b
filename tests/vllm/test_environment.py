"""The table knows every environment variable of the installed vLLM."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from vllm import envs

from prefixd.integrations.vllm.naming.environment import TABLE, environment_in_name
from prefixd.integrations.vllm.naming.model_name import model_name
from tests.vllm.schedulers import make_config

UNREGISTERED = {
    "VLLM_CPU_MOE_PREPACK",
    "VLLM_CPU_SIM_MULTI_NUMA",
    "VLLM_CUSTOM_ALLREDUCE_ALGO",
    "VLLM_DIST_IDENT",
    "VLLM_HOST_PORT",
    "VLLM_OMP_NUM_THREADS_SET_BY_VLLM",
    "VLLM_PRECOMPILED_WHEEL_LOCATION",
}
"""What vLLM reads or sets all the same."""


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment_in_name():
        monkeypatch.delenv(name)


def test_every_variable_is_in_the_table() -> None:
    unknown = [name for name in envs.environment_variables if name not in TABLE]
    assert not unknown, "decide whether they change KV, and put them into vllm/naming/environment.py"


def test_nothing_that_the_table_says_has_gone() -> None:
    ours = {name for name in TABLE.names if name.startswith("VLLM_") and not name.endswith("*")}
    assert ours - {*envs.environment_variables} == UNREGISTERED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_BATCH_INVARIANT", "1"),
        ("VLLM_MARLIN_INPUT_DTYPE", "fp8"),
        ("VLLM_DISABLED_KERNELS", "MarlinLinearKernel"),
        ("VLLM_USE_DEEP_GEMM", "0"),
        ("VLLM_PLUGINS", ""),
        ("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "INT4"),
        ("VLLM_ASCEND_NEW", "1"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
    ],
)
def test_a_variable_that_may_change_kv_changes_the_name(
    llama: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    config = make_config(llama, asynchronous=False, blocks=9)
    before = environment_in_name()  # vLLM sets some itself, for the platform
    monkeypatch.setenv(name, value)
    after = environment_in_name()
    assert {*after} - {*before} == {name}
    assert len({model_name(config, environment=environment) for environment in (before, after)}) == 2


def test_harmless_ones_and_another_spelling_leave_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    monkeypatch.setenv("VLLM_DIST_IDENT", "54321")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert environment_in_name() == {}
    found = []
    for value in ("true", "1"):
        monkeypatch.setenv("VLLM_ROCM_USE_AITER", value)
        found.append(environment_in_name())
    assert found[0] == found[1] == {"VLLM_ROCM_USE_AITER": True}
    assert not caplog.records


def test_a_variable_that_names_a_file_is_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, found = tmp_path / "quantization.json", []
    monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", str(file))
    for bits in (4, 8):
        file.write_text(json.dumps({"bits": bits}))
        found.append(environment_in_name())
    assert found == [{"VLLM_HUMMING_ONLINE_QUANT_CONFIG": {"bits": bits}} for bits in (4, 8)]


def test_a_value_that_vllm_cannot_read_counts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "fp3")
    assert environment_in_name() == {"VLLM_MARLIN_INPUT_DTYPE": "fp3"}
