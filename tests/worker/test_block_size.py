"""The number of tokens in a block: what it becomes, and the reason that is given."""

from __future__ import annotations

import pytest

from prefixd.worker.spec.kv_groups import CUDA_CHUNK_BYTES
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap import KvGeometry
from prefixd_swap.block_size import explain_block_tokens, fill_chunks
from tests.worker.tiny_models import tiny_config

QWEN = {"layers": 28, "kv_heads": 4, "head_dim": 128, "dtype": "bfloat16"}  # Qwen2.5-7B: 56 KiB a token
TOKEN = "a token takes 56 KiB and blocks must fill whole chunks of 2 MiB (lcm 14 MiB)"
LAYER = "a token takes 2 KiB in each of 28 layers and a block's pieces must fill whole chunks of 2 MiB (lcm 2 MiB)"


@pytest.mark.parametrize(
    ("layout", "asked", "used", "reason"),
    [
        ("token", 1, 256, f"1 tokens asked, 256 used: {TOKEN}"),
        ("token", 16, 256, f"16 tokens asked, 256 used: {TOKEN}"),
        ("token", 256, 256, ""),
        ("token", 257, 512, f"257 tokens asked, 512 used: {TOKEN}"),
        ("layer", 16, 1024, f"16 tokens asked, 1024 used: {LAYER}"),
        ("layer", 1024, 1024, ""),
        ("layer", 1025, 2048, f"1025 tokens asked, 2048 used: {LAYER}"),
    ],
)
def test_blocks_of_qwen_on_chunks_of_2_mib(layout, asked, used, reason):
    geometry = fill_chunks(KvGeometry(**QWEN, block_tokens=asked, layout=layout), 2 << 20)
    assert geometry == KvGeometry(**QWEN, block_tokens=used, layout=layout)
    assert geometry.piece_bytes % (2 << 20) == 0
    assert explain_block_tokens(asked, geometry, 2 << 20) == reason


def test_odd_sizes_are_told_in_bytes():
    odd = KvGeometry(layers=3, kv_heads=1, head_dim=8, dtype="float32", block_tokens=16)
    filled = fill_chunks(odd, 4096)
    assert explain_block_tokens(16, filled, 4096) == (
        "16 tokens asked, 64 used: a token takes 192 bytes and blocks must fill whole chunks of 4 KiB (lcm 12 KiB)"
    )


@pytest.mark.parametrize(
    ("layout", "used", "reason"),
    [("token", 256, f"16 tokens asked, 256 used: {TOKEN}"), ("layer", 1024, f"16 tokens asked, 1024 used: {LAYER}")],
)
def test_the_worker_tells_the_daemon(tmp_path, layout, used, reason):
    config = tiny_config(
        "Qwen2Config", num_hidden_layers=28, hidden_size=512, num_attention_heads=4, num_key_value_heads=4
    )
    config.save_pretrained(tmp_path)
    settings = WorkerSettings(
        model=str(tmp_path), dtype="bfloat16", block_tokens=16, layout=layout, chunk_bytes=CUDA_CHUNK_BYTES
    )
    hello = read_model_spec(settings).hello()
    assert (hello.block_tokens, hello.block_tokens_asked, hello.block_tokens_reason) == (used, 16, reason)
