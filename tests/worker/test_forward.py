"""The forward pass on virtual tensors against transformers' own, and its independence of how work is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixd.worker.memory.kv_memory import Segment


def random_tokens(seed: int, count: int, vocabulary: int = 96) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, count).tolist()


def reference_logits(directory: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def test_batched_prompts_match_transformers(rig, llama_directory):
    prompts = [random_tokens(seed, length) for seed, length in ((1, 5), (2, 33), (3, 64), (4, 1))]
    tensors = [rig.tensor(rig.frames(rig.blocks(len(prompt)))) for prompt in prompts]
    segments = [Segment(t, 0, len(p)) for t, p in zip(tensors, prompts, strict=True)]
    flat = [token for prompt in prompts for token in prompt]
    ours = rig.forward(flat, segments, range(len(flat)))
    theirs = torch.cat([reference_logits(llama_directory, prompt) for prompt in prompts])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_chunks_and_single_tokens_match_transformers(rig, llama_directory):
    tokens = random_tokens(5, 70)
    ours = rig.logits(rig.tensor(rig.frames(5)), tokens, cuts=[16, 37, 48, 60, *range(61, 70)])
    torch.testing.assert_close(ours, reference_logits(llama_directory, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["token", "layer"])
def test_bits_do_not_depend_on_how_the_prompt_is_cut(make_rig, layout):
    rig = make_rig(layout=layout, chunk_bytes=4096)
    tokens = random_tokens(6, 300)
    blocks = rig.blocks(len(tokens))
    whole = rig.logits(rig.tensor(rig.frames(blocks)), tokens, cuts=[])
    random = np.random.default_rng(8)
    for _ in range(4):
        cuts = sorted(random.choice(np.arange(1, 300), 12, replace=False).tolist())
        assert torch.equal(rig.logits(rig.tensor(rig.frames(blocks)), tokens, cuts), whole), cuts
    decoded = rig.logits(rig.tensor(rig.frames(blocks)), tokens, cuts=list(range(250, 300)))
    assert torch.equal(decoded, whole)


def test_bits_do_not_depend_on_the_cache_nor_on_neighbours(rig):
    tokens = random_tokens(9, 90)
    frames = rig.frames(6)
    whole = rig.logits(rig.tensor(frames), tokens, cuts=[])
    kv = rig.tensor(frames).kv[:80].clone()
    for cached in (1, 3, 5):
        shared = rig.tensor([*frames[:cached], *rig.frames(6 - cached)])
        start = cached * rig.block_tokens
        neighbour = random_tokens(cached, 21)
        other = rig.tensor(rig.frames(2))
        segments = [Segment(other, 0, 21), Segment(shared, start, 90)]
        logits = rig.forward([*neighbour, *tokens[start:]], segments, range(21, 21 + 90 - start))
        assert torch.equal(logits, whole[start:])
        assert torch.equal(shared.kv[:80], kv)


def test_recycled_memory_may_hold_anything(rig):
    tokens = random_tokens(10, 37)
    clean = rig.logits(rig.tensor(rig.frames(3)), tokens, cuts=[20])
    frames = rig.frames(3)
    dirty = rig.tensor(frames)
    dirty.kv[:48].fill_(float("nan"))
    assert torch.equal(rig.logits(dirty, tokens, cuts=[20]), clean)


def test_padding_writes_nothing(rig):
    tensor = rig.tensor(rig.frames(2))
    tensor.kv[:32].fill_(3.0)
    rig.forward([1, 2, 3], [Segment(tensor, 0, 3)], [])
    written = (tensor.kv[:32] != 3.0).flatten(1).any(dim=1)
    assert written[:16].all(), "three tokens and the zeroed rest of their tile"
    assert not written[16:].any()
    assert not tensor.kv[3:16].any()
