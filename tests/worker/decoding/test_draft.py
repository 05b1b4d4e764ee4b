"""A draft model beside the model: the same tokens in fewer passes, and one memory for both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from prefixd.base.sampling import BeamSearch
from prefixd.worker.attention.choice.backend_choice import choose_attention
from prefixd.worker.model import CausalModel, load_model
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.errors import ModelError
from prefixd.worker_protocol.protocol import Extend, passed_blocks
from prefixd.worker_protocol.worker_settings import WorkerSettings
from tests.slow import slow_but
from tests.worker.conftest import EOS, VOCAB, Rig, tiny_llama_config
from tests.worker.tiny_models import GROUP_SIZES, build_grouped, build_recurrent

BLOCK = 16
NEW = 40
MOST = 4
TARGETS = ["llama", "gemma3_text", "deepseek_v2"]
DRAFTS = ["itself", "noised", "stranger"]
NOISE = {"llama": 0.01, "gemma3_text": 0.02, "deepseek_v2": 0.02}
FRAMES = 420
REQUESTS = 10

Load = Callable[..., CausalModel]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a model, and of its drafts: "llama", "llama/noised"."""

    def build(name: str) -> Any:
        target, _, kind = name.partition("/")
        if kind == "stranger":
            torch.manual_seed(23)
            sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
            if target == "llama":
                return LlamaForCausalLM(tiny_llama_config(**sizes))
            return LlamaForCausalLM(LlamaConfig(**{**GROUP_SIZES, **sizes}))
        if target == "llama":
            torch.manual_seed(7)
            model: Any = LlamaForCausalLM(tiny_llama_config())
        else:
            model = build_grouped(target)
        if kind == "noised":
            torch.manual_seed(29)
            for parameter in model.parameters():
                parameter.data += NOISE[target] * parameter.std() * torch.randn_like(parameter)
        return model

    @cache
    def save(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name.replace("/", "-"))
        build(name.removesuffix("/itself")).save_pretrained(directory)
        return directory

    return save


@pytest.fixture(scope="module")
def load(directory_of: Callable[[str], Path]) -> Load:
    """A model, alone or with one of its drafts."""

    @cache
    def load(target: str, draft: str | None = None, most: int = MOST) -> CausalModel:
        drafts = {} if draft is None else {"draft_model": str(directory_of(f"{target}/{draft}")), "draft_tokens": most}
        settings = WorkerSettings(model=str(directory_of(target)), block_tokens=BLOCK, **drafts)
        return load_model(read_model_spec(settings))

    return load


@pytest.fixture
def rig_of(load: Load) -> Iterator[Callable[..., Rig]]:
    """Rigs in whose memory every number is a NaN before it is written."""
    rigs: list[Rig] = []

    def make(target: str, draft: str | None = None, most: int = MOST, frames: int = FRAMES) -> Rig:
        model = load(target, draft, most)
        rig = Rig(model, frames=frames, max_step_tokens=40, requests=REQUESTS)
        frame_bytes = model.spec.groups.frame_bytes
        rig.pool._window.tensor((frames * frame_bytes,), torch.uint8).fill_(0xFF)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.close()


def prompt_of(seed: int, tokens: int = 50) -> list[int]:
    return np.random.default_rng(seed).integers(3, 90, tokens).tolist()


def logprobs_of(rig: Rig, request: int) -> list[tuple[float, list[int], list[float]]]:
    return [
        (told.chosen, told.token_ids, told.logprobs)
        for step in rig.steps
        for update in step.updates
        if update.id == request
        for told in update.logprobs
    ]


def passes(rig: Rig) -> int:
    return sum(step.passes for step in rig.steps)


def check_pool(rig: Rig) -> None:
    for manager in rig.managers:
        manager.check_integrity()


MIXES: list[dict[str, Any]] = [
    {"max_tokens": NEW},
    {"max_tokens": NEW, "logprobs": 3},
    {"max_tokens": NEW, "temperature": 1.0, "seed": 3, "logprobs": 0},
    {"max_tokens": 31, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 4},
    {"max_tokens": NEW, "repetition_penalty": 1.3, "frequency_penalty": 0.6, "presence_penalty": 0.2},
    {"max_tokens": NEW, "repetition_penalty": 1.2, "temperature": 1.0, "seed": 9, "logprobs": 2},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 5, "temperature": 1.0, "seed": 11},  # behind 76 tokens: the last one computed fills a block
]


def run_mix(rig: Rig) -> list[tuple[list[int], list[Any], str, int]]:
    """Requests of several kinds side by side: the tokens, logprobs, ends and filled blocks."""
    requests = [rig.start(prompt_of(seed, 20 + 7 * seed), **mix) for seed, mix in enumerate(MIXES)]
    while rig.engine.runnable:
        rig.step()
        check_pool(rig)
    return [(rig.tokens[each], logprobs_of(rig, each), rig.done[each].reason, rig.filled[each]) for each in requests]


@pytest.mark.parametrize("target", slow_but(["gemma3_text"], TARGETS))
@pytest.mark.parametrize("draft", slow_but(["noised"], DRAFTS))
def test_tokens_and_logprobs_are_those_of_the_model_alone(rig_of: Callable[..., Rig], target: str, draft: str) -> None:
    alone, both = rig_of(target), rig_of(target, draft)
    assert run_mix(both) == run_mix(alone)
    proposed = sum(step.proposed_tokens for step in both.steps)
    accepted = sum(step.accepted_tokens for step in both.steps)
    assert sum(step.proposed_tokens for step in alone.steps) == 0
    share = accepted / proposed
    if draft == "itself":
        assert share == 1.0
        assert passes(both) < 0.5 * passes(alone)
    elif draft == "noised":
        assert 0.2 < share < 1.0
        assert passes(both) < 0.8 * passes(alone)
    else:
        assert share < 0.2
        # What is proposed counts towards the tokens of a step, so prompts take a few passes more.
        assert passes(both) < 1.2 * passes(alone)


@pytest.mark.parametrize("most", [1, 4, 20])
def test_passes_with_the_model_itself_as_its_draft(rig_of: Callable[..., Rig], most: int) -> None:
    rig = rig_of("llama", "itself", most)
    rig.generate(prompt_of(1, 16), max_tokens=1 + 42)
    assert passes(rig) == 1 + -(-42 // (most + 1))


@pytest.mark.slow
def test_forced_tokens_are_the_output_and_the_draft_does_not_know_them(rig_of: Callable[..., Rig]) -> None:
    """What the draft proposes tells how often it would be right on a given answer."""
    alone, both = rig_of("llama"), rig_of("llama", "itself", 4)
    chosen = alone.generate(prompt_of(3), max_tokens=NEW)
    for answer in (chosen, [*chosen[:9], (chosen[9] + 1) % EOS, *chosen[10:]], [5] * NEW):
        both.steps.clear()
        forced = np.asarray(answer, "<u4").tobytes()
        assert both.generate(prompt_of(3), max_tokens=NEW, forced_tokens=forced) == answer
        proposed = sum(step.proposed_tokens for step in both.steps)
        accepted = sum(step.accepted_tokens for step in both.steps)
        assert proposed > 0 and (accepted == proposed) == (answer == chosen)


@pytest.mark.slow
def test_a_stop_token_in_the_middle_of_a_round_ends_the_request_there(rig_of: Callable[..., Rig]) -> None:
    alone, both = rig_of("llama"), rig_of("llama", "itself")
    prompt = prompt_of(2)
    generated = alone.generate(prompt, max_tokens=NEW, temperature=1.0, seed=5)
    for stop in dict.fromkeys(generated[2:12]):
        sampling = {"max_tokens": NEW, "temperature": 1.0, "seed": 5, "stop_token_ids": (stop,), "logprobs": 1}
        expected = generated[: generated.index(stop) + 1]
        request = both.start(prompt, **sampling)
        both.run()
        assert both.tokens[request] == expected
        assert len(logprobs_of(both, request)) == len(expected)
        assert both.done[request].reason == "stop"
    for seed in range(20):
        sampling = {"max_tokens": 30, "temperature": 4.0, "seed": seed, "ignore_eos": False}
        expected = alone.generate(prompt, **sampling)
        assert both.generate(prompt, **sampling) == expected
        assert EOS not in expected[:-1]


@pytest.mark.parametrize("target", ["llama", "gemma3_text"])
@pytest.mark.parametrize("draft", ["itself", "noised"])
@pytest.mark.slow
def test_a_cached_prefix_serves_both_models(rig_of: Callable[..., Rig], target: str, draft: str) -> None:
    """Blocks of prompt and output, as they were told to be filled, and of windows no more than their rules need."""
    alone, both = rig_of(target), rig_of(target, draft)
    spec = both.model.spec
    prompt = prompt_of(3, 70)
    frames = both.frames(both.blocks(70 + NEW) * spec.block_frames)
    first = both.start(prompt, frames=frames, max_tokens=NEW)
    both.run()
    whole = prompt + both.tokens[first]
    assert whole == prompt + alone.generate(prompt, max_tokens=NEW)
    filled = both.filled[first]
    assert filled == (len(whole) - 1) // BLOCK
    for blocks in (2, 4, filled):
        cached = []
        for block in range(blocks):
            at = block * spec.block_frames
            for group in spec.groups.attention:
                passed = block < passed_blocks(group.shape, blocks * BLOCK, BLOCK, 0)
                cached += [-1] * group.frames if passed else frames[at : at + group.frames]
                at += group.frames
        longer = whole[: blocks * BLOCK] + prompt_of(4, 9)
        fresh = both.frames((both.blocks(len(longer) + NEW) - blocks) * spec.block_frames)
        computed = sum(step.computed_tokens for step in both.steps)
        accepted = sum(step.accepted_tokens for step in both.steps)
        proposed = sum(step.proposed_tokens for step in both.steps)
        again = both.generate(longer, frames=[*cached, *fresh], cached_blocks=blocks, max_tokens=NEW)
        assert again == alone.generate(longer, max_tokens=NEW)
        proposed = sum(step.proposed_tokens for step in both.steps) - proposed
        accepted = sum(step.accepted_tokens for step in both.steps) - accepted
        computed = sum(step.computed_tokens for step in both.steps) - computed
        assert computed == 9 + NEW - 1 + proposed - accepted
        assert proposed > 0
        assert accepted == proposed if draft == "itself" else accepted > 0.2 * proposed
        check_pool(both)


@pytest.mark.parametrize("draft", ["itself", "noised"])
def test_a_block_that_was_told_to_be_filled_does_not_change_any_more(rig_of: Callable[..., Rig], draft: str) -> None:
    """The daemon gives it to others and writes it down at once: both models' KV is there, of the known tokens alone."""
    rig = rig_of("llama", draft)
    width = rig.block_frames
    requests = {seed: rig.frames(5 * width) for seed in range(4)}
    for seed, frames in requests.items():
        assert rig.start(prompt_of(seed, 14 + seed), frames=frames, max_tokens=60 - seed) == seed
    told: dict[int, bytes] = {}
    size = rig.model.spec.groups.frame_bytes

    def content(frame: int) -> bytes:
        return rig.pool._window.tensor((size,), torch.uint8, offset=frame * size).numpy().tobytes()

    while rig.engine.runnable:
        rig.step()
        for request, blocks in rig.filled.items():
            for frame in requests[request][: blocks * width]:
                told.setdefault(frame, content(frame))
    assert len(told) == 4 * 4 * width
    assert all(content(frame) == then for frame, then in told.items())


@pytest.mark.parametrize("draft", ["itself", "noised"])
def test_what_the_windows_of_both_have_passed_is_not_read_again(rig_of: Callable[..., Rig], draft: str) -> None:
    """As soon as the daemon was told of tokens, it may give those frames to others."""
    alone, both = rig_of("gemma3_text"), rig_of("gemma3_text", draft)
    spec = both.model.spec
    prompt, most = prompt_of(12), 7 * BLOCK
    frames = both.frames(both.blocks(len(prompt) + most) * spec.block_frames)
    request = both.start(prompt, frames=frames, max_tokens=most)
    spoilt: set[int] = set()
    while both.engine.runnable:
        both.step()
        computed = len(prompt) + len(both.tokens[request]) - 1 if both.tokens[request] else both.filled[request] * BLOCK
        first = 0
        for group in spec.groups.attention:
            passed = passed_blocks(group.shape, computed, BLOCK, spec.hello().window_margin)
            homes = range(first, first + group.frames)
            first += group.frames
            spoilt |= {frames[block * spec.block_frames + home] for block in range(passed) for home in homes}
        for frame in spoilt:
            size = spec.groups.frame_bytes
            both.pool._window.tensor((size,), torch.uint8, offset=frame * size).fill_(0xFF)
    assert len(spoilt) >= 5 * (2 if draft == "itself" else 1)
    assert both.tokens[request] == alone.generate(prompt, max_tokens=most)
    accepted = sum(step.accepted_tokens for step in both.steps)
    proposed = sum(step.proposed_tokens for step in both.steps)
    assert accepted == proposed if draft == "itself" else accepted > 0.2 * proposed


@pytest.mark.parametrize("target", ["llama", "gemma3_text"])
def test_a_request_goes_on_with_the_frames_that_it_gets(rig_of: Callable[..., Rig], target: str) -> None:
    """Fewer tokens are proposed where memory ends, and none are lost."""
    alone, both = rig_of(target), rig_of(target, "itself")
    prompt = prompt_of(5, BLOCK - 3)
    request = both.start(prompt, frames=both.frames(both.block_frames), max_tokens=NEW)
    blocks = 1
    while request not in both.done:
        while both.engine.runnable:
            both.step()
        if request not in both.done:
            assert len(prompt) + len(both.tokens[request]) == blocks * BLOCK + 1
            both.take(both.engine.extend(Extend(request, both.frames(both.block_frames))))
            blocks += 1
    assert both.tokens[request] == alone.generate(prompt, max_tokens=NEW)


def test_the_models_length_ends_a_request(rig_of: Callable[..., Rig], directory_of: Callable[[str], Path]) -> None:
    directory = str(directory_of("llama"))
    settings = WorkerSettings(model=directory, draft_model=directory, max_model_tokens=60)
    model = load_model(read_model_spec(settings))
    rig = Rig(model, frames=64)
    request = rig.start(prompt_of(6), max_tokens=100, frames=rig.frames(4 * rig.block_frames))
    rig.run()
    assert rig.tokens[request] == rig_of("llama").generate(prompt_of(6), max_tokens=10)
    assert rig.done[request].reason == "length"
    rig.close()


@pytest.mark.parametrize("target", ["llama", "gemma3_text"])
def test_an_interrupted_run_continues_with_the_same_tokens(rig_of: Callable[..., Rig], target: str) -> None:
    alone, both = rig_of(target), rig_of(target, "noised")
    prompt, sampling = prompt_of(7), {"temperature": 0.9, "seed": 8, "frequency_penalty": 0.5, "max_tokens": 30}
    whole = alone.generate(prompt, **sampling)
    for kept in (1, 6, 29):
        assert both.generate([*prompt, *whole[:kept]], generated=kept, **sampling) == whole[kept:]


def test_a_fork_copies_what_both_models_have(rig_of: Callable[..., Rig]) -> None:
    alone, both = rig_of("llama"), rig_of("llama", "itself")
    prompt = prompt_of(8, 37)
    first = both.start(prompt, max_tokens=NEW)
    both.step()
    both.step()
    computed = sum(step.computed_tokens for step in both.steps)
    second = both.start(prompt, max_tokens=NEW, fork_of=first)
    both.step()
    assert sum(step.computed_tokens for step in both.steps) - computed == 2 * (1 + MOST)
    both.run()
    assert both.tokens[first] == both.tokens[second] == alone.generate(prompt, max_tokens=NEW)
    assert sum(step.accepted_tokens for step in both.steps) == sum(step.proposed_tokens for step in both.steps) > 0


def test_beams_are_searched_by_the_model_alone_and_leave_blocks_for_both(rig_of: Callable[..., Rig]) -> None:
    alone, both = rig_of("llama"), rig_of("llama", "itself")
    prompt, search = prompt_of(9, 40), {"beam_search": BeamSearch(width=3), "max_tokens": 12}
    found = []
    for rig in (alone, both):
        frames = rig.frames(16 * rig.block_frames)
        request = rig.start(prompt, frames=frames, **search)
        rig.run()
        found.append(rig.done[request].beams)
        assert rig.filled[request] == 2
    assert found[0] == found[1]
    fresh = both.frames(4 * both.block_frames)
    again = both.generate(prompt, frames=[*frames[: 2 * both.block_frames], *fresh], cached_blocks=2)
    assert again == alone.generate(prompt)
    assert sum(step.accepted_tokens for step in both.steps) == sum(step.proposed_tokens for step in both.steps) > 0


def test_logits_that_are_not_finite_end_the_request_with_an_error(rig_of: Callable[..., Rig], load: Load) -> None:
    rig = rig_of("llama", "itself")
    request = rig.start(prompt_of(10), max_tokens=NEW)
    rig.step()
    rig.step()
    told = len(rig.tokens[request])
    weights = rig.model._model.lm_head.weight
    kept = weights.clone()
    try:
        weights.fill_(torch.nan)
        rig.step()
    finally:
        weights.copy_(kept)
    assert (rig.done[request].reason, len(rig.tokens[request])) == ("error", told)
    assert "not finite" in rig.done[request].detail


def test_a_draft_whose_logits_are_not_finite_proposes_nothing(rig_of: Callable[..., Rig]) -> None:
    alone, both = rig_of("llama"), rig_of("llama", "noised")
    both.engine._draft._model._model.lm_head.weight.fill_(torch.nan)
    assert both.generate(prompt_of(11)) == alone.generate(prompt_of(11))
    assert sum(step.proposed_tokens for step in both.steps) == 0


_REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 3),
            "tokens": st.integers(1, 60),
            "max_tokens": st.integers(1, 25),
            "after": st.integers(0, 4),
            "temperature": st.sampled_from([0.0, 1.0]),
            "frequency_penalty": st.sampled_from([0.0, 0.5]),
            "stop_token_ids": st.sampled_from([(), tuple(range(0, VOCAB, 9))]),
        }
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=_REQUESTS, target=st.sampled_from(TARGETS[:2]), draft=st.sampled_from(DRAFTS))
@pytest.mark.slow
def test_any_mix_gives_the_tokens_of_the_model_alone(load: Load, asked: list[Any], target: str, draft: str) -> None:
    """`after`: passes that the others compute before a request comes."""
    outputs = []
    for model in (load(target), load(target, draft)):
        rig = Rig(model, frames=FRAMES, requests=REQUESTS)
        requests = []
        for each in asked:
            sampling = {key: value for key, value in each.items() if key not in ("tokens", "after")}
            requests.append(rig.start(prompt_of(each["seed"], each["tokens"]), **sampling))
            for _ in range(each["after"]):
                rig.step()
                check_pool(rig)
        while rig.engine.runnable:
            rig.step()
            check_pool(rig)
        outputs.append([(rig.tokens[each], rig.done[each].reason, rig.filled[each]) for each in requests])
        rig.close()
    assert outputs[0] == outputs[1]


# -- what is refused ------------------------------------------------------------------------------------------


def refusal(model: Path, draft: Path, **settings: Any) -> str:
    with pytest.raises(ModelError) as refused:
        spec = read_model_spec(WorkerSettings(model=str(model), draft_model=str(draft), **settings))
        choose_attention(spec, paged=settings.get("kv") == "paged")
    return str(refused.value)


def test_what_cannot_be_a_draft_is_refused_in_one_line(directory_of: Callable[[str], Path], tmp_path: Path) -> None:
    llama, gemma, stranger = directory_of("llama"), directory_of("gemma3_text"), directory_of("llama/stranger")
    text = refusal(llama, gemma)
    assert "vocabulary of 128 tokens" in text
    assert "one of 96" in text
    recurrent = tmp_path / "mamba"
    build_recurrent("mamba").save_pretrained(recurrent)
    for pair in ((llama, recurrent), (recurrent, llama)):
        assert f"model {str(recurrent)!r} has recurrent layers" in refusal(*pair)
    short = tmp_path / "short"
    AutoModelForCausalLM.from_config(tiny_llama_config(max_position_embeddings=64)).save_pretrained(short)
    assert "takes 64 tokens" in refusal(llama, short)
    assert read_model_spec(WorkerSettings(model=str(llama), draft_model=str(short), max_model_tokens=64)).draft
    assert "no config.json" in refusal(llama, tmp_path)
    assert 'worker.kv to "virtual"' in refusal(llama, stranger, kv="paged")
    text = refusal(llama, stranger, layout="layer")
    assert f"with the draft {str(stranger)!r} has 2 groups" in text
    assert 'worker.layout to "token"' in text


def test_a_draft_with_another_tokenizer_is_refused(directory_of: Callable[[str], Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(directory_of("llama"), tmp_path / "model"))
    draft = Path(shutil.copytree(model, tmp_path / "draft"))

    def write(directory: Path, vocabulary: object, **added: int) -> None:
        tokens = [{"content": content, "id": number} for content, number in added.items()]
        (directory / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}), encoding="utf-8"
        )

    settings = WorkerSettings(model=str(model), draft_model=str(draft))
    write(model, {"a": 0, "b": 1}, end=2)
    assert read_model_spec(settings).draft, "nothing to compare with"
    write(draft, [["a", -1.0], ["b", -2.0]], end=2)
    assert read_model_spec(settings).draft
    write(draft, {"a": 0, "c": 1}, end=2)
    text = refusal(model, draft)
    assert "different tokenizers: 'b' is token 1 of one of them alone" in text
    (draft / "tokenizer.json").write_text("{}")
    assert "tokenizer.json' cannot be read: KeyError" in refusal(model, draft)


def test_the_draft_is_further_groups_of_the_same_plan(load: Load) -> None:
    spec = load("gemma3_text", "stranger").spec
    assert [shape.name for shape in spec.hello().groups] == ["window-21", "full", "draft-full"]
    assert spec.draft is not None
    assert [group.name for group in spec.draft.groups.attention] == ["draft-full"]
    assert spec.block_frames == sum(group.frames for group in spec.groups.attention)
    assert spec.draft.block_tokens == spec.block_tokens
    assert spec.hello().weights_bytes > load("gemma3_text").spec.hello().weights_bytes
    mistral = load("gemma3_text", "itself").spec
    assert [shape.name for shape in mistral.hello().groups] == ["window-21", "full", "draft-window-21", "draft-full"]
