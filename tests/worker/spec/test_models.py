"""Every family of models that the worker runs, against transformers' own forward pass and `generate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker.model import CausalModel, load_model
from prefixd.worker.recurrent.experts import PROBE_EXPERTS, STEADY_EXPERTS
from prefixd.worker.spec.model_spec import ModelSpec, read_model_spec
from prefixd.worker.spec.probe import PROBE_NAME
from prefixd.worker_protocol.errors import ModelError
from prefixd.worker_protocol.worker_settings import WorkerSettings
from tests.worker.tiny_models import EOS, FAMILIES, VOCAB, save_tiny

TOLERANCE = 1e-4  # of logits of about 10, in float32: sums in another order


class Tiny:
    """A family's model, as the worker loads it and as transformers does."""

    def __init__(self, name: str, directory: Path) -> None:
        self.family = FAMILIES[name]
        self.directory = save_tiny(directory, name)
        self.spec = spec_of(self.directory)
        self.model: CausalModel = load_model(self.spec)
        self.reference = load_reference(self.directory)


def spec_of(directory: Path, **settings: object) -> ModelSpec:
    return read_model_spec(WorkerSettings(model=str(directory), **{"chunk_bytes": 4096, **settings}))


def load_reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=dtype).eval()


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, EOS, count).tolist()


def logits_of(reference: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def greedy(reference: Any, prompt: list[int], count: int, eos: list[int] | None = None) -> list[int]:
    ids = torch.tensor([prompt])
    reference.generation_config.eos_token_id = eos
    with torch.inference_mode():
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    yield Tiny(request.param, tmp_path_factory.mktemp(request.param))


def test_the_shape_of_attention_is_read(tiny):
    spec, family = tiny.spec, tiny.family
    assert spec.geometry.layers == 2
    assert (spec.attention[0].query_heads, spec.geometry.kv_heads) == (family.query_heads, family.kv_heads)
    assert spec.geometry.head_dim == family.head_dim
    assert (spec.vocab_size, spec.max_model_tokens, spec.eos_token_ids) == (VOCAB, 256, (EOS,))
    assert spec.parameters == sum(parameter.numel() for parameter in tiny.reference.parameters())
    assert spec.architecture == type(tiny.reference).__name__


def test_the_probe_leaves_no_trace_and_experts_are_steady(tiny):
    chosen = [getattr(tiny.spec.config, f"_{kind}_implementation", None) for kind in ("attn", "experts")]
    assert not {PROBE_NAME, PROBE_EXPERTS} & set(chosen)
    experts = getattr(tiny.model._model.config, "_experts_implementation", None)
    assert (experts == STEADY_EXPERTS) == ("num_experts_per_tok" in tiny.family.kwargs)


def test_logits_of_cut_and_cached_prompts_in_one_batch(tiny, make_rig):
    """Three requests: the rest of a prompt whose start is computed, a prompt on another's KV, and a whole prompt."""
    rig = make_rig(tiny.model)
    block = rig.block_tokens
    prefix = random_tokens(1, 2 * block)
    prompts = [prefix + random_tokens(2, 19), prefix + random_tokens(3, 1), random_tokens(4, 33)]
    shared = rig.frames(2)
    tensors = [rig.tensor([*shared, *rig.frames(rig.blocks(19))]), rig.tensor([*shared, *rig.frames(1)])]
    tensors.append(rig.tensor(rig.frames(rig.blocks(33))))
    rig.logits(tensors[0], prompts[0][: 2 * block + 5], cuts=[block - 3])
    starts = [2 * block + 5, 2 * block, 0]
    segments = [Segment(t, start, len(p)) for t, start, p in zip(tensors, starts, prompts, strict=True)]
    flat = [token for prompt, start in zip(prompts, starts, strict=True) for token in prompt[start:]]
    ours = rig.forward(flat, segments, range(len(flat)))
    theirs = [logits_of(tiny.reference, p)[start:] for p, start in zip(prompts, starts, strict=True)]
    torch.testing.assert_close(ours, torch.cat(theirs), rtol=TOLERANCE, atol=TOLERANCE)
    assert ours.abs().max() > 1, "logits are too small to tell models apart"


def test_bits_do_not_depend_on_the_cache_nor_on_the_batch(tiny, make_rig):
    rig = make_rig(tiny.model)
    block = rig.block_tokens
    count = 3 * block + 9
    tokens = random_tokens(5, count)
    frames = rig.frames(rig.blocks(count))
    whole = rig.logits(rig.tensor(frames), tokens, cuts=[])
    cut = rig.logits(rig.tensor(rig.frames(rig.blocks(count))), tokens, cuts=[7, block, 2 * block + 1, count - 1])
    assert torch.equal(cut, whole)
    for cached, others in ((1, 1), (2, 40), (3, 23)):
        start = cached * block
        tensor = rig.tensor([*frames[:cached], *rig.frames(rig.blocks(count) - cached)])
        neighbour = rig.tensor(rig.frames(rig.blocks(others)))
        segments = [Segment(neighbour, 0, others), Segment(tensor, start, count)]
        batch = [*random_tokens(cached, others), *tokens[start:]]
        assert torch.equal(rig.forward(batch, segments, range(others, len(batch))), whole[start:])


def test_greedy_tokens_are_those_of_generate(tiny, make_rig):
    rig = make_rig(tiny.model, max_step_tokens=32)
    prompts = [random_tokens(seed, length) for seed, length in ((6, 3), (7, 40), (8, 65))]
    requests = [rig.start(prompt, max_tokens=20) for prompt in prompts]
    rig.run()
    expected = [greedy(tiny.reference, prompt, 20) for prompt in prompts]
    assert [rig.tokens[request] for request in requests] == expected
    assert len({token for tokens in expected for token in tokens}) > 10


def test_generation_ends_at_any_of_several_end_tokens(tmp_path, make_rig):
    save_tiny(tmp_path, "qwen2")
    prompt = random_tokens(9, 12)
    free = greedy(load_reference(tmp_path), prompt, 24)
    end = next(token for index, token in enumerate(free) if index >= 5 and token not in free[:index])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, end]}))
    model = load_model(spec_of(tmp_path))
    assert model.spec.eos_token_ids == (EOS, end)
    rig = make_rig(model)
    ours = rig.generate(prompt, max_tokens=24, ignore_eos=False)
    assert ours == greedy(load_reference(tmp_path), prompt, 24, eos=[EOS, end])
    assert ours == free[: free.index(end) + 1]


@pytest.mark.parametrize("name", ["gemma", "qwen3_moe"])
def test_bfloat16_weights_run_in_float32_on_a_cpu_or_as_told(name, tmp_path, make_rig):
    save_tiny(tmp_path, name)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tokens = random_tokens(10, 60)
    for dtype, expected, tolerance in (("auto", torch.float32, TOLERANCE), ("bfloat16", torch.bfloat16, 0.05)):
        model = load_model(spec_of(tmp_path, dtype=dtype))
        assert model.spec.geometry.dtype == str(expected).removeprefix("torch.")
        rig = make_rig(model)
        frames = rig.frames(rig.blocks(60))
        ours = rig.logits(rig.tensor(frames), tokens, cuts=[]).float()
        theirs = logits_of(load_reference(tmp_path, expected), tokens).float()
        assert theirs.abs().max() > 1
        assert float((ours - theirs).norm() / theirs.norm()) < tolerance
        start = rig.block_tokens
        resumed = rig.logits(rig.tensor([frames[0], *rig.frames(rig.blocks(60) - 1)]), tokens, cuts=[], start=start)
        assert torch.equal(resumed.float(), ours[start:])


def test_sharded_weights(tmp_path):
    save_tiny(tmp_path, "mixtral", max_shard_size="50KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    spec = spec_of(tmp_path)
    load_model(spec)
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(spec)
    shards[1].unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(spec)


def test_a_tokenizer_is_not_needed(tmp_path, make_rig: Callable[..., Any]):
    save_tiny(tmp_path, "llama")
    assert not list(tmp_path.glob("*token*"))
    assert len(make_rig(load_model(spec_of(tmp_path))).generate([1, 2, 3], max_tokens=4)) == 4
