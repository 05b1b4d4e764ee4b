"""Requests that share passes, against what the model computes of each by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from prefixd.worker.recurrent import StateSegment
from tests.worker.recurrent.flattened import GARBAGE, Request, Runner
from tests.worker.tiny_models import RECURRENT, VOCAB

# Of logits up to 10. Qwen3-Next's scan of many tokens inverts a matrix.
TOLERANCE = {name: 2e-4 for name in RECURRENT} | {"qwen3_next": 2e-3}
# The gate of its shared expert is a product with one column, whose last bits depend on the rows in the batch.
UNEVEN = ("qwen3_next",)

RunnerOf = Callable[[str], Runner]


@pytest.fixture(params=RECURRENT)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runner(name: str, runner_of: RunnerOf) -> Runner:
    return runner_of(name)


def tokens(count: int, seed: int) -> list[int]:
    return [(7 * index * index + 13 * seed + index) % (VOCAB - 1) for index in range(count)]


def assert_same_logits(name: str, ours: Request, theirs: Request) -> None:
    ours_logits, theirs_logits = torch.cat(ours.logits), torch.cat(theirs.logits)
    count = min(len(ours_logits), len(theirs_logits))
    error = (ours_logits[-count:] - theirs_logits[-count:]).abs().max()
    assert error <= (1e-4 if name in UNEVEN else 0.0)


def test_requests_in_one_pass_get_the_logits_that_each_gets_alone(name: str, runner: Runner) -> None:
    a, b, c = (runner.request(tokens(count, seed)) for seed, count in enumerate((53, 36, 4)))
    runner.run((a, 32), (b, 16))
    runner.run((b, 17), (c, 1), (a, 18))  # the end of two prompts, and one of a single token
    for _ in range(3):
        runner.run((c, 1), (a, 1), (b, 1))
    for request in (a, b, c):
        error = (torch.cat(request.logits) - runner.uncut(request.tokens)).abs().max()
        assert error <= TOLERANCE[name]


def test_one_call_for_all_sequences_of_one_token_gives_each_its_logits(
    name: str, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.layers, "_together", True)  # as on a GPU
    a, b, c = (runner.request(tokens(count, seed)) for seed, count in enumerate((36, 19, 40)))
    runner.run((a, 31), (b, 16))
    kept = torch.full_like(a.state, GARBAGE)
    runner.run((a, 1), (c, 37), (b, 1), keep=[(32, kept)])
    assert torch.equal(kept, a.state)
    runner.run((b, 1), (c, 1), (a, 1))
    runner.run((c, 1), (a, 1), (b, 1))
    for request in (a, b, c):
        logits = torch.cat(request.logits)
        assert (logits - runner.uncut(request.tokens)[: len(logits)]).abs().max() <= TOLERANCE[name]


def test_the_bits_do_not_depend_on_the_passes(name: str, runner: Runner) -> None:
    once, often, other = (runner.request(tokens(60, seed)) for seed in (1, 1, 2))
    runner.run((once, 55))
    runner.run((often, 16), (other, 33))
    runner.run((other, 1), (often, 32))
    runner.run((often, 7), (other, 1))
    for _ in range(3):
        runner.run((once, 1))
        runner.run((other, 1), (often, 1))
    if name in UNEVEN:
        assert (once.state.view(torch.float32) - often.state.view(torch.float32)).abs().max() <= 1e-4
    else:
        assert torch.equal(once.state, often.state)
    assert_same_logits(name, often, once)


def test_a_kept_state_is_resumed_in_another_batch(name: str, runner: Runner) -> None:
    first, other = (runner.request(tokens(45, seed)) for seed in (3, 4))
    kept = [torch.full_like(first.state, GARBAGE) for _ in range(3)]
    runner.run((first, 40), (other, 5), keep=[(16, kept[0]), (32, kept[1]), (40, kept[2])])
    assert torch.equal(kept[2], first.state)
    exact = runner.request(first.tokens)
    runner.run((exact, 32))
    assert torch.equal(kept[1], exact.state)
    for done, state in ((16, kept[0]), (32, kept[1])):
        resumed = resume(first, state, done)
        fresh = runner.request(tokens(20, 5))
        runner.run((fresh, 20), (resumed, 40 - done))
        assert torch.equal(resumed.state, kept[2])
        assert_same_logits(name, resumed, first)


def test_a_state_is_kept_by_a_step_of_one_token(runner: Runner) -> None:
    request = runner.request(tokens(40, 3))
    kept = torch.full_like(request.state, GARBAGE)
    runner.run((request, 31))
    runner.run((request, 1), keep=[(32, kept)])
    assert torch.equal(kept, request.state)
    runner.run((request, 1))
    assert not torch.equal(kept, request.state)


def test_a_decoded_state_is_the_prefilled_one(name: str, runner: Runner) -> None:
    decoded, prefilled = (runner.request(tokens(48, 6)) for _ in range(2))
    runner.run((prefilled, 48))
    runner.run((decoded, 36))
    for _ in range(12):
        runner.run((decoded, 1))
    layout = runner.layers.layout
    for layer in range(len(layout.shapes)):
        for ours, theirs in zip(layout.views(decoded.state, layer), layout.views(prefilled.state, layer), strict=True):
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours, theirs, atol=TOLERANCE[name], rtol=TOLERANCE[name])


def test_every_part_of_a_kept_state_matters(runner: Runner) -> None:
    request = runner.request(tokens(33, 7))
    runner.run((request, 32))
    kept = request.state.clone()
    runner.run((request, 1))
    layout = runner.layers.layout
    for layer in range(len(layout.shapes)):
        for part in (0, 1):
            altered = kept.clone()
            state = layout.views(altered, layer)[part]
            if state is not None:
                newest = state[0, :, -1:] if part == 0 else state[0].flatten(1) if state.dim() > 2 else state.mT
                # One number of each channel or head: there are heads that forget everything at once.
                largest = newest.abs().argmax(dim=1, keepdim=True)
                newest.scatter_(1, largest, -newest.gather(1, largest))
                assert (altered != kept).sum() == len(newest)  # the byte with the sign
                resumed = resume(request, altered, 32)
                runner.run((resumed, 1))
                assert not torch.equal(resumed.logits[0], request.logits[1])


def test_a_request_whose_state_is_not_a_number_disturbs_no_other(name: str, runner: Runner) -> None:
    alone, beside = (runner.request(tokens(40, 8)) for _ in range(2))
    broken = runner.request(tokens(40, 9))
    runner.run((broken, 16))
    broken.state.fill_(GARBAGE)
    runner.run((alone, 33))
    runner.run((alone, 1))
    runner.run((beside, 33), (broken, 16))
    runner.run((broken, 1), (beside, 1))
    assert broken.logits[1].isnan().any()
    assert torch.equal(beside.state, alone.state)
    assert_same_logits(name, beside, alone)


def test_nothing_outside_a_states_bytes_is_written(runner: Runner) -> None:
    request = runner.request(tokens(20, 10))
    nbytes = runner.layers.layout.nbytes
    frame = torch.full((nbytes + 128,), 7, dtype=torch.uint8)
    request.state = frame[64 : 64 + nbytes]
    runner.run((request, 16))
    runner.run((request, 1))
    assert (frame[:64] == 7).all() and (frame[64 + nbytes :] == 7).all()


@pytest.mark.parametrize("position", [0, 16, 24, 48])
def test_a_state_is_kept_only_where_a_piece_ends(position: int, runner_of: RunnerOf) -> None:
    runner = runner_of("lfm2")
    state = torch.zeros(runner.layers.layout.nbytes, dtype=torch.uint8)
    segment = StateSegment(16, 40, state, [(position, state.clone())])
    with pytest.raises(ValueError, match=rf"after {position} tokens .* \[16, 40\) .* cells of 16"):
        runner.layers.running([segment]).__enter__()


@pytest.mark.parametrize("buffer", [torch.zeros(8, dtype=torch.uint8), torch.zeros(100_000)])
def test_a_buffer_that_cannot_hold_a_state_is_refused(buffer: torch.Tensor, runner_of: RunnerOf) -> None:
    with pytest.raises(ValueError, match="of uint8"):
        runner_of("lfm2").layers.running([StateSegment(0, 1, buffer)]).__enter__()


def resume(request: Request, state: torch.Tensor, done: int) -> Request:
    """The same tokens again from a kept state, and from the keys and values of that time."""
    kv = {layer: (keys[:, :done], values[:, :done]) for layer, (keys, values) in request.kv.items()}
    return Request(request.tokens, state.clone(), done, kv)
