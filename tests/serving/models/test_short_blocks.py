"""Blocks of padded tokens: a short prompt is found again, in every tier, and the answer is that of blocks without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from prefixd.worker.model import CausalModel, load_model
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.worker_settings import WorkerSettings
from tests.serving.dispatch.model_bench import open_model_bench
from tests.worker.tiny_models import build_grouped, tiny_config

NEW = 5
QWEN = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.12,
    "tie_word_embeddings": False,
}
"""Qwen2.5-0.5B's keys and values: 12 KiB a token in 24 layers of bfloat16."""
CASES = {
    "qwen": {"dtype": "bfloat16", "chunk_bytes": 2 << 20},
    "qwen in layers": {"layout": "layer", "block_padding": "any", "chunk_bytes": 24 << 10},
    "gpt_oss": {"block_padding": "any", "chunk_bytes": 24 << 10},
    "jamba": {"block_padding": "any", "chunk_bytes": 24 << 10, "kv": "paged"},
}
"""By default, layer by layer, with several groups, and in block tables beside states."""


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(name: str, folder: Path, **settings: object) -> CausalModel:
    chosen = {**CASES[name], **settings}
    return load_model(read_model_spec(WorkerSettings(model=str(folder), **chosen)))  # type: ignore[arg-type]


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    if name.startswith("qwen"):
        from transformers import AutoModelForCausalLM

        torch.manual_seed(4)
        config = tiny_config("Qwen2Config", hidden_size=128, num_hidden_layers=24 if name == "qwen" else 2, **QWEN)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # else it repeats one token
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.save_pretrained(tmp_path / "model")
    else:
        build_grouped(name).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


async def test_a_prompt_of_118_tokens_is_found_again_and_gives_the_same_tokens(
    name: str, folder: Path, tmp_path: Path
) -> None:
    prompt = np.random.default_rng(0).integers(3, 90, 118).tolist()
    model = load(name, folder)
    strides = [group.geometry.stride > group.geometry.piece_token_bytes for group in model.spec.groups.attention]
    assert all(strides) and model.spec.block_tokens == (64 if name == "qwen" else 16)
    hit = 117 // model.spec.block_tokens * model.spec.block_tokens
    plain = load(name, folder, block_padding="none", chunk_bytes=0)
    # In the same directory: what an older daemon or another setting has left there is another namespace.
    async with open_model_bench(
        plain, tmp_path / "data", 40 * plain.spec.block_frames + 10 * plain.spec.state_frames
    ) as bench:
        expected, _ = await bench.generate(prompt, NEW)
    assert len(set(expected)) > 2
    frames = 12 * model.spec.block_frames + 8 * model.spec.state_frames
    async with open_model_bench(model, tmp_path / "data", frames) as bench:
        assert await bench.generate(prompt, NEW) == (expected, (0, 0, 0, 0))
        assert await bench.generate(prompt, NEW) == (expected, (hit, 0, 0, 0))
        await bench.clear_gpu_tier()
        packed = sum(bench.trie.part_bytes)
        memory = (model.spec.block_frames + model.spec.state_frames) * model.spec.groups.frame_bytes
        assert packed < memory or model.spec.groups.whole_pages
        assert await bench.generate(prompt, NEW) == (expected, (0, hit, 0, 0))
    async with open_model_bench(model, tmp_path / "data", frames) as bench:
        assert await bench.generate(prompt, NEW) == (expected, (0, 0, hit, 0))
