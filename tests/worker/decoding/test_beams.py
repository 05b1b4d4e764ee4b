"""Beam search and forks through the engine, against transformers' own `generate` and against computing it all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prefixd.base.sampling import BeamSearch
from prefixd.worker.decoding import beam_search
from prefixd.worker.decoding.beam_search import Hypothesis, RunningSearch
from prefixd.worker_protocol.protocol import Cancel, Done, blocks_needed
from prefixd_swap.errors import OutOfMemoryError

EOS = 95


@pytest.fixture(scope="session")
def generate(llama_directory: Path) -> Callable[..., list[tuple[list[int], float]]]:
    """transformers' beam search: the new tokens and the score of each sequence."""
    model = AutoModelForCausalLM.from_pretrained(llama_directory, attn_implementation="eager")

    def run(
        prompt: list[int],
        width: int,
        count: int,
        most: int,
        *,
        eos: list[int] | None = None,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
    ) -> list[tuple[list[int], float]]:
        ids = torch.tensor([prompt])
        model.generation_config.eos_token_id = eos
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=width,
                num_return_sequences=count,
                max_new_tokens=most,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                do_sample=False,
                pad_token_id=0 if eos is None else eos[0],
                output_scores=True,
                return_dict_in_generate=True,
            )
        found = []
        for sequence, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
            tokens = sequence[len(prompt) :]
            ends = [index for index, token in enumerate(tokens) if token in (eos or [])]
            found.append((tokens[: ends[0] + 1] if ends else tokens, score))
        return found

    return run


def search(rig, prompt: list[int], width: int, most: int, stop_token_ids: Sequence[int] = (), **options: Any) -> Done:
    """What a search of this width finds; `options` are those of `BeamSearch`."""
    beams = BeamSearch(width=width, **options)
    frames = rig.frames(blocks_needed(len(prompt), most, width, rig.block_tokens))
    request = rig.start(prompt, frames=frames, max_tokens=most, beam_search=beams, stop_token_ids=stop_token_ids)
    rig.run()
    rig.free(frames)
    return rig.done[request]


def check(done: Done, expected: list[tuple[list[int], float]]) -> None:
    best = done.beams[: len(expected)]
    assert [beam.tokens for beam in best] == [tokens for tokens, _ in expected]
    # A score is a sum of float32 over the tokens; a length penalty of -1 multiplies it by their number.
    assert [beam.score for beam in best] == pytest.approx([score for _, score in expected], rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize("kv", ["virtual", "paged"])
def test_beams_are_those_of_transformers(model, rig_type, generate, prompt, width, kv):
    rig = rig_type(model, frames=100, kv=kv)
    for length in (1, 16, 50):  # nothing full, a full block, two and a bit
        done = search(rig, prompt[:length], width, 24)
        check(done, generate(prompt[:length], width, width, 24))
        assert done.reason == "length"
    rig.close()


@pytest.mark.parametrize("options", [{}, {"early_stopping": True}, {"length_penalty": -1.0}, {"length_penalty": 2.0}])
def test_sequences_that_end_are_weighed_as_by_transformers(rig, generate, prompt, options):
    likely = search(rig, prompt, 4, 12).beams
    stops = [likely[0].tokens[4], likely[2].tokens[7]]
    done = search(rig, prompt, 4, 12, tuple(stops), **options)
    expected = generate(prompt, 4, 3, 12, eos=stops, **options)
    check(done, expected)
    best = done.beams[:3]
    assert [beam.reason for beam in best] == ["stop" if tokens[-1] in stops else "length" for tokens, _ in expected]
    assert ("stop" in {beam.reason for beam in best}) == (options.get("length_penalty", 1.0) < 2)


def test_beams_share_blocks_and_leave_nothing(rig, generate, prompt):
    other = rig.start([3, 1, 2], max_tokens=30)
    width, most = 4, 20
    frames = rig.frames(blocks_needed(len(prompt), most, width, rig.block_tokens))
    request = rig.start(prompt, frames=frames, max_tokens=most, beam_search=BeamSearch(width=width), seed=3)
    shared = []
    while rig.engine.runnable:
        rig.step()
        shared.append(rig.manager.physical.shared_count)
        rig.manager.check_integrity()
    assert max(shared) >= 9, "four beams read three full blocks of the prompt"
    check(rig.done[request], generate(prompt, width, 1, most))
    assert rig.filled[request] == 3 and rig.tokens[request] == []
    assert rig.manager.physical.shared_count == 0
    assert all(rig.manager.physical.references(frame) == 0 for frame in frames)
    assert rig.tokens[other] == rig.generate([3, 1, 2], max_tokens=30)


def test_a_cached_prefix_serves_a_search(rig, generate, prompt):
    first = rig.frames(4)
    rig.generate(prompt, frames=first, max_tokens=2)
    frames = [*first[:3], *rig.frames(blocks_needed(len(prompt), 10, 2, rig.block_tokens) - 3)]
    request = rig.start(prompt, frames=frames, cached_blocks=3, max_tokens=10, beam_search=BeamSearch(width=2))
    rig.steps.clear()
    rig.run()
    assert rig.steps[0].computed_tokens == 2
    check(rig.done[request], generate(prompt, 2, 1, 10))


def test_a_search_can_be_cancelled_or_run_out_of_addresses(rig, prompt, monkeypatch):
    frames = rig.frames(blocks_needed(len(prompt), 10, 3, rig.block_tokens))
    request = rig.start(prompt, frames=frames, max_tokens=10, beam_search=BeamSearch(width=3))
    rig.step()
    rig.step()
    rig.take(rig.engine.cancel(Cancel(request)))
    assert rig.done[request].reason == "cancelled" and rig.manager.physical.references(frames[0]) == 0
    again = rig.start(prompt, frames=frames, max_tokens=10, beam_search=BeamSearch(width=3))
    opened = rig.kv.open

    def one_more(frames):
        if len(rig.manager.virtual.rows) - rig.manager.virtual.idle_count > 1:
            raise OutOfMemoryError("all virtual tensors are taken")
        return opened(frames)

    monkeypatch.setattr(rig.kv, "open", one_more)
    rig.run()
    assert rig.done[again].reason == "no_memory"
    assert rig.manager.virtual.idle_count == len(rig.manager.virtual.rows)
    rig.manager.check_integrity()


@pytest.mark.parametrize(("name", "call"), [("copy", 1), ("copy", 4), ("assign", 1), ("assign", 2), ("extend", 2)])
def test_a_search_that_fails_in_the_middle_leaves_nothing(rig, prompt, monkeypatch, name, call):
    frames = rig.frames(blocks_needed(len(prompt), 20, 4, rig.block_tokens))
    real, calls = getattr(rig.kv, name), []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            raise OutOfMemoryError("no mapping left")
        return real(*arguments)

    monkeypatch.setattr(rig.kv, name, fails)
    request = rig.start(prompt, frames=frames, max_tokens=20, beam_search=BeamSearch(width=4))
    rig.run()
    assert rig.done[request].reason == "no_memory"
    assert list(rig.manager.live) == [] and not any(map(rig.manager.physical.references, frames))
    rig.manager.check_integrity()


def test_a_wide_search_with_many_stop_tokens_makes_few_sequences(monkeypatch):
    """Of thousands of candidates only those that stay become sequences, which are long."""
    made = []

    def counted(tokens, score, ended=None):
        made.append(score)
        return Hypothesis(tokens, score, ended)

    search = RunningSearch(BeamSearch(width=16), 10_000, range(1, 1001))
    search.running = [Hypothesis(tuple(range(2000)), -float(beam)) for beam in range(16)]
    monkeypatch.setattr(beam_search, "Hypothesis", counted)
    search.advance(torch.randn(16, 4000))
    assert 16 <= len(made) <= 32


def test_what_a_search_cannot_be_is_refused(rig, prompt):
    for options, message in [
        ({"beam_search": BeamSearch(width=17)}, "beam_search.width is 17"),
        ({"beam_search": BeamSearch(width=2, length_penalty=float("nan"))}, "length_penalty is nan"),
        ({"beam_search": BeamSearch(width=2), "temperature": 0.7}, "temperature is 0.7 in a beam search"),
        (
            {"beam_search": BeamSearch(width=16), "stop_token_ids": range(5)},
            "16 beams with 6 stop tokens need a vocabulary",
        ),
    ]:
        request = rig.start(prompt, frames=rig.frames(64 - rig.pool.used_count), max_tokens=1, **options)
        assert rig.done[request].reason == "error" and message in rig.done[request].detail
        rig.free(range(64))
    few = rig.start(prompt, frames=rig.frames(4), max_tokens=30, beam_search=BeamSearch(width=2))
    assert "4 frames for 2 beams; 8 are needed" in rig.done[few].detail


@pytest.mark.parametrize("kv", ["virtual", "paged"])
def test_a_fork_copies_what_its_parent_has_computed(model, rig_type, prompt, kv):
    """The tail of a prompt, which fills no block, is copied; the full blocks are shared (mapped)."""
    rig = rig_type(model, kv=kv)
    sampling = {"max_tokens": 8, "temperature": 1.0}
    alone = [rig.generate(prompt, seed=seed, **sampling) for seed in range(3)]
    frames = rig.frames(4)
    parent = rig.start(prompt, frames=frames, seed=0, **sampling)
    rig.step()
    rig.step()
    computed = sum(step.computed_tokens for step in rig.steps)
    for frame in (dirty := rig.frames(4)):
        rig.window(frame).fill_(float("nan"))
    children = [
        rig.start(prompt, frames=[*frames[:3], new], cached_blocks=3, seed=seed, fork_of=parent, **sampling)
        for seed, new in zip((1, 2), dirty, strict=False)
    ]
    rig.run()
    assert rig.steps[-1].kv.copied_blocks == 2, "the last block of each, but for the token whose logits are needed"
    assert [rig.tokens[request] for request in (parent, *children)] == alone
    assert sum(step.computed_tokens for step in rig.steps) == computed + 7 - 1 + 2 * (1 + 7)
    other = [*prompt[:49], 1, 2]
    expected = rig.generate(other, max_tokens=3)
    rig.start([7, *prompt[1:]], max_tokens=20)
    unlike = rig.start(prompt, frames=rig.frames(4), max_tokens=20)
    rig.step()
    rig.step()
    part = rig.start(other, frames=[*frames[:3], *rig.frames(1)], cached_blocks=3, max_tokens=3, fork_of=unlike)
    gone = rig.start(other, frames=[*frames[:3], *rig.frames(1)], cached_blocks=3, max_tokens=3, fork_of=parent)
    rig.run()
    assert rig.tokens[part] == rig.tokens[gone] == expected
    assert rig.steps[-1].kv.copied_blocks == 3, "for the one token that both prompts have in their last block"
    rig.close()


def test_a_fork_takes_nothing_that_follows_other_cached_tokens(rig, prompt):
    """The same tokens behind another first block have another KV."""
    frames = rig.frames(1)
    rig.generate(prompt[:16], frames=frames, max_tokens=1)
    expected = rig.generate(prompt, max_tokens=4)
    unlike = rig.start([*([7] * 16), *prompt[16:]], max_tokens=30)
    rig.step()
    rig.steps.clear()
    child = rig.start(prompt, frames=[*frames, *rig.frames(3)], cached_blocks=1, max_tokens=4, fork_of=unlike)
    rig.step()
    assert rig.steps[0].computed_tokens == 1 + 34, "a token of the other, and all behind the cached block"
    rig.run()
    assert rig.tokens[child] == expected and rig.steps[-1].kv.copied_blocks == 0


def test_blocks_needed_by_hand():
    assert blocks_needed(50, 14, 2, 16) == 4 + 2 * 1
    assert blocks_needed(50, 15, 2, 16) == 4 + 2 * 2
    assert blocks_needed(48, 1, 3, 16) == 3 + 3 * 1
    assert blocks_needed(1, 1, 1, 16) == 1 + 1
    assert np.all([blocks_needed(n, m, 1, 16) >= -(-(n + m) // 16) for n in range(1, 40) for m in range(1, 40)])
