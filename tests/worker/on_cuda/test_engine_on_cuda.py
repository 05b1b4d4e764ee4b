"""The engine on CUDA memory.

With a GPU the model runs there too. Against the stand-in driver (`tests/swap/test_cuda_stand_in.py`) it runs on the
CPU over what the driver maps. A GPU's kernels sum in another order for every shape, so logits are compared within a
tolerance here; the CPU's tests compare bits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from prefixd.worker.graphs.captured import CapturedStep, GraphCapture, Span
from prefixd.worker.graphs.decode_graphs import DecodeGraphs
from prefixd.worker.graphs.pass_graphs import PassGraphs
from prefixd.worker.graphs.prompt_graphs import PromptGraphs
from prefixd.worker.load_graphs import capture
from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker.model import load_model
from prefixd.worker.readiness import Readiness
from prefixd.worker.spec.kv_groups import CUDA_CHUNK_BYTES
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.protocol import Cancel, Note
from prefixd.worker_protocol.worker_settings import WorkerSettings

STAND_IN = "PREFIXD_TEST_STAND_IN" in os.environ
DEVICE = "cpu" if STAND_IN else "cuda"
VOCAB = 96
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not STAND_IN and not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]

Make = Callable[..., object]


@pytest.fixture
def make(wide_llama_directory: Path, rig_type: type) -> Iterator[Make]:
    rigs = []

    def make(dtype: str = "float32", layout: str = "token", frames: int = 40, max_step_tokens: int = 64) -> object:
        settings = WorkerSettings(
            model=str(wide_llama_directory), device=DEVICE, dtype=dtype, layout=layout, chunk_bytes=CUDA_CHUNK_BYTES
        )
        rigs.append(rig_type(load_model(read_model_spec(settings)), frames, max_step_tokens, device="cuda"))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, count).tolist()


def reference_logits(directory: Path, tokens: list[int], dtype: str) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=getattr(torch, dtype))
    with torch.inference_mode():
        return model.to(DEVICE)(input_ids=torch.tensor([tokens], device=DEVICE), use_cache=False).logits[0].float()


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, dtype: str) -> None:
    assert ours.shape == theirs.shape
    error = float((ours.float() - theirs).norm() / theirs.norm())
    assert error <= TOLERANCE[dtype], f"relative error {error:.2g}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batched_prompts_match_transformers(make: Make, wide_llama_directory: Path, dtype: str) -> None:
    rig = make(dtype)
    prompts = [random_tokens(seed, length) for seed, length in ((1, 5), (2, 33), (3, 100), (4, 1))]
    tensors = [rig.tensor(rig.frames(rig.blocks(len(prompt)))) for prompt in prompts]
    segments = [Segment(t, 0, len(p)) for t, p in zip(tensors, prompts, strict=True)]
    flat = [token for prompt in prompts for token in prompt]
    ours = rig.forward(flat, segments, range(len(flat)))
    theirs = torch.cat([reference_logits(wide_llama_directory, prompt, dtype) for prompt in prompts])
    assert_near(ours, theirs, dtype)


@pytest.mark.parametrize(("dtype", "layout"), [("float32", "token"), ("float32", "layer"), ("bfloat16", "token")])
def test_chunks_and_single_tokens_match_transformers(
    make: Make, wide_llama_directory: Path, dtype: str, layout: str
) -> None:
    rig = make(dtype, layout, frames=8)
    tokens = random_tokens(5, 100)
    ours = rig.logits(rig.tensor(rig.frames(rig.blocks(100))), tokens, cuts=[16, 37, 64, *range(90, 100)])
    assert_near(ours, reference_logits(wide_llama_directory, tokens, dtype), dtype)


@pytest.mark.parametrize(("layout", "length"), [("token", 100), ("layer", 300)])
def test_a_mapped_prefix_gives_the_same_tokens_and_is_not_computed_again(make: Make, layout: str, length: int) -> None:
    rig = make(layout=layout, frames=40 if layout == "token" else 6)
    prompt = random_tokens(6, length)
    cached, blocks = length // rig.block_tokens, rig.blocks(length + 8)
    assert cached
    frames = rig.frames(blocks)
    expected = rig.generate(prompt, frames=frames, temperature=1.0)
    assert len(set(expected)) > 1
    rig.steps.clear()
    shared = [*frames[:cached], *rig.frames(blocks - cached)]
    assert rig.generate(prompt, frames=shared, cached_blocks=cached, temperature=1.0) == expected
    assert sum(step.computed_tokens for step in rig.steps) == length + 7 - cached * rig.block_tokens


@pytest.mark.real_gpu
@pytest.mark.parametrize("way", ["auto", "extents"])
def test_block_tables_generate_what_virtual_tensors_do(wide_llama_directory: Path, rig_type: type, way: str) -> None:
    """A prefix is shared by its frames, in whatever order they lie."""
    prefix = random_tokens(8, 64)
    prompts = [[*prefix, *random_tokens(seed, 20)] for seed in (1, 2, 3)]
    found = {}
    for kv, attention in (("virtual", "auto"), ("paged", way)):
        settings = WorkerSettings(
            model=str(wide_llama_directory),
            device=DEVICE,
            dtype="float32",
            chunk_bytes=CUDA_CHUNK_BYTES,
            kv=kv,
            attention=attention,
        )
        rig = rig_type(load_model(read_model_spec(settings), paged=kv == "paged"), 40, device="cuda", kv=kv)
        try:
            shared = rig.frames(rig.blocks(64))
            rig.generate(prompts[0], frames=[*shared, *rig.frames(2)])
            requests = [
                rig.start(prompt, frames=[*shared, *rig.frames(2)[::-1]], cached_blocks=len(shared), temperature=0.0)
                for prompt in prompts
            ]
            rig.run()
            found[kv] = [rig.tokens[request] for request in requests]
        finally:
            rig.close()
    assert found["paged"] == found["virtual"]


def test_two_requests_on_one_prefix_at_once_generate_what_they_generate_alone(make: Make) -> None:
    rig = make()
    prefix = random_tokens(7, 64)
    prompts = [[*prefix, *random_tokens(seed, 20)] for seed in (1, 2)]
    frames = rig.frames(6)
    alone = [rig.generate(prompts[0], frames=frames, temperature=1.0), rig.generate(prompts[1], temperature=1.0)]
    cached = 64 // rig.block_tokens
    requests = [
        rig.start(prompt, frames=[*frames[:cached], *rig.frames(2)], cached_blocks=cached, temperature=1.0)
        for prompt in prompts
    ]
    rig.run()
    assert [rig.tokens[request] for request in requests] == alone


def test_recycled_memory_may_hold_anything(make: Make) -> None:
    rig = make()
    tokens = random_tokens(10, 37)
    clean = rig.logits(rig.tensor(rig.frames(3)), tokens, cuts=[20]).float()
    dirty = rig.tensor(rig.frames(3))
    dirty.kv[: 3 * rig.block_tokens].fill_(float("nan"))
    assert_near(rig.logits(dirty, tokens, cuts=[20]), clean, "float32")


def test_a_request_cancelled_in_its_prompt_leaves_its_frames_to_the_next(make: Make) -> None:
    rig = make(max_step_tokens=32)
    prompt = random_tokens(11, 100)
    expected = rig.generate(prompt, temperature=1.0)
    frames = rig.frames(7)
    request = rig.start(random_tokens(12, 100), frames=frames)
    rig.step()
    rig.take(rig.engine.cancel(Cancel(request)))
    rig.take(rig.engine.poll(wait=True))
    assert rig.done[request].reason == "cancelled"
    assert [rig.manager.physical.references(frame) for frame in frames] == [0] * 7
    assert rig.generate(prompt, frames=frames, temperature=1.0) == expected


@pytest.mark.real_gpu
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_graph_comes_to_the_logits_of_a_pass_without_it(make: Make, size: int) -> None:
    """Over the rows that requests have by then: the graphs were captured at load, on scratch memory."""
    rig = make("bfloat16", frames=40)
    graphs = DecodeGraphs(rig.manager.kv, rig.model.captured, 8, pytest.fail)
    said: list[Note] = []
    capture([graphs], rig.model, rig.kv, 60.0, Readiness(said.append), time.monotonic)
    assert graphs.captured_sizes == [1, 2, 4, 8] and said[-1].text.startswith("captured 4 of 4 CUDA graphs")
    rows = []
    for seed in range(size):
        tokens = random_tokens(seed, 20 + 7 * seed)
        tensor = rig.tensor(rig.frames(rig.blocks(len(tokens) + 2)))
        rig.logits(tensor, tokens, cuts=[])
        rows.append((tensor, len(tokens)))
    for order in (rows, rows[::-1], [rows[-1]] * size):
        tokens, lengths = list(range(3, 3 + size)), [length for _, length in order]
        segments = [Segment(tensor, length, length + 1) for tensor, length in order]
        if len({id(tensor) for tensor, _ in order}) < size:
            tokens = [3] * size  # all write the same, as those do with which a graph is filled up
        expected = rig.forward(tokens, segments, range(size)).float()
        assert_near(graphs.run(tokens, [tensor.row for tensor, _ in order], lengths), expected, "bfloat16")
    assert graphs.replays == 3


@pytest.mark.real_gpu
def test_prompts_in_a_graph_come_to_the_logits_of_a_pass_without_it(make: Make) -> None:
    """Two prompts behind prefixes and a request that decodes, in one pass of less tokens than its graph."""
    rig = make("bfloat16", frames=40)
    graphs = PromptGraphs(rig.manager.kv, rig.model.captured, pytest.fail, GraphCapture())
    capture([graphs], rig.model, rig.kv, 60.0, Readiness(lambda message: None), time.monotonic)
    assert len(graphs.captured_sizes) == graphs.most_graphs
    for lengths in ([(20, 33), (7, 5), (40, 1)], [(0, 100)], [(30, 2)]):
        tensors = [rig.tensor(rig.frames(rig.blocks(before + new))) for before, new in lengths]
        tokens = []
        for seed, (tensor, (before, new)) in enumerate(zip(tensors, lengths, strict=True)):
            whole = random_tokens(seed, before + new)
            if before:
                rig.logits(tensor, whole[:before], cuts=[])
            tokens += whole[before:]
        parts = list(zip(tensors, lengths, strict=True))
        segments = [Segment(tensor, before, before + new) for tensor, (before, new) in parts]
        wanted = (np.cumsum([new for _, new in lengths]) - 1).tolist()
        expected = rig.forward(tokens, segments, wanted).float()
        spans = [Span(tensor.row, before, new) for tensor, (before, new) in parts]
        assert_near(graphs.run(tokens, spans, wanted), expected, "bfloat16")
    assert graphs.replays == 3


@pytest.mark.real_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_operators_come_to_the_logits_of_the_models_own(make: Make, dtype: str) -> None:
    """Compiled for the device; in passes of several sizes, and in a graph, which holds what is compiled by then."""
    rig = make(dtype, frames=40)
    tokens, cuts = random_tokens(1, 100), [1, 2, 40, 41]
    expected = rig.logits(rig.tensor(rig.frames(rig.blocks(100))), tokens, cuts=cuts).float()
    rig.model.rewrite("fused")
    try:
        assert rig.model.operators.operators == "fused"
        tensor = rig.tensor(rig.frames(rig.blocks(101)))
        assert_near(rig.logits(tensor, tokens, cuts=cuts), expected, dtype)
        if dtype == "bfloat16":
            last = rig.forward([3], [Segment(tensor, 100, 101)], [0]).float()
            graphs = DecodeGraphs(rig.manager.kv, rig.model.captured, 2, pytest.fail)
            for _ in range(2):
                assert_near(graphs.run([3], [tensor.row], [100]), last, dtype)
            assert graphs.replays == 1
    finally:
        rig.model.rewrite("model")


@pytest.mark.real_gpu
def test_a_mixture_of_experts_comes_to_its_logits_with_graphs_or_goes_on_without(
    rig_type: type, tmp_path: Path
) -> None:
    """Which experts compute differs from pass to pass, and a graph holds what it was captured with."""
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        num_local_experts=4,
        max_position_embeddings=256,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    settings = WorkerSettings(model=str(tmp_path), device=DEVICE, dtype="bfloat16", chunk_bytes=CUDA_CHUNK_BYTES)
    rig = rig_type(load_model(read_model_spec(settings)), 16, 64, device="cuda")
    try:
        tensor = rig.tensor(rig.frames(rig.blocks(80)))
        rig.logits(tensor, random_tokens(1, 50), cuts=[])
        said: list[str] = []
        graphs = DecodeGraphs(rig.manager.kv, rig.model.captured, 8, said.append)
        for position, token in enumerate(random_tokens(2, 30), start=50):
            expected = rig.forward([token], [Segment(tensor, position, position + 1)], [0]).float()
            if graphs.fits([position]):
                assert_near(graphs.run([token], [tensor.row], [position]), expected, "bfloat16")
        assert graphs.replays == 29 or "cannot be captured" in said[0]
    finally:
        rig.close()


@pytest.mark.real_gpu
def test_a_model_that_waits_for_the_device_in_a_pass_is_computed_without_graphs(make: Make) -> None:
    rig = make("bfloat16")

    def waiting(step: CapturedStep) -> torch.Tensor:
        assert step.tokens.sum().item() >= 0
        return rig.model.captured(step)

    prompt = random_tokens(1, 50)
    expected = rig.generate(prompt, temperature=0.0)
    said: list[str] = []
    graphs = DecodeGraphs(rig.manager.kv, waiting, 8, said.append)
    rig.engine._graphs = PassGraphs(graphs)
    rig.generate(prompt, temperature=0.0)
    assert len(said) == 1 and "a decode pass of 1 cannot be captured" in said[0] and not graphs.replays
    assert rig.generate(prompt, temperature=0.0) == expected, "and the device is as it was"
