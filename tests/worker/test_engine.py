"""Requests through the engine: what is generated, when it ends, and what happens without frames."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixd.base.sampling import BeamSearch, Sampling
from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker_protocol.protocol import Cancel, Done, Extend, Start, Step
from prefixd_swap.errors import OutOfMemoryError

EOS = 95


def test_greedy_is_the_argmax_of_transformers_logits(rig, prompt, llama_directory):
    generated = rig.generate(prompt, max_tokens=12)
    model = AutoModelForCausalLM.from_pretrained(llama_directory)
    tokens = torch.tensor([[*prompt, *generated]])
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits[0].argmax(-1)
    assert generated == expected[len(prompt) - 1 : -1].tolist()
    assert len(set(generated)) > 1
    assert rig.done[0].reason == "length"


def test_requests_side_by_side_generate_what_they_generate_alone(rig, prompt):
    prompts = [prompt[:length] for length in (1, 16, 17, 50)]
    alone = [rig.generate(each, temperature=1.0, seed=seed) for seed, each in enumerate(prompts)]
    together = [rig.start(each, temperature=1.0, seed=seed) for seed, each in enumerate(prompts)]
    rig.run()
    assert [rig.tokens[request] for request in together] == alone


def test_a_cached_prefix_gives_the_same_tokens_and_is_not_computed_again(rig, prompt):
    frames = rig.frames(4)
    expected = rig.generate(prompt, frames=frames)
    computed = sum(step.computed_tokens for step in rig.steps)
    rig.steps.clear()
    shared = [*frames[:3], *rig.frames(1)]
    assert rig.generate(prompt, frames=shared, cached_blocks=3) == expected
    assert sum(step.computed_tokens for step in rig.steps) == computed - 48


def test_blocks_filled_while_decoding_serve_as_a_prefix(rig, prompt):
    """A block of generated tokens has the bits that a prompt with these tokens would have filled it with."""
    frames = rig.frames(6)
    generated = rig.generate(prompt, frames=frames, max_tokens=40)
    longer = [*prompt, *generated[:30]]
    plain = rig.generate(longer, temperature=1.0, seed=5)
    assert rig.generate(longer, frames=[*frames[:4], *rig.frames(2)], cached_blocks=4, temperature=1.0, seed=5) == plain
    fresh = rig.tensor(rig.frames(6))
    rig.forward(longer, [Segment(fresh, 0, len(longer))], [])
    assert torch.equal(rig.tensor(frames).kv[:64], fresh.kv[:64])


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.8, "top_p": 0.9, "seed": 42},
        {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.7},
    ],
)
def test_an_interrupted_run_continues_with_the_same_tokens(rig, prompt, sampling):
    whole = rig.generate(prompt, max_tokens=20, **sampling)
    for kept in (1, 7, 19):
        rest = rig.generate([*prompt, *whole[:kept]], generated=kept, max_tokens=20, **sampling)
        assert whole[:kept] + rest == whole


def test_seed_and_temperature_decide_the_sample(rig, prompt):
    def sample(**sampling):
        return rig.generate(prompt, max_tokens=10, **sampling)

    assert sample(temperature=1.0, seed=1) == sample(temperature=1.0, seed=1)
    assert sample(temperature=1.0, seed=1) != sample(temperature=1.0, seed=2)
    assert sample(temperature=3.0, top_p=1e-6, seed=3) == sample()
    assert sample(temperature=1e-4, seed=3) == sample()


def test_penalties_are_those_of_transformers_generate(rig, prompt, llama_directory):
    model = AutoModelForCausalLM.from_pretrained(llama_directory)
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, repetition_penalty=1.5, eos_token_id=None
        )
    generated = rig.generate(prompt, max_tokens=20, repetition_penalty=1.5)
    assert generated == expected[0, len(prompt) :].tolist()
    assert generated != rig.generate(prompt, max_tokens=20)
    assert len(set(rig.generate(prompt, max_tokens=20, presence_penalty=2.0))) == 20


def test_logprobs_are_log_softmax_of_transformers_logits(rig, prompt, llama_directory):
    generated = rig.generate(prompt, max_tokens=6, temperature=2.0, logprobs=4)
    told = [logprobs for step in rig.steps for update in step.updates for logprobs in update.logprobs]
    model = AutoModelForCausalLM.from_pretrained(llama_directory)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *generated]]), use_cache=False).logits[0]
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    assert len(told) == 6
    for row, (token, logprobs) in enumerate(zip(generated, told, strict=True)):
        best = expected[row].topk(4)
        assert logprobs.chosen == pytest.approx(expected[row, token].item(), abs=1e-3)
        assert logprobs.token_ids == best.indices.tolist()
        assert logprobs.logprobs == pytest.approx(best.values.tolist(), abs=1e-3)
    rig.steps.clear()
    rig.generate(prompt)
    assert not any(update.logprobs for step in rig.steps for update in step.updates)


def test_stop_tokens_end_a_request_and_are_reported(rig, prompt):
    generated = rig.generate(prompt, max_tokens=12)
    stop = generated[5]
    expected = generated[: generated.index(stop) + 1]
    request = rig.start(prompt, max_tokens=12, stop_token_ids=(stop,))
    rig.run()
    assert rig.tokens[request] == expected
    assert rig.done[request].reason == "stop"


def test_the_models_end_of_sequence_token_ends_a_request_unless_ignored(rig, prompt):
    sampling = {"max_tokens": 12, "temperature": 5.0}
    requests = [rig.start(prompt[:3], seed=seed, ignore_eos=False, **sampling) for seed in range(60)]
    rig.run()
    stopped = [seed for seed, request in enumerate(requests) if rig.done[request].reason == "stop"]
    assert stopped
    for seed, request in enumerate(requests):
        assert (EOS in rig.tokens[request]) == (seed in stopped)
        assert rig.tokens[request].index(EOS) == len(rig.tokens[request]) - 1 if seed in stopped else True
    first = next(seed for seed in stopped if len(rig.tokens[requests[seed]]) < 12)
    assert len(rig.generate(prompt[:3], seed=first, **sampling)) == 12


def test_one_token_ends_after_the_prompt_without_a_decode_step(rig, prompt):
    assert len(rig.generate(prompt, max_tokens=1)) == 1
    assert [step.computed_tokens for step in rig.steps] == [50]
    assert rig.filled[0] == 3


def test_the_models_length_ends_a_request(make_rig, prompt):
    rig = make_rig(max_model_tokens=60, chunk_bytes=4096)
    request = rig.start(prompt, max_tokens=100, frames=rig.frames(4))
    rig.run()
    assert len(rig.tokens[request]) == 10
    assert rig.done[request].reason == "length"


def test_prefill_is_cut_at_the_step_limit_and_decoding_goes_first(make_rig):
    rig = make_rig(max_step_tokens=32, chunk_bytes=4096)
    decoding = rig.start([1, 2, 3], max_tokens=20)
    rig.step()
    rig.start(list(range(90)), max_tokens=1)
    rig.start(list(range(40)), max_tokens=1)
    rig.steps.clear()
    rig.run()
    assert [step.computed_tokens for step in rig.steps][:5] == [32, 32, 32, 32, 7]
    assert all(step.updates[0].id == decoding for step in rig.steps[:5])


def test_filled_blocks_are_reported_as_they_fill(make_rig, prompt):
    rig = make_rig(max_step_tokens=20, chunk_bytes=4096)
    rig.start(prompt, max_tokens=20)
    seen = []
    while rig.engine.runnable:
        rig.step()
        seen.append(rig.filled.get(0))
    assert seen[:3] == [1, 2, 3]
    assert seen[-1] == (50 + 19) // 16


def test_a_request_without_frames_waits_and_goes_on_after_extend(rig, prompt):
    expected = rig.generate(prompt, max_tokens=30)
    request = rig.start(prompt, frames=rig.frames(2), max_tokens=30)
    other = rig.start([5, 6], max_tokens=4)
    rig.run()
    assert rig.tokens[request] == []
    assert rig.filled[request] == 2
    assert rig.done[other].reason == "length"
    assert rig.engine.step() == []
    while request not in rig.done:
        rig.take(rig.engine.extend(Extend(request, rig.frames(1))))
        rig.run()
    assert rig.tokens[request] == expected


def test_done_comes_when_nothing_uses_the_frames(rig, prompt):
    frames = rig.frames(4)
    request = rig.start(prompt, frames=frames, max_tokens=2)
    rig.step()
    rig.take(rig.engine.cancel(Cancel(request)))
    assert rig.done[request].reason == "cancelled"
    assert not rig.engine.runnable
    assert [rig.manager.physical.references(frame) for frame in frames] == [0] * 4
    assert rig.manager.unused.still_mapped(frames) == set(frames), "lazily: the next turn of this chat wants them again"
    assert rig.engine.cancel(Cancel(request)) == []
    assert rig.engine.extend(Extend(request, frames)) == []


def forced(tokens: list[int]) -> bytes:
    return np.asarray(tokens, "<u4").tobytes()


def test_forced_tokens_are_the_output_and_have_the_logprobs_and_the_kv_of_chosen_ones(rig, prompt, llama_directory):
    answer = [7, 7, 3, 91, 0, 94, 12, 50, 1, 1, 2, 60, 33, 8, 19, 4, 77, 21]
    frames = rig.frames(5)
    chosen = rig.start(prompt, max_tokens=6)  # beside it, one that chooses
    request = rig.start(prompt, max_tokens=18, frames=frames, forced_tokens=forced(answer), temperature=1.0, logprobs=2)
    rig.run()
    assert rig.tokens[request] == answer and rig.done[request].reason == "length"
    told = [logprobs for step in rig.steps for update in step.updates for logprobs in update.logprobs]
    assert rig.tokens[chosen] == rig.generate(prompt, max_tokens=6)
    model = AutoModelForCausalLM.from_pretrained(llama_directory)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    assert [each.chosen for each in told] == pytest.approx(
        [expected[row, token].item() for row, token in enumerate(answer)], abs=1e-3
    )
    assert [each.token_ids for each in told] == expected.topk(2).indices.tolist()
    fresh = rig.tensor(rig.frames(5))
    rig.forward([*prompt, *answer], [Segment(fresh, 0, 68)], [])
    assert torch.equal(rig.tensor(frames).kv[:64], fresh.kv[:64])


def test_an_interrupted_run_continues_at_its_forced_token(rig, prompt):
    answer = [9, 8, 7, 6, 5, EOS]
    for kept in (1, 5):
        tokens = [*prompt, *answer[:kept]]
        request = rig.start(tokens, generated=kept, max_tokens=6, forced_tokens=forced(answer), ignore_eos=False)
        rig.run()
        assert rig.tokens[request] == answer[kept:] and rig.done[request].reason == "stop"


def start_message(**changes: object) -> Start:
    fields: dict[str, object] = {
        "id": 0,
        "tokens": np.arange(20, dtype="<u4").tobytes(),
        "generated": 0,
        "cached_blocks": 0,
        "frames": [0, 1],
        "sampling": Sampling(max_tokens=4),
    }
    return Start(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": b""}, "0 bytes"),
        ({"tokens": b"abc"}, "3 bytes"),
        ({"tokens": np.array([1, 96], "<u4").tobytes()}, "96 is outside"),
        ({"tokens": np.zeros(513, "<u4").tobytes()}, "513 tokens"),
        ({"generated": 20}, "generated=20"),
        ({"cached_blocks": 2}, "leave at least one token"),
        ({"cached_blocks": 3}, "cached_blocks=3 with 2 frames"),
        ({"frames": [0, 10**6]}, "cannot be mapped"),
        ({"frames": list(range(40))}, "cannot be mapped"),
        ({"sampling": Sampling(max_tokens=0)}, "max_tokens is 0"),
        ({"sampling": Sampling(max_tokens=1, temperature=-1.0)}, "temperature is -1"),
        ({"sampling": Sampling(max_tokens=1, top_p=-0.1)}, "top_p is -0.1"),
        ({"sampling": Sampling(max_tokens=1, top_k=-1)}, "top_k is -1"),
        ({"sampling": Sampling(max_tokens=1, min_p=1.5)}, "min_p is 1.5"),
        ({"sampling": Sampling(max_tokens=1, repetition_penalty=-1.0)}, "repetition_penalty is -1"),
        ({"sampling": Sampling(max_tokens=1, presence_penalty=float("nan"))}, "presence_penalty is nan"),
        ({"sampling": Sampling(max_tokens=1, frequency_penalty=float("inf"))}, "frequency_penalty is inf"),
        ({"sampling": Sampling(max_tokens=1, logprobs=21)}, "logprobs is 21"),
        ({"sampling": Sampling(max_tokens=2, forced_tokens=forced([1]))}, "1 forced tokens with max_tokens=2"),
        ({"sampling": Sampling(max_tokens=1, forced_tokens=forced([96]))}, "forced token 96 is outside"),
        (
            {"sampling": Sampling(max_tokens=1, forced_tokens=forced([1]), beam_search=BeamSearch(width=2))},
            "forced_tokens and beam_search exclude each other",
        ),
        (
            {"sampling": Sampling(max_tokens=3, forced_tokens=forced([18, 20, 1])), "generated": 2},
            "the 2 generated tokens are not the first",
        ),
    ],
)
def test_a_request_that_cannot_run_says_why_and_leaves_nothing_behind(rig, changes, message):
    (done,) = rig.engine.start(start_message(**changes))
    assert done.reason == "error"
    assert message in done.detail
    assert not rig.engine.runnable
    assert rig.generate([1, 2, 3])


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(rig, prompt):
    request = rig.start(prompt)
    (done,) = rig.engine.start(start_message(id=request))
    assert done.reason == "error"
    rig.run()
    assert len(rig.tokens[request]) == 8


def test_logits_that_are_not_finite_end_the_request_alone(rig, prompt):
    frames = rig.frames(5)
    rig.generate(prompt, frames=frames)
    tensor = rig.tensor(frames)
    tensor.kv[3] = float("nan")
    broken = rig.start(prompt, frames=[frames[0], *rig.frames(3)], cached_blocks=1)
    healthy = rig.start(prompt)
    rig.run()
    assert rig.done[broken].reason == "error" and rig.done[broken].not_finite
    assert broken not in rig.filled, "the daemon would keep the two blocks that it has filled for others"
    assert rig.done[healthy].reason == "length"


def test_without_mappings_a_request_is_refused_and_the_others_go_on(rig, prompt, monkeypatch):
    """`no_memory` is another answer than `error`: the daemon may send the request again when others have ended."""
    expected = rig.generate(prompt, max_tokens=4)
    rig.done.clear()
    running = rig.start(prompt, max_tokens=4)

    def nothing_left(*_):
        raise OutOfMemoryError("the process has too many mappings; raise that limit")

    with monkeypatch.context() as patch:
        patch.setattr(rig.manager, "create", nothing_left)
        refused = rig.start(prompt, max_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr(rig.manager, "extend", nothing_left)
        unmapped = rig.start(prompt, max_tokens=4)
    assert [(done.id, done.reason) for done in rig.done.values()] == [(refused, "no_memory"), (unmapped, "no_memory")]
    assert all("raise that limit" in done.detail for done in rig.done.values())
    rig.run()
    assert rig.tokens[running] == expected
    assert rig.generate(prompt, max_tokens=4) == expected


def test_the_next_requests_are_taken_while_a_pass_is_computed(rig, prompt):
    """As on a GPU, where `step` returns to the host long before the device is done."""
    expected = [rig.generate(prompt, max_tokens=4), rig.generate([5, 6, 7], max_tokens=3)]
    first = rig.start(prompt, max_tokens=4)
    gone = rig.start([1, 2], max_tokens=50)
    second: list[int] = []

    def meanwhile():
        if not second:
            second.append(rig.start([5, 6, 7], max_tokens=3))
            assert rig.engine.cancel(Cancel(gone)) == [], "its memory is being used"

    rig.take(rig.engine.step(meanwhile))
    assert rig.done[gone].reason == "cancelled" and len(rig.tokens[gone]) == 1
    while rig.engine.runnable:
        rig.take(rig.engine.step(meanwhile))
    assert [rig.tokens[first], rig.tokens[second[0]]] == expected


def test_passes_without_a_sampled_token_are_reported_with_the_next_that_has_one(make_rig, prompt, monkeypatch):
    """On a GPU nobody waits for them."""
    rig = make_rig(max_step_tokens=20, chunk_bytes=4096)
    waits: list[int] = []
    monkeypatch.setattr(type(rig.model), "asynchronous", True)
    monkeypatch.setattr(rig.model, "synchronize", lambda: waits.append(len(rig.steps)))
    request = rig.start(prompt, max_tokens=2)
    rig.step()
    rig.step()
    assert rig.steps == [] and rig.engine.runnable
    rig.step()
    assert [step.computed_tokens for step in rig.steps] == [50]
    assert [update.filled_blocks for update in rig.steps[0].updates] == [1, 2, 3]
    assert not waits, "the sampled token has waited"
    rig.run()
    other = rig.start(prompt, max_tokens=2)
    rig.step()
    messages = rig.engine.cancel(Cancel(other))
    assert [type(message) for message in messages] == [Step, Done], "an end is told after what was filled before it"
    assert not waits, "the device is done with its frames, and so with the pass"
    rig.take(messages)
    assert rig.filled[other] == 1 and rig.done[other].reason == "cancelled"
    assert rig.done[request].reason == "length"


def test_flush_reports_what_passes_did_only_when_the_device_has_done_it(make_rig, prompt, monkeypatch):
    rig = make_rig(max_step_tokens=20, chunk_bytes=4096)
    waits: list[int] = []
    monkeypatch.setattr(type(rig.model), "asynchronous", True)
    monkeypatch.setattr(rig.model, "synchronize", lambda: waits.append(len(rig.engine._passes)))
    request = rig.start(prompt)
    rig.step()
    rig.step()
    assert rig.steps == [] and not waits
    rig.take(rig.engine.flush())
    assert waits == [2], "before they are reported"
    assert rig.filled[request] == 2 and sum(step.computed_tokens for step in rig.steps) == 40
    assert rig.engine.flush() == [] and waits == [2], "nothing is left to wait for"
