"""What codecs do to models: keys and values that were coded and decoded, and answers behind them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks import codecs
from benchmarks.codecs_parts import model_quality, throttled_tokens, worker_tokens
from benchmarks.codecs_parts.model_quality import measure_quality
from benchmarks.codecs_parts.smollm2 import load_smollm2
from benchmarks.codecs_parts.texts import passages
from benchmarks.codecs_parts.throttled_tokens import disk_decides, summary
from benchmarks.codecs_parts.worker_tokens import Served, compare, measure_tokens
from benchmarks.load_or_recompute import Point
from prefixd.workloads.text_analysis import BLOCK_BYTES
from prefixd_swap.codecs.registry import find_codec

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_RANDOM: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"num_key_value_heads": 2},
    "Qwen3Config": {"num_key_value_heads": 1, "head_dim": 32},
    "MistralConfig": {"num_key_value_heads": 4, "sliding_window": None},
    "GemmaConfig": {"num_key_value_heads": 1, "head_dim": 32},
    "GPTNeoXConfig": {},
    "Olmo2Config": {"num_key_value_heads": 2},
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since a daemon's socket lies in it."""
    made = Path(tempfile.mkdtemp(prefix="prefixd-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.parametrize("config", _RANDOM)
def test_a_random_model_answers_alike_behind_decoded_keys_and_values(config: str) -> None:
    torch.manual_seed(3)
    made = getattr(transformers, config)(**_SIZES, **_RANDOM[config])
    model = transformers.AutoModelForCausalLM.from_config(made).eval().requires_grad_(False)
    texts = np.random.default_rng(0).integers(0, 96, (2, 80)).tolist()
    lossless, int8, k8v4 = measure_quality(model, texts, block_tokens=(16,), following=16)
    assert (lossless.kl, lossless.largest_kl, lossless.same_top1, lossless.rms_error) == (0, 0, 1, 0)
    assert 0 < int8.kl < 1e-3 and int8.same_top1 > 0.9
    assert int8.kl < k8v4.kl < 0.3
    for lossy in (int8, k8v4):
        assert not lossy.refused and lossy.size < 0.7
        assert 0 < lossy.rms_error <= find_codec(lossy.codec).most_error and lossy.rms_error < lossy.largest_error


@pytest.mark.slow
def test_smollm2_is_within_the_bounds() -> None:
    model, encode = load_smollm2()
    texts = passages(encode, 512 + 48)
    assert [len(text) for text in texts] == [560] * 5
    found = measure_quality(model, texts, block_tokens=(16,))
    assert not model_quality.violations([dataclasses.asdict(each) for each in found])
    sizes = {each.codec: each.size for each in found}
    assert sizes["lossless"] < 0.72 and sizes["int8"] < 0.54 and sizes["k8v4"] < 0.42


def test_figures_out_of_bounds_are_told() -> None:
    row = {"codec": "int8", "block_tokens": 16, "kl": 2e-4, "same_top1": 0.97}
    assert model_quality.violations([row]) == [
        "int8, blocks of 16: the divergence is 0.0002, more than 0.0001",
        "int8, blocks of 16: same_top1 is 0.97, less than 0.98",
    ]
    assert not model_quality.violations([row | {"kl": 1e-4, "same_top1": 0.98}])
    assert model_quality.violations([row | {"codec": "lossless", "kl": 1e-9, "same_top1": 1.0}])


@pytest.mark.slow
def test_tokens_behind_lossless_blocks_are_those_behind_computed_ones(folder: Path) -> None:
    prompts = [np.random.default_rng(seed).integers(32, 126, 100).tolist() for seed in range(3)]
    settings = {"worker.embedded": True, "worker.threads": 1, "worker.dtype": "bfloat16"}
    lossless, int8 = measure_tokens(Served(settings, BLOCK_BYTES // 2, prompts, 12), folder, ("lossless", "int8"))
    assert not worker_tokens.violations([lossless])
    assert lossless["saved_bytes"] > 0 and not lossless["altered_blocks"]
    assert int8["altered_blocks"] == 3 * (100 // 16) and int8["saved_bytes"] > lossless["saved_bytes"]
    assert int8["evicted_tokens_differ"] == int8["restarted_tokens_differ"], "decoded to the same bytes"


def test_shares_of_differing_tokens_and_answers() -> None:
    assert compare([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == {"tokens_differ": 0.25, "answers_differ": 0.5}
    row = {"codec": "lossless", "evicted_answers_differ": 0.5, "restarted_answers_differ": 0.0}
    assert worker_tokens.violations([row]) == ["with lossless 50.0% of the answers differ (evicted_answers_differ)"]
    assert not worker_tokens.violations([row | {"codec": "int8"}])


@pytest.mark.slow
def test_first_tokens_and_quality_are_measured_and_drawn(tmp_path: Path) -> None:
    file, plot = tmp_path / "codecs.json", tmp_path / "codecs.png"
    codecs.main(["--short", "--only", "quality", "--only", "first_token", "--json", str(file), "--plot", str(plot)])
    result = json.loads(file.read_text())
    assert plot.stat().st_size > 0
    assert {(row["codec"], row["block_tokens"]) for row in result["quality"]} == {
        (codec, tokens) for codec in model_quality.CODECS for tokens in (16, 64)
    }
    (row,) = result["first_tokens"]
    assert (
        set(row["ttft_ms"]) == {*throttled_tokens.CODECS, "exact_loaded", "int8_loaded"}
        and min(row["ttft_ms"].values()) > 0
    )
    assert row["gain"]["exact"] == 1 and row["tokens"] == 256


def test_the_gain_is_the_worst_one_where_the_disk_decides() -> None:
    def point(mb_per_s: float, exact: float, int8: float, loaded: tuple[float, float] | None = None) -> Point:
        ttft = {"exact": exact, "lossless": exact, "int8": int8, "k8v4": int8}
        ttft["exact_loaded"], ttft["int8_loaded"] = loaded or (exact, int8)
        lower, upper = ({name: factor * ms for name, ms in ttft.items()} for factor in (0.9, 1.1))
        return Point(mb_per_s, 0.0, 1024, ttft, lower, upper)

    slow, slower = point(50, 180, 100), point(20, 430, 230)  # 8 MiB are read in 168 and in 419 ms
    computed, fast = point(5, 700, 710, loaded=(1700, 900)), point(2000, 30, 31)
    assert [disk_decides(each) for each in (slow, slower, computed, fast)] == [True, True, True, False]
    (row,) = summary([computed])["first_tokens"]
    assert (row["gain"]["int8"], row["gain"]["int8_loaded"]) == (0.986, 1.889), "each against its own exact one"
    found = summary([slow, slower, computed, fast])
    assert (found["int8_gain"], found["later"]) == (1.8, 0)
    assert summary([fast])["int8_gain"] == 0
    assert summary([point(2000, 30, 40)])["later"] == 1
