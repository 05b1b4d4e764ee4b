"""What SGLang was started with is in the names of its pages, as far as it changes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.engines.sglang_without_gpu import sglang
from prefixd.base.errors import ConfigError
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.integrations.engine.naming import arguments
from prefixd.integrations.sglang import backend, namespace_names
from prefixd.integrations.sglang.arguments import TABLE, arguments_of
from tests.sglang.conftest import MakeController
from tests.sglang.served import new_prompt


@pytest.fixture(autouse=True)
def own_fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (arguments, namespace_names):
        monkeypatch.setattr(module, "default_data_dir", lambda: tmp_path / "data")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "poet"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"some weights")
    return folder


def started(model: Path | str, **arguments: Any) -> Any:
    return sglang("srt.server_args").ServerArgs(model_path=str(model), **arguments)


def named(model: Path | str, given: str | None = None, **arguments: Any) -> tuple[str, dict[str, Any]]:
    """What of SGLang's arguments is in all names."""
    server_args = started(model, **arguments)
    return namespace_names.model_of("served", given, server_args), namespace_names.arguments_in_name(server_args)


def test_the_table_has_every_argument_of_this_sglang_and_no_other() -> None:
    known = {argument.name for argument in arguments_of(started("m"))}
    assert known - TABLE.names == set(), "decide whether they change KV, and put them into sglang/arguments.py"
    assert TABLE.names - known == set()


@pytest.mark.parametrize(
    "changed",
    [
        {"json_model_override_args": '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'},
        {"quantization": "fp8"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"attention_backend": "triton"},
        {"load_format": "dummy"},
        {"weight_version": "after training"},
        {"speculative_algorithm": "EAGLE"},
        {"mm_process_config": {"image": {"max_pixels": 100}}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_an_argument_that_changes_kv_changes_the_name(model: Path, changed: dict[str, Any]) -> None:
    assert named(model, **changed) != named(model)


def test_one_that_does_not_and_another_start_leave_it(model: Path) -> None:
    other = {"max_running_requests": 4, "port": 4000, "random_seed": 3, "log_level": "debug", "api_key": "x"}
    assert named(model, **other) == named(model)


def test_what_sglang_has_decided_counts_and_not_what_it_was_told(model: Path) -> None:
    server_args = started(model)
    overrides = sglang("srt.arg_groups.overrides")
    overrides.declare_resolution(server_args, "a test", attention_backend="flashinfer")
    assert namespace_names.arguments_in_name(server_args)["attention_backend"] == "flashinfer"


@pytest.mark.parametrize(
    "argument", ["quantization_param_path", "decrypted_config_file", "speculative_draft_model_path"]
)
def test_a_file_is_what_is_in_it(model: Path, tmp_path: Path, argument: str) -> None:
    file, found = tmp_path / "scales.json", []
    for content in ("1", "2"):
        file.write_text(content)
        found.append(named(model, **{argument: str(file)}))
    assert found[0] != found[1] and named(model) not in found


@pytest.mark.parametrize("form", ["dict", "list", "ref", "NAME=PATH"])
def test_an_adapter_that_was_trained_again_at_the_same_path_is_another(model: Path, adapter: Path, form: str) -> None:
    """SGLang's keys have the id that it makes of name and path."""
    ref = sglang("srt.lora.lora_registry").LoRARef
    given: Any = {
        "dict": {"poet": str(adapter)},
        "list": [{"lora_name": "poet", "lora_path": str(adapter), "pinned": True}],
        "ref": [ref(lora_id=ref.deterministic_id("poet", str(adapter)), lora_name="poet", lora_path=str(adapter))],
        "NAME=PATH": [f"poet={adapter}"],
    }[form]
    weights = adapter / "adapter_model.safetensors"
    before, status = named(model, lora_paths=given), weights.stat()
    assert named(model, lora_paths=given) == before != named(model)
    weights.write_bytes(b"more weights")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert named(model, lora_paths=given) != before


def test_an_edited_processor_is_another(model: Path) -> None:
    (model / "preprocessor_config.json").write_text('{"do_normalize": true}')
    before = named(model)
    (model / "preprocessor_config.json").write_text('{"do_normalize": false}')
    assert named(model) != before


def test_a_model_of_the_hub_is_its_commit_and_else_this_engines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commits = {"main": "0a" * 20}

    def cached(name: str, file: str, revision: str | None = None) -> str | None:
        commit = commits.get(revision or "main")
        return commit and str(tmp_path / "snapshots" / commit / file)

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    first = named("meta/llama")
    assert first[0] == named("meta/llama", revision="0a" * 20)[0] == f"meta/llama@{'0a' * 20}"
    commits["main"] = "1b" * 20
    assert named("meta/llama") != first, "the newest version is another by now"
    assert not caplog.records
    commits.clear()
    assert named("meta/llama") != named("meta/llama")
    assert "of which version the weights of meta/llama are cannot be told" in caplog.text
    assert named("meta/llama", "mine@1") == named("meta/llama", "mine@1")
    assert named("not: a name")[0] != named("not: a name")[0]


@pytest.mark.parametrize("refused", ["trust_mm_content_hashes", "checkpoint_engine_wait_weights_before_ready"])
def test_what_nothing_could_name_is_refused_when_sglang_starts(
    refused: str, daemon: DaemonProcess, make_controller: MakeController, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_server_args", lambda: started(model, **{refused: True}))
    with pytest.raises(Exception, match=f"{refused} = True: ") as raised:
        make_controller(daemon)
    assert isinstance(raised.value, ConfigError) or isinstance(raised.value.__cause__, ConfigError)


def test_pages_are_shared_by_equal_engines_and_by_no_other(
    daemon: DaemonProcess, make_controller: MakeController, model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = new_prompt(4)

    def found(**arguments: Any) -> int:
        monkeypatch.setattr(backend, "_server_args", lambda: started(model, **arguments))
        controller = make_controller(daemon)
        hits = int(controller.hits(tokens).storage_hit_count)
        controller.backup(tokens, controller.random_pages(4, seed=1))
        return hits

    loras = {"lora_paths": {"poet": str(adapter)}}
    assert [found(), found(), found(**loras), found(**loras)] == [0, 64, 0, 64]
    (adapter / "adapter_model.safetensors").write_bytes(b"trained again")
    assert found(**loras) == 0
    assert found(json_model_override_args='{"rope_theta": 1}') == 0


def test_the_version_counts_where_pages_do_not_say_how_they_are_packed_or_where_it_is_to(
    daemon: DaemonProcess, make_controller: MakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = new_prompt(4)

    def found(version: str, **prefixd: Any) -> int:
        monkeypatch.setattr(backend, "VERSION", version)
        controller = make_controller(daemon, prefixd=prefixd)
        hits = int(controller.hits(tokens).storage_hit_count)
        controller.backup(tokens, controller.random_pages(4, seed=1))
        return hits

    assert [found("0.5.22"), found("0.5.23")] == [0, 64], "an upgrade finds what is there"
    strict = {"strict_version": True}
    assert [found("0.5.22", **strict), found("0.5.22", **strict), found("0.5.23", **strict)] == [0, 64, 0]
    monkeypatch.setattr(namespace_names, "_LAYOUT_SAYS_ALL", ())
    assert [found("0.5.24"), found("0.5.24"), found("0.5.25")] == [0, 64, 0]
