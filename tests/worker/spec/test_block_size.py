"""The number of tokens in a block and their stride: what they become, and the reason that is given."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.worker.spec.kv_groups import CUDA_CHUNK_BYTES
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap import KvGeometry
from prefixd_swap.block_size import (
    LOW_PADDING,
    MOST_PADDING,
    SHORT_BLOCK,
    SMALL_TOKEN,
    choose_blocks,
    explain_blocks,
    fill_chunks,
    pad_to_chunks,
    padding_share,
)
from prefixd_swap.group_shape import STRIDE_BYTES
from tests.worker.tiny_models import tiny_config

QWEN = {"layers": 28, "kv_heads": 4, "head_dim": 128, "dtype": "bfloat16"}  # Qwen2.5-7B: 56 KiB a token
TOKEN = "a token takes 56 KiB and blocks must fill whole chunks of 2 MiB (lcm 14 MiB)"
PADDED = (
    f"16 tokens asked, 32 used: {TOKEN}; tokens are padded to 64 KiB, 14% more GPU memory; worker.block_padding = "
    '"none" has no padding and blocks of 256'
)
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
def test_blocks_of_qwen_without_padding(layout, asked, used, reason):
    geometry = fill_chunks(KvGeometry(**QWEN, block_tokens=asked, layout=layout), 2 << 20)
    assert geometry == KvGeometry(**QWEN, block_tokens=used, layout=layout)
    assert geometry.piece_bytes % (2 << 20) == 0
    assert explain_blocks(asked, [("attention", geometry)], 2 << 20) == reason


def test_odd_sizes_are_told_in_bytes():
    odd = KvGeometry(layers=3, kv_heads=1, head_dim=8, dtype="float32", block_tokens=16)
    filled = fill_chunks(odd, 4096)
    assert explain_blocks(16, [("attention", filled)], 4096) == (
        "16 tokens asked, 64 used: a token takes 192 bytes and blocks must fill whole chunks of 4 KiB (lcm 12 KiB)"
    )


SIZES = st.builds(
    KvGeometry,
    layers=st.integers(1, 80),
    kv_heads=st.integers(1, 16),
    head_dim=st.sampled_from([1, 40, 64, 80, 128, 256]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    block_tokens=st.just(16),
)


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(SIZES, min_size=1, max_size=3),
    asked=st.integers(1, 300),
    layout=st.sampled_from(["token", "layer"]),
    chunk_bytes=st.sampled_from([4096, 64 << 10, 2 << 20, 6 << 20]),
)
def test_the_rule_keeps_its_promises_for_any_groups(groups, asked, layout, chunk_bytes):
    groups = [
        KvGeometry(each.layers, each.kv_heads, each.head_dim, each.dtype, asked, layout)
        for each in (groups[:1] if layout == "layer" else groups)
    ]
    none, auto, any_ = (choose_blocks(groups, chunk_bytes, padding) for padding in ("none", "auto", "any"))
    for chosen in (none, auto, any_):
        assert len({each.block_tokens for each in chosen}) == 1
        for each in chosen:
            each.check_chunk(chunk_bytes)
            assert each.stride == each.piece_token_bytes or each.stride % STRIDE_BYTES == 0
    assert not padding_share(none)
    assert any_[0].block_tokens == asked <= auto[0].block_tokens <= none[0].block_tokens
    tokens, share = auto[0].block_tokens, padding_share(auto)
    small = all(each.token_memory <= SMALL_TOKEN for each in auto)
    assert share <= LOW_PADDING or (tokens <= SHORT_BLOCK and (share <= MOST_PADDING or small))
    if tokens > SHORT_BLOCK >= asked and chunk_bytes % SHORT_BLOCK == 0:
        short = pad_to_chunks(groups, SHORT_BLOCK, chunk_bytes)
        assert padding_share(short) > MOST_PADDING and max(each.token_memory for each in short) > SMALL_TOKEN


@pytest.mark.parametrize(
    ("layout", "padding", "used", "stride", "reason"),
    [
        ("token", "auto", 32, 64 << 10, PADDED),
        ("token", "none", 256, 56 << 10, f"16 tokens asked, 256 used: {TOKEN}"),
        ("layer", "auto", 1024, 2 << 10, f"16 tokens asked, 1024 used: {LAYER}"),
    ],
)
def test_the_worker_tells_the_daemon(tmp_path, layout, padding, used, stride, reason):
    config = tiny_config(
        "Qwen2Config", num_hidden_layers=28, hidden_size=512, num_attention_heads=4, num_key_value_heads=4
    )
    config.save_pretrained(tmp_path)
    settings = WorkerSettings(
        model=str(tmp_path),
        dtype="bfloat16",
        block_tokens=16,
        block_padding=padding,
        layout=layout,
        chunk_bytes=CUDA_CHUNK_BYTES,
    )
    spec = read_model_spec(settings)
    hello = spec.hello()
    assert (hello.block_tokens, hello.block_tokens_asked, hello.block_tokens_reason) == (used, 16, reason)
    assert spec.geometry.stride == stride
    assert (hello.token_bytes, hello.token_memory) == (56 << 10, stride * spec.geometry.pieces)
    assert hello.needs[0].nbytes == used * (56 << 10), "padding is not needed"
