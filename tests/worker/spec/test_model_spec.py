"""What is read from a model's configuration, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from prefixd.worker.attention.tile_attention import TileStep
from prefixd.worker.model import load_model
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.errors import ModelError
from prefixd.worker_protocol.protocol import GroupShape
from prefixd.worker_protocol.worker_settings import WorkerSettings


def spec_of(directory: Path, **settings: object):
    return read_model_spec(WorkerSettings(model=str(directory), **settings))


@pytest.fixture
def directory(llama_directory: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(llama_directory, tmp_path / "model"))


def edit(directory: Path, **changes: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def test_hello_says_what_the_model_needs(llama_directory, model):
    spec = spec_of(llama_directory, chunk_bytes=4096)
    hello = spec.hello()
    assert (hello.groups, hello.dtype) == ((GroupShape("attention", None, 3, 1, kv_heads=2, head_dim=16),), "float32")
    assert hello.frame_bytes == spec.geometry.block_bytes == 16 * 3 * 2 * 2 * 16 * 4
    assert (hello.vocab_size, hello.max_model_tokens, hello.eos_token_ids) == (96, 512, (95,))
    assert hello.architecture == "LlamaForCausalLM"
    assert hello.parameters == sum(
        weights.numel() for weights in load_file(llama_directory / "model.safetensors").values()
    )


@pytest.mark.parametrize(
    ("layout", "chunk_bytes", "asked", "given"),
    [
        ("token", 4096, 16, 16),  # 768 bytes a token: 16 tokens are 3 chunks
        ("token", 4096, 17, 32),
        ("layer", 4096, 1, 16),  # 256 bytes a token and layer
        ("layer", 4096, 33, 48),
        ("token", 2 << 20, 16, 64),  # padded
    ],
)
def test_block_tokens_are_rounded_up_to_whole_chunks(llama_directory, layout, chunk_bytes, asked, given):
    spec = spec_of(llama_directory, layout=layout, chunk_bytes=chunk_bytes, block_tokens=asked)
    assert spec.geometry.block_tokens == given
    assert spec.hello().chunk_bytes == chunk_bytes
    assert spec.sequence_capacity % given == 0


def test_the_default_chunk_on_a_cpu_leaves_the_block_as_asked_if_it_can(llama_directory):
    spec = spec_of(llama_directory, block_tokens=64)  # 48 KiB
    assert (spec.groups.chunk_bytes, spec.geometry.block_tokens) == (16384, 64)
    spec = spec_of(llama_directory, block_tokens=5)
    assert (spec.groups.chunk_bytes, spec.geometry.block_tokens) == (4096, 16)


def test_settings_limit_length_and_choose_the_dtype(llama_directory):
    spec = spec_of(llama_directory, max_model_tokens=100, dtype="bfloat16", chunk_bytes=4096)
    assert spec.max_model_tokens == 100
    assert spec.geometry.dtype == "bfloat16"
    assert spec_of(llama_directory, max_model_tokens=10**6).max_model_tokens == 512


def test_auto_is_the_saved_dtype_on_a_gpu_and_float32_on_a_cpu(directory, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    edit(directory, dtype="bfloat16")
    assert spec_of(directory, device="cuda").geometry.dtype == "bfloat16"
    assert spec_of(directory, device="cpu").geometry.dtype == "float32"
    with pytest.raises(ModelError, match="dtype 'float64'"):
        spec_of(edit(directory, dtype="float64"), device="cuda")


def test_end_of_sequence_of_the_generation_config_comes_first(directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert spec_of(directory).eos_token_ids == (4, 5)
    (directory / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    assert spec_of(directory).eos_token_ids == (95,), "the model's, where the other file names none"


def test_not_a_model_directory(tmp_path):
    with pytest.raises(ModelError, match="is not a directory"):
        spec_of(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"no config\.json"):
        spec_of(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ModelError, match="cannot be read"):
        spec_of(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="no-such-model"):
        spec_of(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("num_attention_heads", 3, r"attention heads \(3\)"), ("num_key_value_heads", "two", "'num_key_value_heads'")],
)
def test_a_wrong_value_is_named_with_its_folder(directory, field, value, words):
    with pytest.raises(ModelError, match=words) as caught:
        spec_of(edit(directory, **{field: value}))
    assert f"config.json in {str(directory)!r}" in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_without_a_limit_of_positions(directory):
    with pytest.raises(ModelError, match="max_position_embeddings=0"):
        spec_of(edit(directory, max_position_embeddings=0))


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99"])
def test_devices_that_are_not_there(llama_directory, device):
    with pytest.raises(ModelError, match=device):
        spec_of(llama_directory, device=device)


def test_weights_that_are_not_there(directory):
    spec = spec_of(directory)
    path = directory / "model.safetensors"
    weights = load_file(path)
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in weights.items() if name != lost}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=lost):
        load_model(spec)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(spec)
    path.unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(spec)


def test_quantised_weights_whose_package_is_missing(directory):
    spec = spec_of(edit(directory, quantization_config={"quant_method": "gptq", "bits": 4}))
    with pytest.raises(ModelError, match=r"cannot be loaded: .*GPTQ.*requires"):
        load_model(spec)


def test_weights_of_another_shape(directory):
    with pytest.raises(ModelError) as caught:
        load_model(spec_of(edit(directory, intermediate_size=128)))
    name, there, needed = "model.layers.0.mlp.down_proj.weight", "[64, 96]", "[64, 128]"
    assert f"such as '{name}' with {there} where LlamaForCausalLM needs {needed}" in str(caught.value)


def test_a_model_whose_logits_differ_on_our_cache_is_refused(llama_directory, monkeypatch):
    """The check at load, made to fail: attention with another scale than the model's own."""
    original = TileStep.attend
    monkeypatch.setattr(
        TileStep,
        "attend",
        lambda self, query, layer, scaling, kind: original(self, query, layer, 2 * scaling, kind),
    )
    with pytest.raises(ModelError, match="relative error"):
        load_model(spec_of(llama_directory))
