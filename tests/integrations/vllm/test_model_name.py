"""What a model, an adapter and the packing of pages are called.

The stand-ins have the shape of vLLM 0.32's own objects.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prefixd.errors import ConfigError
from prefixd.integrations.vllm.model_name import adapter_name, model_name, packing


class Hf:
    """A transformers configuration."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


@pytest.fixture(autouse=True)
def own_fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixd.integrations.vllm.model_name.default_data_dir", lambda: tmp_path / "data")


def a_model(folder: Path, value: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": torch.full((4,), value)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    return folder


def named(folder: Path, version: str = "0.32.0", **changes: Any) -> str:
    model = {"model": str(folder), "seed": 0, "revision": None, "dtype": "bfloat16", "quantization": None}
    model |= {"max_model_len": 1024}
    hf = {"hidden_size": 4, "rope_theta": 1e4, "_name_or_path": str(folder)}
    hf |= {name: value for name, value in changes.items() if name in ("rope_theta", "rope_scaling")}
    model |= {name: value for name, value in changes.items() if name in (*model, "seed")}
    return model_name(
        SimpleNamespace(
            model_config=SimpleNamespace(hf_config=Hf(**hf), **model),
            cache_config=SimpleNamespace(
                cache_dtype=changes.get("cache_dtype", "auto"), calculate_kv_scales=changes.get("scales", False)
            ),
            load_config=SimpleNamespace(load_format=changes.get("load_format", "auto")),
            speculative_config=changes.get("speculative"),
            parallel_config=SimpleNamespace(tensor_parallel_size=changes.get("tp", 1)),
        ),
        version,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"cache_dtype": "fp8"},
        {"tp": 2},
        {"rope_theta": 1e6},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"quantization": "awq"},
        {"version": "0.33.0"},
        {"speculative": SimpleNamespace(model="draft")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_values_changes_the_name(tmp_path: Path, change: dict[str, Any]) -> None:
    model = a_model(tmp_path / "model")
    assert named(model, **change) != named(model)


def test_equal_models_in_different_directories_have_one_name_and_others_do_not(tmp_path: Path) -> None:
    one, same = a_model(tmp_path / "x" / "llama"), a_model(tmp_path / "y" / "llama")
    other = a_model(tmp_path / "z" / "llama", value=2.0)
    assert named(one) == named(same) and named(one).startswith("vllm/llama/")
    assert named(other) != named(one), "by the weights' content, of the same size"


def test_positions_that_depend_on_the_longest_prompt_do_so_in_the_name(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert named(model, max_model_len=2048) == named(model)
    assert named(model, max_model_len=2048, **dynamic) != named(model, **dynamic)


def test_random_weights_are_told_apart_by_their_seed(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    assert named(model, load_format="dummy") != named(model, load_format="dummy", seed=1)
    assert named(model, load_format="dummy") != named(model)


def test_a_model_that_is_not_a_directory_is_its_commit() -> None:
    hub, one, other = Path("meta/llama"), "0a" * 20, "1b" * 20
    assert named(hub, revision=one) == named(hub, revision=one) != named(hub, revision=other)


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_model_whose_version_cannot_be_told_shares_with_no_other_start(
    revision: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    hub = Path("meta/llama")
    assert named(hub, revision=revision) != named(hub, revision=revision)
    said = [record.getMessage() for record in caplog.records if record.name == "vllm.prefixd"]
    assert len(said) == 2 and all("of which version the weights of meta/llama" in line for line in said)


def test_scales_that_every_engine_computes_for_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        named(a_model(tmp_path / "model"), scales=True)


def test_an_adapter_is_its_files_wherever_the_path_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter").mkdir()
    paths = [str(tmp_path / "adapter"), "~/adapter", "adapter"]
    before = [adapter_name("a", path) for path in paths]
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"other weights")
    after = [adapter_name("a", path) for path in paths]
    assert None not in before and not {*before} & {*after}


def test_an_adapter_whose_files_cannot_be_seen_has_no_name() -> None:
    assert adapter_name("a", "somebody/adapter-of-the-hub") is None


def a_packing(tensor: torch.Tensor) -> str:
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    return packing(config, {"a": tensor})


@pytest.mark.parametrize("heads_outside", [False, True])
def test_how_pages_are_packed_does_not_depend_on_the_number_of_blocks(heads_outside: bool) -> None:
    def pages(blocks: int, tokens: int = 16) -> torch.Tensor:
        """(blocks, heads, tokens, head size)"""
        if heads_outside:
            return torch.zeros(2, blocks, tokens, 8).transpose(0, 1)
        return torch.zeros(blocks, 2, tokens, 8)

    assert a_packing(pages(5)) == a_packing(pages(7))
    assert a_packing(pages(5)) != a_packing(pages(5, tokens=32))
    assert a_packing(pages(5)) != a_packing(pages(5).to(torch.bfloat16))


def test_heads_before_tokens_are_packed_otherwise_than_tokens_before_heads() -> None:
    assert a_packing(torch.zeros(5, 2, 16, 8)) != a_packing(torch.zeros(5, 16, 2, 8).transpose(1, 2))
