"""Models whose layers keep different things, through the engine: against transformers, and on what is cached."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engines.varlen_reference import varlen_reference
from prefixd.base.rules.rules import ChunkedWindow, RecurrentState, SlidingWindow
from prefixd.base.sampling import BeamSearch
from prefixd.worker.attention.attention import GroupedAttention
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.memory.frame_window import Pages
from prefixd.worker.memory.grouped_kv import places
from prefixd.worker.memory.paged_kv import PagedKv
from prefixd.worker.model import CausalModel, load_model
from prefixd.worker.recurrent import StateLayout, StateShape
from prefixd.worker.spec.kv_groups import CUDA_CHUNK_BYTES, READ_BLOCK, KvGroups, plan_groups
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker.spec.probe import PROBE_NAME, AttentionLayer, probe, register_probe
from prefixd.worker.spec.tiles import first_key, tile_tokens
from prefixd.worker_protocol.errors import ModelError
from prefixd.worker_protocol.protocol import KeptState, Need, StateFrames, blocks_needed, passed_blocks
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.errors import OutOfMemoryError
from prefixd_swap.vmem import FrameId
from tests.slow import slow_but
from tests.worker.conftest import Rig
from tests.worker.tiny_models import GROUP_SIZES, LATENT, RECURRENT, WINDOW, WINDOWED, build_grouped, tiny_config

BLOCK = 16
PROMPT = 7 * BLOCK + 5
NEW = 2 * BLOCK
RUN = [name for name in (*WINDOWED, *LATENT, *RECURRENT) if name != "zamba2"]
FAST = ["gemma3_text", "gpt_oss", "llama4_text", "deepseek_v2", "jamba"]
"""Windows, sinks, chunks, latents and states: `make test` runs these, `make test-all` all."""
# Where a row's bits do not depend on how its prompt was cut: experts of qwen3_next take whole batches.
LOGPROBS = 2e-3


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def save(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        build_grouped(name).save_pretrained(directory)
        return directory

    return save


@pytest.fixture(scope="module")
def model_of(directory_of: Callable[[str], Path]) -> Callable[[str], CausalModel]:
    @cache
    def load(name: str) -> CausalModel:
        return load_model(read_model_spec(WorkerSettings(model=str(directory_of(name)), block_tokens=BLOCK)))

    return load


@pytest.fixture(params=slow_but(FAST, RUN))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kv() -> str:
    """Virtual tensors; tests of block tables say so."""
    return "virtual"


@pytest.fixture
def rig(name: str, kv: str, model_of: Callable[[str], CausalModel]) -> Iterator[Rig]:
    model = model_of(name)
    spec = model.spec
    rig = Rig(model, frames=48 * spec.block_frames + 24 * spec.state_frames, max_step_tokens=40, kv=kv)
    for frame in range(rig.pool.capacity):  # what was never written must not be read
        content(rig, frame).fill_(0xFF)
    yield rig
    rig.close()


def prompt_of(seed: int, tokens: int = PROMPT) -> list[int]:
    return np.random.default_rng(seed).integers(3, 90, tokens).tolist()


class Cached:
    """A request that ran, and the frames that it left: those of its blocks, and its states."""

    def __init__(self, rig: Rig, prompt: list[int], keep: tuple[int, ...] = (), **arguments: Any) -> None:
        spec = rig.model.spec
        self.rig, self.prompt = rig, prompt
        self.frames = rig.frames(rig.blocks(len(prompt) + NEW) * rig.block_frames)
        self.states = {blocks: rig.state_frames() for blocks in keep}
        self.tail = rig.state_frames()
        state = None
        if spec.state_frames:
            kept = [KeptState(blocks, frames) for blocks, frames in self.states.items()]
            state = StateFrames(own=rig.state_frames(), keep=kept, tail=self.tail)
        arguments = {"max_tokens": NEW, "logprobs": 1, **arguments}
        self.id = rig.start(prompt, frames=self.frames, state=state, **arguments)

    @property
    def tokens(self) -> list[int]:
        return self.rig.tokens[self.id]

    @property
    def logprobs(self) -> list[float]:
        return logprobs(self.rig, self.id)

    def prefix(self, blocks: int) -> list[int]:
        """The frames of the first blocks; -1 where the groups' rules need nothing."""
        groups = self.rig.model.spec.groups
        frames = []
        for block in range(blocks):
            first = block * groups.block_slots
            for group in groups.attention:
                passed, slots = passed_blocks(group.shape, blocks * BLOCK, BLOCK, 0), groups.slots(group)
                frames += [-1] * slots if block < passed else self.frames[first : first + slots]
                first += slots
        return frames

    def resume(self, blocks: int, state: list[int] | None = None, prompt: list[int] | None = None) -> int:
        """A second request on the first blocks of this one."""
        rig, spec = self.rig, self.rig.model.spec
        prompt = prompt or self.prompt
        fresh = rig.frames((rig.blocks(len(prompt) + NEW) - blocks) * rig.block_frames)
        frames = None
        if spec.state_frames:
            frames = StateFrames(own=rig.state_frames(), resume=state or self.states[blocks])
        return rig.start(prompt, [*self.prefix(blocks), *fresh], blocks, state=frames, max_tokens=NEW, logprobs=1)


def logprobs(rig: Rig, request: int) -> list[float]:
    return [
        each.chosen for step in rig.steps for update in step.updates if update.id == request for each in update.logprobs
    ]


def steady(name: str) -> bool:
    """Whether the worker promises equal bits."""
    return name != "qwen3_next"


def test_tokens_are_those_of_transformers(name: str, rig: Rig) -> None:
    """Three requests side by side, cut into passes of 40 tokens."""
    reference = build_grouped(name)
    reference.set_attn_implementation("eager")
    requests = [Cached(rig, prompt_of(seed, PROMPT - 20 * seed)) for seed in range(3)]
    rig.run()
    for request in requests:
        tokens = torch.tensor([request.prompt + request.tokens])
        with torch.inference_mode():
            logits = reference(input_ids=tokens, use_cache=False).logits[0, len(request.prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(request.tokens)[:, None])[:, 0]
        assert torch.allclose(chosen, torch.tensor(request.logprobs), atol=LOGPROBS)
        best = expected.max(-1).values
        assert (best - chosen).max() < LOGPROBS, "greedy"


def test_a_hit_changes_nothing(name: str, rig: Rig) -> None:
    first = Cached(rig, prompt_of(1), keep=(2, 5))
    rig.run()
    for blocks in (2, 5):
        again = first.resume(blocks)
        other = first.resume(blocks, prompt=first.prompt[: blocks * BLOCK] + prompt_of(2, 30))
        rig.run()
        assert rig.tokens[again] == first.tokens
        if steady(name):
            assert logprobs(rig, again) == first.logprobs
        else:
            assert logprobs(rig, again) == pytest.approx(first.logprobs, abs=LOGPROBS)
        cold = Cached(rig, first.prompt[: blocks * BLOCK] + prompt_of(2, 30))
        rig.run()
        assert rig.tokens[other] == cold.tokens, rig.done[other].detail
        rig.free([*cold.frames, *cold.tail])


def test_bytes_that_a_rule_forbids_are_not_read_and_needed_ones_are(name: str, rig: Rig) -> None:
    first = Cached(rig, prompt_of(3), keep=(5,))
    rig.run()
    needed = {frame for frame in first.prefix(5) if frame >= 0}
    for frame in set(first.frames) - needed:
        content(rig, frame).fill_(0xFF)
    again = first.resume(5)
    rig.run()
    assert rig.tokens[again] == first.tokens
    for frame in needed or first.states[5][:1]:
        numbers = content(rig, frame).view(torch.float32)
        numbers += 0.5
    changed = first.resume(5)
    rig.run()
    assert logprobs(rig, changed) != pytest.approx(logprobs(rig, again), abs=LOGPROBS)


def test_the_state_after_the_last_full_block_is_kept_as_the_output_grows(name: str, rig: Rig) -> None:
    spec = rig.model.spec
    if not spec.state_frames:
        pytest.skip("a model without a state")
    first = Cached(rig, prompt_of(4), keep=(3,))
    for _ in range(12):
        rig.step()
    assert [kept for step in rig.steps for update in step.updates for kept in update.kept] == [3]
    rig.run()
    blocks = rig.done[first.id].tail_blocks
    assert blocks == (len(first.prompt) + NEW - 1) // BLOCK
    whole = first.prompt + first.tokens
    later = first.resume(blocks, first.tail, whole + prompt_of(5, 3))
    cold = Cached(rig, whole + prompt_of(5, 3))
    rig.run()
    assert rig.tokens[later] == cold.tokens
    assert logprobs(rig, later) == pytest.approx(cold.logprobs, abs=LOGPROBS)


def test_a_pass_that_is_queued_ahead_keeps_no_state_behind_a_stop_token(name: str, rig: Rig) -> None:
    """The stop token would fill a block; the windows' memory and the tokens are those of passes one after the other."""
    stop_at = BLOCK - len(prompt_of(8)) % BLOCK
    forced = [*range(1, stop_at), 95, *range(50, 50 + NEW - stop_at)]
    arguments = {"forced_tokens": np.array(forced, "<u4").tobytes(), "stop_token_ids": (95,)}
    one = Cached(rig, prompt_of(8), **arguments)
    rig.run()
    rig.engine._ahead = True
    other = Cached(rig, prompt_of(8), **arguments)
    rig.run()
    rig.take(rig.engine.flush())
    assert other.tokens == one.tokens == forced[:stop_at]
    assert other.logprobs == one.logprobs
    assert rig.filled[other.id] == rig.filled[one.id] == (len(one.prompt) + stop_at - 1) // BLOCK
    assert rig.done[other.id].tail_blocks == rig.done[one.id].tail_blocks


def test_a_state_of_a_pass_that_failed_is_not_kept(name: str, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rig.model.spec.state_frames:
        pytest.skip("a model without a state")
    request = Cached(rig, prompt_of(7))
    while len(request.tokens) < NEW - 2:
        rig.step()
    forward = rig.model.forward
    monkeypatch.setattr(rig.model, "forward", lambda *arguments: forward(*arguments) * float("nan"))
    rig.run()
    done = rig.done[request.id]
    assert (done.reason, done.tail_blocks) == ("error", 0)


def test_a_state_for_which_there_is_no_mapping_is_not_kept_and_the_request_goes_on(
    name: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rig.model.spec.state_frames:
        pytest.skip("a model without a state")
    expected = Cached(rig, prompt_of(8))
    rig.run()
    request = Cached(rig, prompt_of(8), keep=(2, 4))
    states = rig.kv._states
    map_frames, live = states.map, len(list(states.manager.live))

    def short(frames: list[int]) -> Any:
        if frames == request.states[2]:
            raise OutOfMemoryError("no mapping left")
        return map_frames(frames)

    monkeypatch.setattr(states, "map", short)
    rig.run()
    assert request.tokens == expected.tokens
    assert [kept for step in rig.steps for update in step.updates for kept in update.kept] == [4]
    assert len(list(states.manager.live)) == live - 2, "all that was mapped is given back"


@pytest.mark.parametrize("name", ["mamba2", "jamba"], indirect=True)
def test_one_pass_keeps_a_state_after_each_of_its_blocks(name: str, model_of: Callable[[str], CausalModel]) -> None:
    """However few requests may run."""
    spec = model_of(name).spec
    rig = Rig(model_of(name), 16 * spec.block_frames + 12 * spec.state_frames, PROMPT, requests=1)
    blocks = tuple(range(1, PROMPT // BLOCK + 1))
    request = Cached(rig, prompt_of(6), keep=blocks, max_tokens=1)
    rig.run()
    assert [kept for step in rig.steps for update in step.updates for kept in update.kept] == list(blocks)
    assert rig.done[request.id].reason == "length"
    rig.close()


def test_beams_keep_their_prompt_and_let_it_go_at_their_end(name: str, rig: Rig) -> None:
    spec = rig.model.spec
    if spec.state_frames:
        pytest.skip("a model with a state")
    prompt = prompt_of(9)
    frames = rig.frames(blocks_needed(len(prompt), NEW, 2, BLOCK) * spec.block_frames)
    search = rig.start(prompt, frames=frames, max_tokens=NEW, beam_search=BeamSearch(width=2))
    rig.run()
    assert len(rig.done[search].beams[0].tokens) == NEW
    rig.kv.forget(frames)  # as when the tier shrinks
    assert not any(manager.unused.still_mapped([FrameId(frame) for frame in frames]) for manager in rig.managers)


def test_windows_give_up_what_they_leave_behind(name: str, rig: Rig) -> None:
    spec = rig.model.spec
    windows = [
        (number, group) for number, group in enumerate(spec.groups.attention) if passed_blocks(group.shape, 96, 16, 0)
    ]
    if not windows:
        pytest.skip("a model without windows")
    request = Cached(rig, prompt_of(6))
    while not rig.filled.get(request.id, 0) >= 7:
        rig.step()
    sequence = rig.engine._runs[request.id].memory
    for number, group in windows:
        passed = passed_blocks(group.shape, sequence_tokens(rig, request.id), BLOCK, spec.window_margin)
        frames = sequence.parts[number].frames
        assert passed > 0 and frames[: passed * group.frames] == (-1,) * passed * group.frames
        assert -1 not in frames[passed * group.frames :]
    rig.run()


def test_what_windows_have_passed_is_not_read_and_the_next_block_is(name: str, rig: Rig) -> None:
    """As soon as the daemon was told of tokens, it may give frames of passed blocks to others."""
    spec = rig.model.spec

    def passed(computed: int) -> list[tuple[int, range]]:
        """Of each group with a window the blocks that it has passed, and which of a block's frames are its own."""
        ends = itertools.accumulate(group.frames for group in spec.groups.attention)
        return [
            (passed_blocks(group.shape, computed, BLOCK, spec.window_margin), range(end - group.frames, end))
            for group, end in zip(spec.groups.attention, ends, strict=True)
            if group.rule is not None
        ]

    rules = [group.rule for group in spec.groups.attention if group.rule is not None]
    if not rules:
        pytest.skip("a model without windows")
    plain, spoilt = Cached(rig, prompt_of(6)), Cached(rig, prompt_of(6))
    altered = Cached(rig, prompt_of(6))
    gone: set[int] = set()
    changed_at = 0
    while rig.engine.runnable:
        rig.step()
        if spoilt.id in rig.done:
            continue
        for blocks, homes in passed(sequence_tokens(rig, spoilt.id)):
            gone |= {spoilt.frames[block * spec.block_frames + home] for block in range(blocks) for home in homes}
        for frame in gone:
            content(rig, frame).fill_(0xFF)
        computed = sequence_tokens(rig, altered.id)
        seen = rules[0].first_seen(computed) // BLOCK  # the block of the first token that the next query sees
        if not changed_at and computed > PROMPT and all(blocks == seen for blocks, _ in passed(computed)):
            for home in itertools.chain.from_iterable(homes for _, homes in passed(computed)):
                numbers = content(rig, altered.frames[seen * spec.block_frames + home]).view(torch.float32)
                numbers += 0.5
            changed_at = computed
    assert len(gone) >= rules[0].first_seen(PROMPT + NEW - 1) // BLOCK - 1
    assert spoilt.tokens == plain.tokens
    assert spoilt.logprobs == pytest.approx(plain.logprobs, rel=0, abs=0 if steady(name) else LOGPROBS)
    before = changed_at - PROMPT + 1
    assert altered.logprobs[:before] == pytest.approx(plain.logprobs[:before], rel=0, abs=LOGPROBS)
    assert altered.logprobs[before] != pytest.approx(plain.logprobs[before], rel=0, abs=LOGPROBS)


@pytest.mark.parametrize("name", ["gemma3_text", "ministral"], indirect=True)
def test_what_windows_have_passed_is_not_read_by_the_way_of_a_gpu(
    name: str, directory_of: Callable[[str], Path]
) -> None:
    """With a stand-in for the kernel, which reads from the block of keys on that a window begins in."""
    spec = read_model_spec(WorkerSettings(model=str(directory_of(name)), block_tokens=READ_BLOCK))
    model = load_model(spec)
    rig = Rig(model, frames=4 * spec.block_frames)
    expected = rig.generate(prompt_of(6), max_tokens=120)
    rig.model.attention = GroupedAttention(FlashAttention(varlen_reference))
    rig.kv._margin = replace(spec, device=torch.device("cuda")).window_margin
    frames = rig.frames(2 * spec.block_frames)
    request = rig.start(prompt_of(6), frames, max_tokens=120)
    spoilt_at = 0
    while rig.engine.runnable:
        rig.step()
        if not spoilt_at and -1 in (frames_now := [part.frames for part in rig.engine._runs[request].memory.parts])[0]:
            spoilt_at = sequence_tokens(rig, request)
            kept = {frame for part in frames_now for frame in part}
            for frame in set(frames) - kept:
                content(rig, frame).fill_(0xFF)
    assert spoilt_at == READ_BLOCK + WINDOW - 1
    assert rig.tokens[request] == expected
    rig.close()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("with_draft", [False, True], ids=["alone", "with a draft"])
def test_blocks_are_passed_as_soon_as_attention_reads_nothing_of_them(
    device: str, with_draft: bool, model_of: Callable[[str], CausalModel]
) -> None:
    """On a GPU by what is known of its kernels: they read keys in blocks that begin at multiples of `READ_BLOCK`.

    There smaller blocks are passed a little later: by `READ_BLOCK`, less a block.
    """
    spec = model_of("gemma2").spec
    for window, asked in itertools.product((1, 2, 15, 16, 17, 21, 128, 129, 200), (8, 16, 32)):
        layers = [AttentionLayer(0, 8, 8, 128), AttentionLayer(1, 8, 8, 128, window)]
        groups = plan_groups(
            layers,
            None,
            dtype="bfloat16",
            block_tokens=asked,
            layout="token",
            max_tokens=4096,
            chunk_bytes=None,
            on_cuda=device == "cuda",
        )
        each = replace(spec, groups=groups, device=torch.device(device), draft=spec if with_draft else None)
        block = groups.block_tokens
        for computed in range(1, 700):
            position = computed - 1 if with_draft else computed
            if device == "cpu":
                read = first_key(position, window, tile_tokens(block))
            else:
                read = max(0, position - (window - 1)) // READ_BLOCK * READ_BLOCK
            shape = groups.attention[1].shape
            passed = passed_blocks(shape, computed, block, each.window_margin)
            least = max(0, read - (READ_BLOCK - block)) if device == "cuda" and block < READ_BLOCK else read
            assert least // block <= passed <= read // block, (window, block, computed)
            if position % block == 0:  # where a cached prefix may end
                needed = position // block - shape.rule.blocks(block)
                assert needed <= read // block, (window, block, computed)


@pytest.mark.parametrize("kv", ["paged"])
def test_block_tables_give_the_bits_of_virtual_tensors(
    name: str, rig: Rig, model_of: Callable[[str], CausalModel]
) -> None:
    """Cold, with a hit, with fresh frames in any order, and on frames that other blocks and states had before."""
    spec = rig.model.spec
    virtual = Rig(model_of(name), frames=rig.pool.capacity, max_step_tokens=40)
    expected = [Cached(virtual, prompt_of(seed)) for seed in range(2)]
    virtual.run()
    first = Cached(rig, prompt_of(0), keep=(2, 5))
    rig.run()
    again = first.resume(5)
    rig.run()
    assert first.tokens == rig.tokens[again] == expected[0].tokens
    exact = 0 if steady(name) else LOGPROBS
    assert first.logprobs == pytest.approx(expected[0].logprobs, rel=0, abs=exact)
    assert logprobs(rig, again) == pytest.approx(first.logprobs, rel=0, abs=exact)
    rig.free(rig.tier.allocated().tolist())
    taken = [rig.frames(rig.block_frames) for _ in range(9)]  # so that what comes now lies elsewhere
    for frames in taken[::2]:
        rig.free(frames)
    other = Cached(rig, prompt_of(1))
    rig.run()
    assert other.tokens == expected[1].tokens
    assert other.logprobs == pytest.approx(expected[1].logprobs, rel=0, abs=exact)
    for pages in pages_of(rig):
        assert not pages.users and not pages.shared
    rig.kv.forget(range(rig.pool.capacity))
    assert not pages_of(rig)[0].window._mapped.any()
    assert spec.groups.alone or len(pages_of(rig)) == len(spec.groups.shapes)
    virtual.close()


def test_beams_of_a_model_with_a_state_are_refused(name: str, rig: Rig) -> None:
    spec = rig.model.spec
    if spec.state_frames:
        beams = Cached(rig, prompt_of(1), beam_search=BeamSearch(width=2), logprobs=None)
        assert "are not searched with beams" in rig.done[beams.id].detail


@pytest.mark.parametrize("kv", ["paged"])
def test_beams_on_block_tables_find_what_they_find_on_virtual_tensors(
    name: str, rig: Rig, model_of: Callable[[str], CausalModel]
) -> None:
    if rig.model.spec.state_frames:
        pytest.skip("a model with a state")
    virtual = Rig(model_of(name), frames=rig.pool.capacity, max_step_tokens=40)
    found = []
    for each in (rig, virtual):
        frames = each.frames(blocks_needed(PROMPT, NEW, 2, BLOCK) * each.block_frames)
        search = each.start(prompt_of(9), frames=frames, max_tokens=NEW, beam_search=BeamSearch(width=2))
        each.run()
        found.append(each.done[search].beams[0].tokens)
    assert found[0] == found[1] and len(found[0]) == NEW
    virtual.close()


@pytest.mark.parametrize("name", ["zamba2"], indirect=True)
def test_a_model_that_cannot_be_run_is_refused(name: str, directory_of: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="calls attention 2 times in 1 layers"):
        read_model_spec(WorkerSettings(model=str(directory_of(name))))


def test_layers_that_read_the_keys_and_values_of_others_keep_none(directory_of: Callable[[str], Path]) -> None:
    spec = read_model_spec(WorkerSettings(model=str(directory_of("gemma3n_text")), block_tokens=BLOCK))
    window, full = spec.groups.attention
    assert (window.layers, window.readers, full.layers, full.readers) == ((0,), ((2, 0),), (1,), ((3, 1),))
    assert places(spec.groups.attention) == {0: (0, 0), 1: (1, 0), 2: (0, 0), 3: (1, 0)}


def test_a_layer_that_sees_more_than_the_layer_whose_keys_it_reads_is_refused() -> None:
    register_probe()
    with torch.device("meta"):
        config = tiny_config(
            WINDOWED["gemma3n_text"][0], GROUP_SIZES, sliding_window=WINDOW, **WINDOWED["gemma3n_text"][1]
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation=PROBE_NAME).eval()
    model.model.layers[3].self_attn.layer_type = "sliding_attention"
    with pytest.raises(ModelError, match="layer 0, with a window of 21 tokens, with layer 3, with full attention"):
        probe(model, 100)


def test_groups_are_named_and_share_frames(model_of: Callable[[str], CausalModel]) -> None:
    shapes = model_of("llama4_text").spec.groups.shapes
    assert [(shape.name, shape.rule, shape.layers) for shape in shapes] == [
        ("chunks-48", ChunkedWindow(48), 3),
        ("full", None, 1),
    ]
    shapes = model_of("gemma2").spec.groups.shapes
    assert [(shape.name, shape.layers, shape.frames) for shape in shapes] == [("window-21", 1, 1), ("full", 1, 1)]
    jamba = model_of("jamba").spec
    full, state = jamba.groups.shapes
    assert (full.name, state.name, state.rule) == ("full", "state", RecurrentState())
    assert jamba.groups.frame_bytes * state.frames >= jamba.groups.state.layout.nbytes
    assert jamba.groups.frame_bytes * full.frames == jamba.geometry.block_bytes


def pages_of(rig: Rig) -> list[Pages]:
    if isinstance(rig.kv, PagedKv):
        return [rig.kv.pages]
    states = [] if rig.kv._states is None else [rig.kv._states.pages]
    return [*(memory.pages for memory in rig.kv._memories), *states]


def content(rig: Rig, frame: int) -> torch.Tensor:
    nbytes = rig.pool.frame_bytes
    return rig.pool._window.tensor((nbytes,), torch.uint8, offset=frame * nbytes)


def sequence_tokens(rig: Rig, request: int) -> int:
    return int(rig.engine._runs[request].computed)


@pytest.mark.parametrize(
    ("window", "asked", "kept"), [(None, 16, None), (64, 16, 64 + 112), (64, 64, 64 + 64), (64, 128, 64), (64, 96, 160)]
)
def test_of_windowed_layers_a_gpu_keeps_what_its_kernels_read(window: int | None, asked: int, kept: int | None) -> None:
    layers = [AttentionLayer(0, 8, 8, 128), AttentionLayer(1, 8, 8, 128, window)]
    groups = plan_groups(
        layers * 32,
        None,
        dtype="bfloat16",
        block_tokens=asked,
        layout="token",
        max_tokens=512,
        chunk_bytes=None,
        on_cuda=True,
    )
    assert groups.block_tokens == asked
    rule = groups.attention[-1].rule
    assert (rule and rule.tokens) == kept
    assert kept is None or groups.needs[1].rule == rule
    assert all(group.geometry.block_bytes % CUDA_CHUNK_BYTES == 0 for group in groups.attention)


def test_the_baseline_has_pages_of_one_size_and_a_state_after_each_block() -> None:
    """As vLLM lays Jamba out: blocks as long as the largest state, and recurrent layers a page each."""
    states = StateLayout([StateShape((256, 4), torch.float32, (256, 32), torch.float32)] * 7)
    assert states.layer_bytes == 36 << 10

    def groups(by_rule: bool, attention: int = 1) -> KvGroups:
        layers = [AttentionLayer(number, 4, 1, 32) for number in range(attention)]
        return plan_groups(
            layers,
            states,
            dtype="float32",
            block_tokens=16,
            layout="token",
            max_tokens=4096,
            chunk_bytes=None,
            on_cuda=False,
            by_rule=by_rule,
        )

    one, by_rule = groups(False), groups(True)
    assert (one.block_tokens, one.frame_bytes) == (144, 36 << 10), (
        "a token is 256 bytes: 144 of them are a state's 36 KiB"
    )
    assert [(shape.rule, shape.frames) for shape in one.shapes] == [(None, 1), (RecurrentState(one.block_tokens), 7)]
    assert "a recurrent one, of up to 36864 bytes" in one.explain_block_tokens(16)
    assert (by_rule.block_tokens, by_rule.shapes[1].rule) == (16, RecurrentState())
    assert one.needs[1] == by_rule.needs[1] == Need(1, RecurrentState(), states.nbytes)
    three = groups(
        False, attention=3
    )  # seven recurrent layers are three groups of three, and two pages of them padding
    assert three.block_tokens == 144 and three.frame_bytes == 3 * (36 << 10)
    assert three.shapes[1].frames * three.frame_bytes - states.nbytes == 2 * (36 << 10)


@pytest.mark.parametrize("by_rule", [True, False])
def test_the_daemon_is_told_what_the_layers_need_whatever_is_kept(by_rule: bool) -> None:
    layers = [AttentionLayer(number, 4, 2, 32, window=64 if number % 3 else None) for number in range(6)]
    groups = plan_groups(
        layers,
        None,
        dtype="float32",
        block_tokens=16,
        layout="token",
        max_tokens=512,
        chunk_bytes=None,
        on_cuda=False,
        by_rule=by_rule,
    )
    layer = 16 * 512
    needs = [Need(0, None, 2 * layer), Need(int(by_rule), SlidingWindow(64), 4 * layer)]
    assert list(groups.needs) == needs
    assert groups.block_frames * groups.frame_bytes == 6 * layer
