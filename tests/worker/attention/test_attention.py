"""The ways to compute attention and to lay out KV give one answer, and a GPU's way is one call a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engines.extent_reference import extent_reference
from benchmarks.engines.varlen_reference import alone_reference, varlen_reference
from prefixd.worker.attention import flex_attention, split_prefix
from prefixd.worker.attention.attention import AttentionBackend
from prefixd.worker.attention.choice import backend_choice
from prefixd.worker.attention.choice.backend_choice import choose_attention
from prefixd.worker.attention.choice.cost_table import read_costs
from prefixd.worker.attention.choice.pass_plan import CheapestPlan, PassPlan, plain, split_long
from prefixd.worker.attention.extent_attention import ExtentAttention
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.attention.flex_attention import FlexAttention, check_reach
from prefixd.worker.attention.kernels.flash_kernels import find_kernel
from prefixd.worker.attention.tile_attention import TileAttention
from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker.memory.virtual_kv import VirtualStep
from prefixd.worker.spec.model_spec import ModelSpec, read_model_spec
from prefixd.worker_protocol.errors import ModelError
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.group_shape import KvGeometry


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, count).tolist()


@pytest.fixture(scope="session")
def reference(llama_directory: Path) -> Callable[[list[int]], torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(llama_directory, attn_implementation="eager")

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    return logits


@pytest.fixture(params=["token", "layer"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["virtual", "paged"])
def kv(request: pytest.FixtureRequest) -> str:
    return request.param


def on_a_gpu(kv: str) -> AttentionBackend:
    """The backend of a GPU, with a stand-in for its kernel."""
    return ExtentAttention(extent_reference) if kv == "paged" else FlashAttention(varlen_reference)


def check_against(rig, reference: Callable[[list[int]], torch.Tensor]) -> None:
    """A prompt in pieces and token by token, then several requests in one pass that share a prefix."""
    tokens = random_tokens(5, 70)
    whole = rig.tensor(rig.frames(5))
    ours = rig.logits(whole, tokens, cuts=[16, 37, 48, 60, *range(61, 70)])
    torch.testing.assert_close(ours, reference(tokens), rtol=1e-4, atol=1e-4)
    prompts = [tokens[:48] + random_tokens(seed, length) for seed, length in ((1, 5), (2, 33), (4, 1))]
    shared = [rig.tensor([*rig.frames_of(whole)[:3], *rig.frames(rig.blocks(len(p)) - 3)]) for p in prompts]
    other = random_tokens(9, 21)
    segments = [Segment(t, 48, len(p)) for t, p in zip(shared, prompts, strict=True)]
    segments.append(Segment(rig.tensor(rig.frames(2)), 0, 21))
    flat = [token for prompt in prompts for token in prompt[48:]] + other
    theirs = torch.cat([*(reference(prompt)[48:] for prompt in prompts), reference(other)])
    torch.testing.assert_close(rig.forward(flat, segments, range(len(flat))), theirs, rtol=1e-4, atol=1e-4)


def test_flash_attention_reads_every_memory_and_layout(rig_with, reference, kv, layout):
    check_against(rig_with(on_a_gpu(kv), kv, layout), reference)


def test_tiles_read_every_memory_and_layout_with_the_same_bits(rig_with, reference, kv, layout):
    rig = rig_with(None, kv, layout)
    check_against(rig, reference)
    tokens = random_tokens(6, 90)
    whole = rig.logits(rig.tensor(rig.frames(6)), tokens, cuts=[])
    assert torch.equal(rig.logits(rig.tensor(rig.frames(6)), tokens, cuts=[20, 21, 50]), whole)
    virtual = rig_with(None)
    assert torch.equal(virtual.logits(virtual.tensor(virtual.frames(6)), tokens, cuts=[33]), whole)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_one_call_a_layer_whatever_is_in_the_batch(rig_with, kv, batch):
    backend = on_a_gpu(kv)
    rig = rig_with(backend, kv)
    requests = [rig.start(random_tokens(seed, 3 + 9 * seed), max_tokens=3) for seed in range(batch)]
    rig.run()
    assert backend.calls == rig.model.spec.geometry.layers * len(rig.steps)
    alone = rig_with(None)
    for seed, request in enumerate(requests):
        assert rig.tokens[request] == alone.generate(random_tokens(seed, 3 + 9 * seed), max_tokens=3)


def test_the_setting_chooses_the_plan(llama_directory, monkeypatch):
    spec = read_model_spec(WorkerSettings(model=str(llama_directory), chunk_bytes=4096))
    assert isinstance(backend_choice._flash(spec, varlen_reference, spec.geometry).plan, CheapestPlan)
    by_setting = {"plain": plain, "split": split_long}
    for way, plan in by_setting.items():
        asked = dataclasses.replace(spec, attention_way=way)
        assert backend_choice._flash(asked, varlen_reference, spec.geometry).plan is plan
    monkeypatch.setattr(backend_choice, "why_no_lse", lambda *_: "the kernel returns none")
    with pytest.raises(ModelError, match=r'worker.attention = "split".*the kernel returns none.*"auto" or "plain"'):
        backend_choice._flash(asked, varlen_reference, spec.geometry)
    assert isinstance(backend_choice._flash(spec, varlen_reference, spec.geometry).plan, CheapestPlan)


def test_the_log_says_when_the_costs_are_those_of_another_gpu(llama_directory, monkeypatch, tmp_path):
    spec = read_model_spec(WorkerSettings(model=str(llama_directory), chunk_bytes=4096))
    own = tmp_path / "own.json"
    own.write_bytes(msgspec.json.encode(read_costs("NVIDIA H200")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpu, file, line in (
        ("NVIDIA A100", "", "costs of NVIDIA H100 80GB HBM3, not of this NVIDIA A100: there are none"),
        ("NVIDIA A100", str(own), "costs of NVIDIA H200, not of this NVIDIA A100: by worker.attention_costs"),
        ("NVIDIA H200", str(own), ""),
        ("NVIDIA H200", "", ""),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, gpu=gpu: gpu)
        said: list[str] = []
        asked = dataclasses.replace(spec, attention_costs=file)
        backend_choice._flash(asked, varlen_reference, spec.geometry, said.append)
        found = [each for each in said if "costs of" in each]
        assert len(found) == bool(line) and all(line in each for each in found)


def test_planned_passes_generate_the_same_tokens(rig_with, monkeypatch):
    monkeypatch.setattr(split_prefix, "PIECE_MULTIPLE", 16)
    used = set()

    def plan(queries: Sequence[int], keys: Sequence[int], captured: bool = False) -> PassPlan:
        """Prompts with a prefix are split or alone, every other one; decodes apart, every third of them split."""
        ways = {"together": [], "decodes": [], "alone": [], "split": []}
        for number, (count, last) in enumerate(zip(queries, keys, strict=True)):
            behind = "split" if number % 2 else "alone"
            way = ("split" if last % 3 == 0 else "decodes") if count == 1 else behind if last > count else "together"
            ways[way].append(number)
        used.add(frozenset(way for way, numbers in ways.items() if numbers))
        return PassPlan(**{way: tuple(numbers) for way, numbers in ways.items()}, pieces=3)

    prompts = [random_tokens(seed, length) for seed, length in enumerate((90, 7, 130, 40))]
    alone = rig_with(None)
    expected = [alone.generate(each, max_tokens=6) for each in prompts]
    rig = rig_with(FlashAttention(varlen_reference, plan, alone_reference))
    requests = [rig.start(each, max_tokens=6) for each in prompts]
    rig.run()
    assert [rig.tokens[request] for request in requests] == expected
    assert {way for ways in used for way in ways} == {"together", "decodes", "alone", "split"}


def test_flash_attention_never_reads_behind_the_last_token(rig_with, reference, kv):
    """So recycled memory may hold anything there, and a GPU needs no scrubbing."""
    rig = rig_with(on_a_gpu(kv), kv)
    tokens = random_tokens(10, 37)
    for frame in (frames := rig.frames(3)):
        rig.window(frame).fill_(float("nan"))
    logits = rig.logits(rig.tensor(frames), tokens, cuts=[20])
    torch.testing.assert_close(logits, reference(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rows_of_a_call", ["all", 1, 2])
@pytest.mark.slow
def test_flex_attention_masks_all_but_each_sequences_own_keys(rig_with, reference, monkeypatch, rows_of_a_call):
    """Computed without its kernel, which reads all keys: so every row is mapped here, to the last block."""
    rig = rig_with(FlexAttention(16, compiled=False))
    if rows_of_a_call != "all":
        row = rig.manager.virtual.kv[0].numel()
        monkeypatch.setattr(flex_attention, "_MOST_ELEMENTS", rows_of_a_call * row)
    zero = rig.frames(1)
    rig.window(zero[0]).zero_()
    for row in rig.manager.virtual.rows:
        rig.manager.virtual.map(row, 0, zero * rig.manager.virtual.blocks)
    check_against(rig, reference)


def test_flex_attention_names_only_the_blocks_that_are_needed(rig_with):
    segments = [Segment(None, 28, 63), Segment(None, 33, 34), Segment(None, 0, 1)]
    step = FlexAttention(16, compiled=False).begin(VirtualStep(torch.empty(8, 64, 1, 2, 2, 16), segments, [1, 4, 0]))
    (part,) = step.parts
    mask = part.mask(None)
    assert mask.kv_num_blocks.tolist() == [[[4, 8]]], "two blocks of queries, of 32"
    named = mask.kv_indices[0, 0].tolist()
    assert named[0][:4] == [4, 5, 6, 7]
    assert sorted(named[1][:8]) == [0, 4, 5, 6, 7, 16, 17, 18]
    windowed = part.mask(10)
    assert windowed.kv_num_blocks.tolist() == [[[3, 4]]]
    named = windowed.kv_indices[0, 0].tolist()
    assert named[0][:3] == [5, 6, 7], "query 28 of the row sees keys from 19 on"
    assert sorted(named[1][:4]) == [0, 7, 17, 18]
    rows = list(range(8)) * 3
    decoding = FlexAttention(16, compiled=False).begin(
        VirtualStep(torch.empty(8, 64, 1, 2, 2, 16), [Segment(None, 8, 9)] * 24, rows)
    )
    assert decoding.parts[0].mask(None).kv_num_blocks.tolist() == [[[8, 8]]], "16 queries, of 8 rows, then 8"
    with pytest.raises(ModelError, match="multiple of 16 tokens, not of 24"):
        FlexAttention(24)


def test_flex_attention_reaches_each_row_within_32_bits_of_the_first_of_a_call():
    """The kernel's offsets are so wide: 64 rows of 32 Ki tokens in the layout "token" are 64 times as much."""
    kv = torch.empty((64, 32 << 10, 32, 2, 8, 128), device="meta")
    segments = [Segment(None, 8, 10), Segment(None, 0, 5), Segment(None, 3, 4)]
    step = FlexAttention(16, compiled=False).begin(VirtualStep(kv, segments, [63, 7, 8]))
    assert [(part.first_key, part.keys, part.queries) for part in step.parts] == [
        (63 * 32768, 32768, slice(0, 2)),
        (7 * 32768, 32768, slice(2, 7)),
        (8 * 32768, 32768, slice(7, 8)),
    ]
    assert step.parts[1].mask(None).seq_lengths == (5, 32768)
    narrow = torch.empty((64, 16 << 10, 32, 2, 8, 128), device="meta")
    step = FlexAttention(16, compiled=False).begin(VirtualStep(narrow, segments, [63, 7, 8]))
    assert [(part.first_key, part.keys, part.queries) for part in step.parts] == [
        (63 * 16384, 16384, slice(0, 2)),
        (7 * 16384, 2 * 16384, slice(2, 8)),
    ]


def test_flex_attention_refuses_sequences_that_it_does_not_reach():
    wide = KvGeometry(32, 8, 128, "float32", 16)
    check_reach(wide, 32 << 10)
    with pytest.raises(ModelError, match=r"reaches 32768 tokens, 65536 numbers apart.*max_model_tokens.*layout"):
        check_reach(wide, (32 << 10) + 16)
    with pytest.raises(ModelError, match="reaches 16384 tokens, 131072 numbers apart"):
        check_reach(dataclasses.replace(wide, token_stride=512 << 10), 32 << 10)
    by_layer = KvGeometry(32, 8, 128, "float32", 16, "layer")
    check_reach(by_layer, 1 << 20)
    with pytest.raises(ModelError, match=r"reaches 1048576 tokens, 2048 numbers apart") as refused:
        check_reach(by_layer, 1 << 21)
    assert "layout" not in str(refused.value)


def test_flex_attention_makes_a_pass_without_waiting_for_the_device(monkeypatch):
    """A meta tensor has no numbers to read back, and a copy from pageable memory to a GPU waits for its stream."""
    make = torch.tensor

    def on_the_host(*arguments, **keywords):
        assert keywords.get("device") is None, "by to_device, from pinned memory"
        return make(*arguments, **keywords)

    kv = torch.empty((4, 64, 1, 2, 2, 16), device="meta")
    segments = [Segment(None, 3, 20), Segment(None, 0, 5)]
    monkeypatch.setattr(torch, "tensor", on_the_host)
    step = FlexAttention(16, compiled=False).begin(VirtualStep(kv, segments, [2, 0]))
    mask = step.parts[0].mask(None)
    assert mask.kv_indices.device.type == "meta"
    assert mask.seq_lengths == (22, 4 * 64)


def test_flex_attention_refuses_block_tables(rig_with):
    rig = rig_with(FlexAttention(16, compiled=False), "paged")
    with pytest.raises(ModelError, match=r'set worker.kv to "virtual"'):
        rig.logits(rig.tensor(rig.frames(1)), [1, 2, 3], cuts=[])


def test_a_kernel_is_chosen_by_device_type_and_shape():
    assert find_kernel(64, torch.bfloat16, torch.device("cpu")) is None
    assert find_kernel(64, torch.float32, torch.device("cuda")) is None
    assert find_kernel(300, torch.float16, torch.device("cuda")) is None
    assert find_kernel(60, torch.float16, torch.device("cuda")) is None


def test_a_pass_looks_for_keys_as_far_as_its_longest_sequence_reaches():
    kv = torch.zeros((4, 64, 1, 2, 2, 16))
    step = VirtualStep(kv, [Segment(None, 3, 20), Segment(None, 0, 5)], [2, 0])
    assert step.varlen_arguments()[1]["max_k"] == 20


def test_a_paged_worker_without_a_kernel_for_block_tables_is_refused_at_the_start(llama_directory):
    spec = read_model_spec(WorkerSettings(model=str(llama_directory), chunk_bytes=4096))
    assert isinstance(choose_attention(spec, paged=True), TileAttention)
    on_a_gpu = dataclasses.replace(spec, device=torch.device("cuda"))
    with pytest.raises(ModelError, match=r'worker.kv = "paged" needs the kernel in Triton, and .*; set worker.kv to'):
        choose_attention(on_a_gpu, paged=True)
    asked = dataclasses.replace(on_a_gpu, attention_way="triton")
    with pytest.raises(
        ModelError, match=r'worker.attention = "triton" needs the kernel in Triton, .*; set it to "auto"'
    ):
        choose_attention(asked)


def test_a_gpus_backend_is_chosen_by_what_the_layers_ask_for(llama_directory, monkeypatch):
    monkeypatch.setattr(backend_choice, "find_kernel", lambda *_: varlen_reference)
    monkeypatch.setattr(backend_choice, "find_extent_kernel", lambda *_: (extent_reference, ""))
    spec = read_model_spec(WorkerSettings(model=str(llama_directory), chunk_bytes=4096, attention="plain"))
    on_a_gpu = dataclasses.replace(spec, device=torch.device("cuda"))

    def asking(spec: ModelSpec, **asked: Any) -> ModelSpec:
        """The model with a second layer that asks for more."""
        layers = list(spec.attention)
        layers[1] = dataclasses.replace(layers[1], **asked)
        return dataclasses.replace(spec, attention=tuple(layers))

    assert isinstance(choose_attention(asking(on_a_gpu, window=16)), FlashAttention)
    capped = asking(on_a_gpu, window=16, softcap=50.0)
    assert isinstance(choose_attention(capped), ExtentAttention)
    assert isinstance(choose_attention(capped, paged=True), ExtentAttention)
    for way, backend in (("triton", ExtentAttention), ("flex", FlexAttention)):
        assert isinstance(choose_attention(dataclasses.replace(on_a_gpu, attention_way=way)), backend)
    monkeypatch.setattr(backend_choice, "find_extent_kernel", lambda *_: (None, "Triton is not installed"))
    said: list[str] = []
    assert isinstance(choose_attention(capped, note=said.append), FlexAttention)
    assert said == ["attention by FlexAttention, which is slower: Triton is not installed"]
    with pytest.raises(ModelError, match=r"expanded from latents.*set worker.device to cpu"):
        choose_attention(asking(on_a_gpu, expanded=True))
    tiles = choose_attention(asking(spec, expanded=True))
    assert isinstance(tiles, TileAttention)
    assert [tiles.expands(layer) for layer in range(3)] == [False, True, False]
